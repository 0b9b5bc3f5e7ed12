"""Every figure of the README's table and of the comparison is that of the newest run in RESULTS.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.extensions import results

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
COMPARISON = " ".join((ROOT / "docs" / "comparison.md").read_text().split())
RUNS = results.runs((ROOT / "benchmarks" / "RESULTS.md").read_text())

#: A row of the README's table: command, start of the table's caption, rows and columns of both cells, decimals shown.
PEERS, GLOO = "peers --model convnet mlp", "PyTorch DDP, gloo"
TABLE = {
    "ConvNet, 4 ranks": (PEERS, "convnet", ("clcomm", "images/s"), (GLOO, "images/s"), 0),
    "MLP, 4 ranks": (PEERS, "mlp", ("clcomm", "images/s"), (GLOO, "images/s"), 0),
    "ConvNet to 98% on MNIST, shell to shell": (
        "time_to_accuracy", "convnet, 4 ranks", ("clcomm", "seconds"), (GLOO, "seconds"), 2
    ),
    "GPT of 6 layers, 4 ranks": ("networks --model gpt", "gpt", ("clcomm", "tokens/s"), (GLOO, "tokens/s"), 0),
    "DDP's own all-reduce of 1 MiB, 2 ranks": (
        "torch_ddp --ranks 2", "An all-reduce", ("1 MiB", "clcomm ms"), ("1 MiB", "gloo ms"), 2
    ),
}  # fmt: skip


def cell(command: str, caption: str, row: str, column: str) -> float:
    """Return a number, or a ratio's median, of the newest run that has it."""
    return float(results.latest(RUNS, command, caption, row, column).split("x (")[0].replace(",", ""))


def is_shown(number: str, measured: float, decimals: int) -> bool:
    """Return whether a number of a text is the measured one, rounded to `decimals`."""
    return abs(float(number.replace(",", "")) - measured) <= 0.5 * 10.0**-decimals + 1e-9


def table_rows(text: str) -> dict[str, list[str]]:
    section = text.partition("\n## Measured\n")[2].partition("\n## ")[0]
    rows = [
        [each.strip(" *") for each in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", section, re.M)
    ]
    return {name: cells for name, *cells in rows[2:]}


@pytest.mark.parametrize("name", TABLE)
def test_the_readmes_table_is_the_newest_run(name: str) -> None:
    command, caption, ours, theirs, decimals = TABLE[name]
    shown = [re.sub(r"[^\d.,]", "", each) for each in table_rows(README)[name][:2]]
    assert is_shown(shown[0], cell(command, caption, *ours), decimals), shown
    assert is_shown(shown[1], cell(command, caption, *theirs), decimals), shown


def test_every_row_of_the_readmes_table_is_tied_to_a_run() -> None:
    rows = table_rows(README)
    assert set(rows) == set(TABLE)
    commands = [cells[2].strip("`") for cells in rows.values()]
    for (command, *_), shown in zip(TABLE.values(), commands, strict=True):
        assert shown == "the same" or command.startswith(shown.removeprefix("benchmarks."))


def test_the_readmes_product_is_the_newest_run_on_a_gpu() -> None:
    found = re.search(r"4096³ product reaches ([\d.]+) TFLOP/s where PyTorch 2.11's cuBLAS reaches ([\d.]+)", README)
    assert found is not None
    for shown, column in zip(found.groups(), ("clcomm", "PyTorch"), strict=True):
        gflops = cell("kernels --device gpu", "GFLOP/s, gemm", "GEMM NN 4096 x 4096 x 4096", column)
        assert is_shown(shown, gflops / 1e3, 1)


def to_deepspeed(size: str) -> float:
    return cell("all_reduce", "all-reduce, 2 ranks", size, "to DeepSpeed")


def of_gloo(size: str) -> float:
    return cell("torch_ddp --ranks 2", "An all-reduce", size, "less")


def to_mpi4jax(size: str) -> float:
    return cell("jax_collectives", "A call of many in a loop", size, "mpi4jax to ours")


#: What the comparison says, and whether the newest runs say so.
CLAIMS = {
    "faster than clcomm's for 4 and 16 KiB": lambda: max(map(to_deepspeed, ("4 KiB", "16 KiB"))) < 1,
    "from 64 KiB on clcomm's all-reduce was faster": lambda: (
        min(map(to_deepspeed, ("64 KiB", "256 KiB", "1 MiB", "8 MiB", "64 MiB"))) > 1
    ),
    "less than a seventh of the time through c10d's gloo, from 256 KiB to 25 MiB on 2 ranks": lambda: (
        min(map(of_gloo, ("256 KiB", "1 MiB", "4 MiB", "25 MiB"))) > 7
    ),
    "all-reduces of 64 MiB take [less time](jax.md#how-fast-and-why-this-way), those up to 4 MiB more": lambda: (
        to_mpi4jax("64 MiB") > 1 > max(map(to_mpi4jax, ("4 KiB", "64 KiB", "1 MiB", "4 MiB")))
    ),
    "clcomm's engine took a fiftieth of the time for the benchmark's ConvNet": lambda: (
        45 < cell("peers --model convnet --ranks 4", "convnet", "netcl as published", "clcomm is (range)") < 70
    ),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_the_comparisons_claims_are_the_newest_runs(claim: str) -> None:
    assert claim in COMPARISON
    assert CLAIMS[claim]()


def test_the_comparison_has_no_other_figures_of_speed() -> None:
    """A figure that is ours is in CLAIMS; those of other projects have a link in their sentence."""
    rest = COMPARISON
    for claim in CLAIMS:
        rest = rest.replace(claim, "")
    speed = r"\b(?:took|takes|faster|slower|less time|times)\b[^.|]*\b(?:\d|a third|half|tenth)"
    assert [each for each in re.split(r"(?<=[.|]) ", rest) if re.search(speed, each) and "](http" not in each] == []


def test_a_changed_figure_is_found() -> None:
    measured = cell(*TABLE["MLP, 4 ranks"][:2], *TABLE["MLP, 4 ranks"][2])
    assert is_shown("260,066", 260066.0, 0) and not is_shown("260,066", measured + 1, 0)
    assert is_shown("2.03", 2.025, 2) and not is_shown("2.03", 2.036, 2)
