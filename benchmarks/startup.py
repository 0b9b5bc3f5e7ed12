"""`python -m benchmarks.startup`: from the shell to the end of a one-step job, warm and cold, and memory a rank.

Warm: kernels are in the cache from a run before. Cold: empty caches each time (POCL_CACHE_DIR, CLCOMM_CACHE_DIR).
Python keeps its compiled files, as it does unless PYTHONDONTWRITEBYTECODE is set. Starts take turns. What follows `--`
goes to the job, such as `-- --device intel`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Bar, Grid, Report, alternate
from benchmarks.resident import FIELDS
from benchmarks.workers import run_to_end
from clcomm.job import run

PROGRAM = "benchmarks.startup"
JOB = ("examples.mnist", "--max-steps", "1")
WARM_TARGET_S, COLD_TARGET_S, MEMORY_TARGET_MB = 1.5, 6.0, 200.0


def main() -> None:
    options, console = parse(), harness.make_console()
    command = f"mpiexec -n {options.ranks} python -m {' '.join([*JOB, *options.arguments])}"
    report = Report("start of a job, and memory", harness.command_line(PROGRAM))
    with console.status("starting") as status:
        spent: dict[str, list[float]] = {"warm": [], "cold": []}
        measures = {
            "warm": lambda: start(options, spent["warm"]),
            "cold": lambda: start_cold(options, spent["cold"]),
        }
        samples = alternate(measures, options.windows, show=status.update)
        status.update("memory")
        ranks = memory(options)
    times = Grid(f"{command}, shell to shell", ("kernel cache", "seconds", "min-max", "processor seconds of all ranks"))
    for name, found in samples.items():
        processor = statistics.median(spent[name][1:])  # the first was the warm-up
        times.add(name, f"{found.median:.2f}", f"{found.low:.2f}-{found.high:.2f}", f"{processor:.2f}")
    space = Grid(f"{command}, MB a rank", ("memory", "median", "largest"))
    for name in FIELDS:
        values = [each[name] for each in ranks]
        space.add(name, f"{statistics.median(values):.0f}", f"{max(values):.0f}")
    report.grids += [times, space]
    report.notes.append("VmHWM is the peak of all resident pages, those shared with other ranks included")
    peak = max(each["VmHWM"] for each in ranks)
    report.bars += [
        Bar("warm start", samples["warm"].median, WARM_TARGET_S, " s", at_least=False),
        Bar("cold start", samples["cold"].median, COLD_TARGET_S, " s", at_least=False),
        Bar("resident memory of the largest rank, peak", peak, MEMORY_TARGET_MB, " MB", at_least=False),
    ]
    harness.conclude(report, console, options.record)


def parse() -> argparse.Namespace:
    parser = harness.parser(PROGRAM, "Start of a job and memory a rank.", windows=5, window_s=0)
    parser.add_argument("--ranks", type=harness.positive, default=4, help="default: %(default)s")
    parser.add_argument("arguments", nargs="*", help="more for the example, after --")
    return parser.parse_args()


def start(options: argparse.Namespace, spent: list[float], cache: str | None = None) -> float:
    """Run the job to its end, add its processor time to `spent`, and return the seconds."""
    begin, before = time.perf_counter(), _processor_s()
    _run(options, ["-m", *JOB, *options.arguments], cache)
    spent.append(_processor_s() - before)
    return time.perf_counter() - begin


def start_cold(options: argparse.Namespace, spent: list[float]) -> float:
    """Run the job with an empty kernel cache."""
    with tempfile.TemporaryDirectory(prefix="clcomm-bench-") as folder:
        return start(options, spent, folder)


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def memory(options: argparse.Namespace) -> list[dict[str, float]]:
    """Run the job once more and return each rank's memory."""
    with tempfile.TemporaryDirectory(prefix="clcomm-bench-") as folder:
        _run(options, ["-m", "benchmarks.resident", folder, *JOB, *options.arguments], None)
        return [json.loads(path.read_text(encoding="utf-8")) for path in Path(folder).glob("memory-*.json")]


def _run(options: argparse.Namespace, arguments: list[str], cache: str | None) -> None:
    environment = {**os.environ, **({"POCL_CACHE_DIR": cache, "CLCOMM_CACHE_DIR": cache} if cache else {})}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    run_to_end(options.ranks, *arguments, environment=environment)


if __name__ == "__main__":
    run(main)
