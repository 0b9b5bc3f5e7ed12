"""`python -m benchmarks.compression`: the cost of each scheme in accuracy, and its saving in bytes.

The MNIST example trains with each scheme for as many steps, with the same seeds; the mean over the seeds counts, as
single runs differ by a few tenths of a point. Then a step's reductions alone are timed, coded by the ranks' devices
and by NumPy, in turns; `--seeds 0` runs only these.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks import harness, results_file
from benchmarks.harness import Bar, Grid, Ratio, Report
from benchmarks.peers.batches import default_data, write_batches
from benchmarks.workers import Job, run_to_end
from clcomm.comm.watch import run

PROGRAM = "benchmarks.compression"
SCHEMES = ("fp16", "bf16", "int8", "topk:0.01", "powersgd:4")
HALF = ("fp16", "bf16")
POINTS_ALLOWED = 0.5
#: Half of the bytes, and a margin for the rounding of a rank's part.
HALF_SHARE = 0.505
#: Number of timed windows, and steps in each.
_WINDOWS, _STEPS = 9, 40


class Trained(NamedTuple):
    """A run's test accuracy in percent, and the bytes of a rank's compressed gradients."""

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
        if options.seeds:
            compare(options, runs, report)
        status.update("a step's reductions alone")
        time_coding(options, report)
    harness.conclude(report, console, options.record)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}", description="Accuracy and bytes of compressed gradients.", allow_abbrev=False
    )
    parser.add_argument("--model", choices=("convnet", "mlp"), default="convnet", help="default: %(default)s")
    parser.add_argument("--ranks", type=harness.positive, default=4, help="default: %(default)s")
    parser.add_argument("--seeds", type=harness.count, default=3, help="runs of each; default: %(default)s")
    parser.add_argument("--schemes", nargs="+", default=SCHEMES, help="default: %(default)s")
    parser.add_argument(
        "--record", action="store_true", help=f"keep the results in benchmarks/{results_file.RESULTS.name}"
    )
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
    """Compare the schemes with no compression."""
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


def time_coding(options: argparse.Namespace, report: Report) -> None:
    """Time a step's reductions with each scheme, in windows that alternate between device and NumPy."""
    with tempfile.TemporaryDirectory(prefix="clcomm-bench-") as folder:
        path = Path(folder, "batches.npz")
        shape = write_batches(path, default_data(), options.ranks, 16, lambda line: None)
        arguments = ["--model", options.model, "--batches", str(path), "--shape", *map(str, shape)]
        with Job("benchmarks.peers.engine", *arguments, ranks=options.ranks) as job:
            job.ask(steps=1, settings={})  # gradients that are some
            grid = Grid(
                f"{options.model}, {options.ranks} ranks: a step's reductions alone, us",
                ("scheme", "coded by the device", "by NumPy", "NumPy's to the device's"),
            )
            for scheme in ("none", *options.schemes):
                ways = {by: partial(_reduction_s, job, scheme, by == "NumPy") for by in ("device", "NumPy")}
                samples = harness.alternate(ways, _WINDOWS)
                times = [f"{samples[by].median * 1e6:.0f}" for by in ways]
                grid.add(scheme, *times, str(Ratio.of(samples["NumPy"], samples["device"])))
    report.grids.append(grid)


def _reduction_s(job: Job, scheme: str, coded_by_numpy: bool) -> float:
    settings = {"alone": True, "compression": scheme, "coded_by_numpy": coded_by_numpy}
    answers = job.ask(steps=_STEPS, settings=settings)
    return (max(a["stop"] for a in answers) - min(a["start"] for a in answers)) / _STEPS


if __name__ == "__main__":
    run(main)
