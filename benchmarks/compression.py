"""`python -m benchmarks.compression`: what each scheme costs in accuracy, and what it saves on the wire.

The MNIST example trains with each scheme for as many steps, with the same seeds; the mean over the seeds counts, as
single runs differ by a few tenths of a point on their own. Nothing here is timed: it may run on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks import harness
from benchmarks.harness import Bar, Grid, Report
from benchmarks.workers import run_to_end
from clcomm.job import run

PROGRAM = "benchmarks.compression"
SCHEMES = ("fp16", "bf16", "int8", "topk:0.01", "powersgd:4")
HALF = ("fp16", "bf16")
POINTS_ALLOWED = 0.5
#: Half of the bytes, but for what rounds a rank's part up.
HALF_SHARE = 0.505


class Trained(NamedTuple):
    """A run's test accuracy in percent, and the bytes a rank's gradients took on the wire."""

    accuracy: float
    wire_bytes: int


def main() -> None:
    options, console = parse(), harness.make_console()
    report = Report("accuracy and bytes of compressed gradients", harness.command_line(PROGRAM))
    with console.status("training") as status:
        runs: dict[str, list[Trained]] = {}
        for scheme in ("none", *options.schemes):
            for seed in range(options.seeds):
                status.update(f"{scheme}, seed {seed}")
                runs.setdefault(scheme, []).append(train(options, scheme, seed))
    compare(options, runs, report)
    harness.conclude(report, console, options.record)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}", description="Accuracy and bytes of compressed gradients.", allow_abbrev=False
    )
    parser.add_argument("--model", choices=("convnet", "mlp"), default="convnet", help="default: %(default)s")
    parser.add_argument("--ranks", type=harness.positive, default=4, help="default: %(default)s")
    parser.add_argument("--seeds", type=harness.positive, default=3, help="runs of each; default: %(default)s")
    parser.add_argument("--schemes", nargs="+", default=SCHEMES, help="default: %(default)s")
    parser.add_argument("--record", action="store_true", help=f"keep the results in benchmarks/{harness.RESULTS.name}")
    parser.add_argument("arguments", nargs="*", help="more for the example, after --")
    return parser.parse_args()


def train(options: argparse.Namespace, scheme: str, seed: int) -> Trained:
    """Train the example once."""
    with tempfile.TemporaryDirectory(prefix="clcomm-bench-") as folder:
        file = str(Path(folder, "run.json"))
        run_to_end(
            options.ranks, "-m", "examples.mnist", "--model", options.model, "--compression", scheme,
            "--seed", str(seed), "--quiet", "--report", file, *options.arguments,
        )  # fmt: skip
        document = json.loads(Path(file).read_text(encoding="utf-8"))
    operations = document["communication"]["operations"]
    wire = sum(row["wire_bytes"] for row in operations if row["label"] == "gradients")
    return Trained(100 * document["test_accuracy"], wire)


def compare(options: argparse.Namespace, runs: dict[str, list[Trained]], report: Report) -> None:
    """Put the schemes beside no compression."""
    plain = runs["none"]
    title = f"{options.model}, {options.ranks} ranks, {options.seeds} seed(s)"
    grid = Grid(title, ("scheme", "accuracy, %", "each seed", "points lost", "bytes on the wire"))
    for scheme, found in runs.items():
        lost = statistics.mean(one.accuracy - other.accuracy for one, other in zip(plain, found, strict=True))
        share = sum(one.wire_bytes for one in found) / sum(one.wire_bytes for one in plain)
        accuracies = [one.accuracy for one in found]
        each = " ".join(f"{accuracy:.2f}" for accuracy in accuracies)
        grid.add(scheme, f"{statistics.mean(accuracies):.2f}", each, f"{lost:+.2f}", f"{share:.3f}x")
        if scheme == "none":
            continue
        what = f"{options.model}, {scheme}"
        report.bars.append(Bar(f"{what}: accuracy lost", lost, POINTS_ALLOWED, " points", at_least=False))
        if scheme in HALF:
            report.bars.append(Bar(f"{what}: bytes on the wire", share, HALF_SHARE, at_least=False))
    report.grids.append(grid)


if __name__ == "__main__":
    run(main)
