"""examples.gpt as a user runs it: any number of ranks, continued, with a text of one's own, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.examples.test_examples import ROOT, end_of_run, launch, parameters, run
from tests.faults.launch import HUNG_S, clean_environment, mpiexec

#: One length of heads for all runs: each is a build of attention.
TINY = ("--layers", "2", "--width", "24", "--heads", "4", "--context", "16", "--sample", "24")


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{n} times {n} is {n * n}; äöü.\n" for n in range(500)), "utf-8")
    return str(path)


def sample_of(out: str) -> str:
    return out.partition("sample:\n")[2]


def difference(first: Path, second: Path) -> float:
    """Return the distance of two checkpoints' parameters, relative to the second's."""
    a, b = (np.concatenate([each.ravel().astype(np.float64) for each in parameters(file).values()])
            for file in (first, second))  # fmt: skip
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [0, 2, 3, 4])
def test_it_reports_on_any_number_of_ranks(tmp_path: Path, text: str, ranks: int) -> None:
    report = tmp_path / "report.json"
    out = run(
        "examples.gpt", *TINY, "--text", text, "--batch-size", "4", "--max-steps", "30", "--lr", "0.01",
        "--prompt", "7 times", "--report", str(report), "--summary", ranks=ranks,
    )  # fmt: skip
    figures = json.loads(report.read_text())
    assert (figures["world_size"], figures["model"], figures["steps"]) == (max(ranks, 1), "gpt", 30)
    assert figures["dataset"].startswith("text.txt ") and figures["settings"]["layers"] == 2
    assert figures["test_samples"] % 16 == 0 and figures["test_loss"] < 0.95 * np.log(25)
    assert re.search(r"30 steps; training loss \d\.\d+; held-out loss \d\.\d+; [\d,]+ characters/s", out)
    assert "sequences/s" in out and "images" not in out
    assert len(end_of_run(out)["gradients"]) == 5 and out.count("training loss") == 1
    assert "PackedAttention" in out  # of the summary
    shapes = [layer["output_shape"] for layer in figures["summary"]["layers"]]
    assert [16, 72] in shapes and max(each[0] for each in shapes) == 16  # of one window, in no more memory than a step
    sample = sample_of(out)
    assert sample.startswith("7 times") and len(sample.removesuffix("\n")) == len("7 times") + 24


def test_a_sample_is_written_once_the_model_knows_more_than_pairs_of_characters(text: str) -> None:
    job = ["--text", text, "--layers", "1", "--width", "24", "--heads", "2", "--context", "16", "--batch-size", "16"]
    job += ["--schedule", "constant"]
    noise, learned = (run("examples.gpt", *job, "--lr", "0.02", "--max-steps", n, "--quiet") for n in ("2", "51"))
    loss, pairs = re.search(r"no sample: the loss of (\d\.\d+) is not below (\d\.\d+)", noise).groups()
    assert float(loss) >= float(pairs) and "\nsample:" not in noise
    assert float(re.search(r"held-out loss (\d\.\d+)", learned)[1]) < float(pairs)
    assert len(sample_of(learned)) == len("\n") + 256 + len("\n") and "no sample" not in learned


#: Trains, and takes 0.2 s for each character of the sample.
SLOW_WRITER = """
import time
from clcomm.comm.watch import run
from examples import gpt
from training import text_session

drawn_token = text_session.drawn_token
def slow(*given):
    time.sleep(0.2)
    return drawn_token(*given)
text_session.drawn_token = slow
run(gpt.main)
"""


@pytest.mark.slow
def test_nobody_is_warned_of_a_rank_that_writes_a_sample(tmp_path: Path, text: str) -> None:
    (tmp_path / "slow.py").write_text(SLOW_WRITER)
    job = ["slow.py", *TINY[:-1], "80", "--text", text, "--batch-size", "4", "--max-steps", "2", "--quiet"]
    environment = clean_environment(CLCOMM_STALL_WARNING_S="8", PYTHONPATH=str(ROOT))
    ended = subprocess.run(
        [mpiexec(), "-n", "2", sys.executable, *job],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=2 * HUNG_S,
    )
    assert (ended.returncode, ended.stderr) == (0, "") and len(sample_of(ended.stdout)) == 82


@pytest.mark.slow
def test_four_ranks_train_as_one_with_all_of_their_windows(tmp_path: Path, text: str) -> None:
    job = [*TINY, "--text", text, "--no-eval", "--quiet", "--max-steps", "20", "--optimizer", "sgd", "--lr", "0.05"]
    job += ["--clip-norm", "100", "--sample", "0", "--checkpoint"]
    run("examples.gpt", *job, str(tmp_path / "four.npz"), "--batch-size", "2", ranks=4)
    run("examples.gpt", *job, str(tmp_path / "one.npz"), "--batch-size", "8")
    assert difference(tmp_path / "four.npz", tmp_path / "one.npz") < 1e-5


@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimizer", [("sgd", "0.05"), ("adamw", "0.001")])
@pytest.mark.parametrize(("ranks", "tp", "zero"), [(4, 2, "0"), (4, 2, "1"), (2, 2, "0"), (4, 4, "0")])
def test_ranks_that_divide_layers_train_as_those_that_do_not(
    tmp_path: Path, text: str, ranks: int, tp: int, zero: str, optimizer: tuple[str, str]
) -> None:
    """The text has 22 kinds of characters, of which 2 ranks have a part each and 4 have all."""
    job = [*TINY, "--text", text, "--quiet", "--max-steps", "20", "--batch-size", "4", "--clip-norm", "1"]
    job += ["--optimizer", optimizer[0], "--lr", optimizer[1], "--checkpoint"]
    divided = [str(tmp_path / "divided.npz"), "--tp", str(tp), "--zero", zero]
    found = run("examples.gpt", *job, *divided, ranks=ranks)
    expected = run("examples.gpt", *job, str(tmp_path / "whole.npz"), ranks=ranks // tp)
    assert difference(tmp_path / "divided.npz", tmp_path / "whole.npz") < 1e-4
    assert all("lm_head.weight" not in parameters(tmp_path / f"{name}.npz") for name in ("divided", "whole"))  # once
    losses = [float(re.search(r"held-out loss (\d\.\d+)", out)[1]) for out in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)
    assert len(sample_of(found)) == len(sample_of(expected))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("division", "both"),
    [
        (("--pp", "2"), ()),
        (("--pp", "3", "--micro-batches", "2", "--pp-schedule", "gpipe"), ("--grad-accumulation", "2")),
        (("--pp", "4", "--recompute"), ("--clip-norm", "0.1", "--layers", "1")),
        (("--pp", "2", "--zero", "1"), ("--grad-accumulation", "3")),
        (("--pp", "2", "--tp", "2"), ("--no-tied-head",)),
        (("--pp", "2", "--pp-schedule", "interleaved"), ("--precision", "bf16")),
        (("--pp", "2", "--check-finite"), ("--compression", "bf16", "--check-replicas", "3")),
    ],
)
def test_stages_train_as_ranks_that_have_all_layers(
    tmp_path: Path, text: str, division: tuple[str, ...], both: tuple[str, ...]
) -> None:
    """Losses, parameters and the report are those of as many ranks as there are replicas."""
    divided = int(division[1]) * (2 if "--tp" in division else 1)
    ranks, report = (4 if divided == 2 else divided), tmp_path / "report.json"
    job = [*TINY, "--text", text, "--batch-size", "6", "--quiet", "--max-steps", "12", "--lr", "0.01", *both]
    losses, samples = [], []
    for name, more, count in (("stages", [*division, "--report", str(report)], ranks), ("whole", [], ranks // divided)):
        log = tmp_path / f"{name}.csv"
        kept = ["--log-csv", str(log), "--checkpoint", str(tmp_path / f"{name}.npz")]
        samples.append(len(sample_of(run("examples.gpt", *job, *kept, *more, ranks=count))))
        losses.append([float(row.split(",")[2]) for row in log.read_text().splitlines()[1:]])
    assert len(losses[0]) == 12 and losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert difference(tmp_path / "stages.npz", tmp_path / "whole.npz") < 1e-3
    assert samples[0] == samples[1]
    stages = json.loads(report.read_text())["pipeline"]
    assert len(stages["parameter_bytes"]) == int(division[1]) and 0 < stages["bubble"] < 1
    assert min(stages["peak_activation_bytes"]) > 0


@pytest.mark.slow
def test_stages_continue_with_the_same_bits_and_on_other_divisions(tmp_path: Path, text: str) -> None:
    job = [*TINY, "--text", text, "--batch-size", "4", "--no-eval", "--quiet", "--sample", "0"]
    two = [*job, "--pp", "2", "--zero", "1", "--checkpoint"]
    run("examples.gpt", *two, str(tmp_path / "whole.npz"), "--max-steps", "8", ranks=4)
    run("examples.gpt", *two, str(tmp_path / "parts.npz"), "--max-steps", "3", ranks=4)
    resumed = ["--resume", str(tmp_path / "parts.npz"), "--max-steps", "8"]
    run("examples.gpt", *two, str(tmp_path / "same.npz"), *resumed, ranks=4)
    assert difference(tmp_path / "same.npz", tmp_path / "whole.npz") == 0
    for number, (ranks, division) in enumerate([(2, ()), (4, ("--tp", "2")), (4, ("--pp", "2", "--tp", "2"))]):
        file = tmp_path / f"{number}.npz"
        run("examples.gpt", *job, *division, "--checkpoint", str(file), *resumed, ranks=ranks)
        if number < 2:  # the third has half as many samples a step
            assert difference(file, tmp_path / "whole.npz") < 1e-3


@pytest.mark.slow
def test_a_divided_run_continues_with_the_same_bits_and_on_other_divisions(tmp_path: Path, text: str) -> None:
    job = [*TINY, "--text", text, "--batch-size", "4", "--no-eval", "--quiet", "--dropout", "0.2"]
    two = ["--tp", "2", "--checkpoint"]
    whole = run("examples.gpt", *job, *two, str(tmp_path / "whole.npz"), "--max-steps", "8", ranks=4)
    run("examples.gpt", *job, *two, str(tmp_path / "parts.npz"), "--max-steps", "3", ranks=4)
    resumed = ["--resume", str(tmp_path / "parts.npz"), "--max-steps", "8"]
    parts = run("examples.gpt", *job, *two, str(tmp_path / "same.npz"), *resumed, ranks=4)
    assert sample_of(whole) == sample_of(parts) != ""
    assert difference(tmp_path / "same.npz", tmp_path / "whole.npz") == 0
    run("examples.gpt", *job, "--checkpoint", str(tmp_path / "other.npz"), *resumed, ranks=2)
    assert difference(tmp_path / "other.npz", tmp_path / "whole.npz") < 1e-3
    other = launch("examples.gpt", *job, "--checkpoint", str(tmp_path / "other.npz"), "--resume", "--heads", "2")
    assert other.returncode == 2 and "heads" in other.stderr and other.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "how", [("--logical-shards", "4", "--dropout", "0.2"), ("--zero", "3"), ("--tp", "2", "--dropout", "0.1")]
)
def test_recomputed_blocks_give_the_same_bits(tmp_path: Path, text: str, how: tuple[str, ...]) -> None:
    job = [*TINY, "--text", text, "--batch-size", "4", "--no-eval", "--quiet", "--max-steps", "4", *how, "--checkpoint"]
    run("examples.gpt", *job, str(tmp_path / "kept.npz"), ranks=2)
    run("examples.gpt", *job, str(tmp_path / "again.npz"), "--recompute", ranks=2)
    assert difference(tmp_path / "again.npz", tmp_path / "kept.npz") == 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--text", "/nothing/here"), "text /nothing/here: No such file or directory"),
        (("--heads", "5"), "--heads: expected a number that divides --width 192, got 5"),
        (("--prompt", ""), "--prompt: expected at least one character, got none"),
        (("--context", "100000"), "expected at least"),
        (("--tp", "4"), "--tp: expected a number that divides --heads 6, got 4"),
        (("--tp", "3"), "--tp 3: expected a number of ranks that 3 divides, got "),
        (("--dropout", "1"), "--dropout: expected a share from 0 to below 1, got 1"),
        (("--tp", "2", "--elastic"), "--tp: expected no --elastic with it"),
        (("--tp", "2", "--balance", "auto"), "--tp: expected no --balance auto with it"),
        (("--pp", "2", "--dropout", "0.1"), "--pp: expected no --dropout with it, as each stage would draw other"),
        (("--pp", "2", "--zero", "3"), "--pp: expected no --zero 3 with it, as several backwards add up in a step"),
        (("--pp", "2", "--policy", "diloco:h=5"), "--pp: expected no --policy with it"),
        (("--pp", "2", "--compression", "topk:0.1"), "--pp: expected no --compression topk:0.1 with it"),
        (("--pp", "2", "--logical-shards", "4"), "--pp: expected no --logical-shards with it"),
        (("--pp", "3"), "--pp 3: expected a number of ranks that 3 divides, got "),
        (
            ("--pp", "2", "--micro-batches", "3"),
            "--micro-batches: expected a number that divides --batch-size 8, got 3",
        ),
        (("--micro-batches", "3"), "--micro-batches: needs --pp with 2 stages or more"),
    ],
)
def test_one_line_says_what_does_not_fit(text: str, ranks: int, arguments: tuple[str, str], message: str) -> None:
    ended = launch("examples.gpt", "--text", text, *arguments, ranks=ranks)
    assert ended.returncode in (1, 2) and message in ended.stderr and ended.stderr.count("\n") == 1


def test_gradients_in_any_buckets_give_the_same_bits(tmp_path: Path, text: str) -> None:
    """The embedding, which is also the head, gets its gradient from the first and the last layer."""
    job = [*TINY, "--text", text, "--batch-size", "2", "--no-eval", "--quiet", "--max-steps", "8", "--sample", "0"]
    small = ["--bucket-size", "8KiB", "--overlap"]
    ways = [*small, "on"], [*small, "off"], ["--no-bucketing"]
    found = []
    for number, way in enumerate(ways):
        file = tmp_path / f"{number}.npz"
        run("examples.gpt", *job, *way, "--checkpoint", str(file), ranks=2)
        found.append({name: values.tobytes() for name, values in parameters(file).items()})
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 3])
def test_a_preset_gives_defaults_and_other_options_change_it(tmp_path: Path, text: str, ranks: int) -> None:
    report = tmp_path / "report.json"
    small = ["--text", text, "--max-steps", "2", "--width", "16", "--layers", "6", "--sample", "0"]
    run("examples.gpt", *small, "--preset", "nanogpt-cpu", "--report", str(report), ranks=ranks)
    settings = json.loads(report.read_text())["settings"]
    assert [settings[name] for name in ("width", "layers", "heads", "context")] == [16, 6, 4, 64]
    assert settings["schedule"] == "cosine:warmup=100,floor=0.1,steps=2600" and settings["weight_decay"] == 0.1
    assert settings["batch_size"] * max(ranks, 1) == 12
