"""`python -m benchmarks.policies`: held-out loss and bytes of training that talks rarely, beside plain data parallel.

The GPT example trains with nanoGPT's settings for computers without a GPU, from the same seed and for as many steps
under each policy, and at each of a few learning rates, of which the best counts, as for plain data parallel. The bytes
are those that a rank has to send at least: of an all-reduce 2 (N - 1) / N of the array, of an all-gather (N - 1) / N of
the whole. With --trained all go on from one checkpoint of plain training, as papers' runs do; steps and bytes are those
after it. No figure depends on what else the machine does, so that several runs may go on at once, and with --kept those
that are done are not repeated.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import harness, results_file
from benchmarks.harness import Bar, Grid, Report
from benchmarks.workers import run_to_end
from clcomm.comm.watch import run

PROGRAM = "benchmarks.policies"
PLAIN = "none"
POLICIES = ("diloco:h=100", "streaming:h=26", "sparseloco:h=3", "noloco:h=100", "local:h=100", "demo:32")
RATES = (1e-3, 2e-3, 4e-3)
#: The losses to plain that papers' authors call equal, and the share of the bytes where they name one.
LOSS_BARS = {"diloco": 1.02, "streaming": 1.02, "sparseloco": 1.03, "demo": 1.03}
BYTES_BARS = {"diloco": 0.01, "streaming": 0.01, "sparseloco": 0.01}
#: What training sends, by the labels under which it is counted.
_LABELS = ("gradients", "outer gradients")
_LIMIT_S = 7200.0
#: Held while a run trains that others start from.
_TRAINED = threading.Lock()


class Trained(NamedTuple):
    """A run's held-out loss, the bytes that a rank sends in a step, and the learning rate."""

    loss: float
    step_bytes: float
    rate: float


def main() -> None:
    options, console = parse(), harness.make_console()
    report = Report("policies: held-out loss and bytes", harness.command_line(PROGRAM))
    cells = list(product((PLAIN, *options.policies), options.rates))
    kept = nullcontext(options.kept) if options.kept else tempfile.TemporaryDirectory(prefix="clcomm-bench-")
    with console.status("training"), kept as folder, ThreadPoolExecutor(options.at_once) as pool:
        found = list(pool.map(partial(train, options, Path(folder)), *zip(*cells, strict=True)))
    runs: dict[str, Trained] = {}
    for (policy, _), trained in zip(cells, found, strict=True):
        runs[policy] = min(runs.get(policy, trained), trained)
    compare(options, runs, report)
    harness.conclude(report, console, options.record)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}", description="Loss and bytes of policies.", allow_abbrev=False
    )
    parser.add_argument("--ranks", type=harness.positive, default=4, help="default: %(default)s")
    parser.add_argument("--steps", type=harness.positive, default=2000, help="default: %(default)s")
    parser.add_argument("--trained", type=harness.positive, default=0, metavar="STEPS", help="before, plainly")
    parser.add_argument("--windows", type=harness.positive, default=3, help="of a rank in a step; default: %(default)s")
    parser.add_argument("--policies", nargs="+", default=POLICIES, metavar="POLICY", help="default: %(default)s")
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, metavar="RATE", help="default: %(default)s")
    parser.add_argument("--at-once", type=harness.positive, default=1, metavar="N", help="runs; default: %(default)s")
    parser.add_argument("--kept", metavar="FOLDER", help="with the reports of runs; those that are there count")
    parser.add_argument(
        "--record", action="store_true", help=f"keep the results in benchmarks/{results_file.RESULTS.name}"
    )
    return parser.parse_args()


def train(options: argparse.Namespace, folder: Path, policy: str, rate: float) -> Trained:
    """Train the example once, after plain training if that is asked for."""
    sizes = f"{options.ranks}-{options.windows}"
    trained = (folder / f"{PLAIN}-{rate:g}-{options.trained}-{sizes}.npz").absolute()
    start = ["--resume", str(trained)] if options.trained else []
    with _TRAINED:  # one after the other, as several policies start from the same
        if start and not trained.exists():
            run_example(options, rate, options.trained, "--no-eval", "--checkpoint", str(trained))
    steps = f"{options.trained}+{options.steps}" if options.trained else str(options.steps)
    file = (folder / f"{policy}-{rate:g}-{steps}-{sizes}.json").absolute()
    if not file.exists():
        run_example(options, rate, options.trained + options.steps, "--report", str(file), *start, *how(policy))
    document = json.loads(file.read_text(encoding="utf-8"))
    rows = [row for row in document["communication"]["operations"] if row["label"] in _LABELS]
    sent = sum(sent_bytes(row, options.ranks) for row in rows)
    return Trained(document["test_loss"], sent / document["steps"], rate)


def run_example(options: argparse.Namespace, rate: float, steps: int, *more: str) -> None:
    """Train until there have been so many steps."""
    run_to_end(
        options.ranks, "-m", "examples.gpt", "--preset", "nanogpt-cpu", "--sample", "0", "--quiet",
        "--batch-size", str(options.windows), "--max-steps", str(steps), "--lr", f"{rate:g}", *more,
        limit_s=_LIMIT_S,
    )  # fmt: skip


def how(policy: str) -> list[str]:
    """Return the example's options for a policy, or a compression such as "demo:32", whose sign is AdamW's step."""
    if policy.startswith("demo"):
        return ["--compression", policy, "--optimizer", "sgd", "--momentum", "0"]
    return ["--policy", policy]


def sent_bytes(row: dict[str, Any], ranks: int) -> float:
    """Return the bytes that a rank sends at least in a report's collectives of one kind.

    Compression gathers all ranks' codes for an all-reduce, whose wire bytes are those of one rank.
    """
    if row["wire_bytes"] < row["bytes"]:
        return float((ranks - 1) * row["wire_bytes"])
    shares = {"all_reduce": 2 * (ranks - 1) / ranks, "all_gather": (ranks - 1) / ranks}
    return float(row["wire_bytes"] * shares.get(row["operation"], 1.0))


def compare(options: argparse.Namespace, runs: dict[str, Trained], report: Report) -> None:
    """Compare the policies with plain data parallel."""
    plain = runs[PLAIN]
    title = f"nanoGPT's run for CPUs, {options.ranks} ranks of {options.windows} windows, {options.steps} steps"
    title += f" after {options.trained} without a policy" if options.trained else ""
    grid = Grid(title, ("policy", "rate", "held-out loss", "to plain", "bytes a step", "to plain"))
    for policy, found in runs.items():
        loss, share = found.loss / plain.loss, found.step_bytes / plain.step_bytes
        figures = f"{found.loss:.4f}", f"{loss:.3f}x", f"{found.step_bytes:,.0f}", f"1/{1 / share:.0f}"
        grid.add(policy, f"{found.rate:g}", *figures)
        name = policy.partition(":")[0]
        for what, value, bars in (("held-out loss", loss, LOSS_BARS), ("bytes", share, BYTES_BARS)):
            if name in bars:
                report.bars.append(Bar(f"{policy}: {what} to plain", value, bars[name], at_least=False))
    report.grids.append(grid)


if __name__ == "__main__":
    run(main)
