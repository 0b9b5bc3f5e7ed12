"""`python -m benchmarks.startup`: from the shell to a job's first step and its end, warm and cold, and memory a rank.

Warm: kernels are in the cache from a run before. Cold: empty caches each time (POCL_CACHE_DIR, CLCOMM_CACHE_DIR).
Python keeps its compiled files, as it does unless PYTHONDONTWRITEBYTECODE is set. Starts take turns. What follows `--`
goes to the job, such as `-- --device intel`, or `-- --model resnet`; the bars are those of the MLP.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import Bar, Grid, Report, Samples, alternate
from benchmarks.resident import FIELDS
from benchmarks.workers import run_to_end
from clcomm.comm.watch import run

PROGRAM = "benchmarks.startup"
WARM_TARGET_S, COLD_TARGET_S, MEMORY_TARGET_MB = 1.5, 5.0, 200.0
#: The parts of a start before those of the job's report, and after them.
LAUNCH, END = "launch", "test and end"


@dataclass
class Starts:
    """What is known of one kind of start, a value for each one."""

    to_first_step_s: list[float] = field(default_factory=list)
    parts_s: list[dict[str, float]] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)
    memory: list[dict[str, float]] = field(default_factory=list)


def main() -> None:
    options, console = parse(), harness.make_console()
    command = f"mpiexec -n {options.ranks} python -m {' '.join(job_of(options))}"
    report = Report("start of a job, and memory", harness.command_line(PROGRAM))
    found = {"warm": Starts(), "cold": Starts()}
    with console.status("starting") as status:
        measures = {
            "warm": lambda: start(options, found["warm"]),
            "cold": lambda: start_cold(options, found["cold"]),
        }
        whole = alternate(measures, options.windows, show=status.update)
    first = {kind: Samples(tuple(starts.to_first_step_s[1:])) for kind, starts in found.items()}  # after the warm-up
    report.grids += [times(command, whole, first, found), parts(found), space(command, found["warm"])]
    report.notes += [
        "to the first step's end, and its parts, on the rank that completes it last; launch: until its process exists",
        "VmHWM is the peak of all resident pages, those shared with other ranks included",
    ]
    peak = max(each["VmHWM"] for each in found["warm"].memory)
    report.bars += (
        []
        if options.example != "mnist" or "--model" in options.arguments
        else [
            Bar("warm start, shell to first step", first["warm"].median, WARM_TARGET_S, " s", at_least=False),
            Bar("cold start, shell to first step", first["cold"].median, COLD_TARGET_S, " s", at_least=False),
            Bar("resident memory of the largest rank, peak", peak, MEMORY_TARGET_MB, " MB", at_least=False),
        ]
    )
    harness.conclude(report, console, options.record)


def parse() -> argparse.Namespace:
    parser = harness.parser(PROGRAM, "Start of a job and memory a rank.", windows=5, window_s=0)
    parser.add_argument("--ranks", type=harness.positive, default=4, help="default: %(default)s")
    parser.add_argument("--example", choices=("mnist", "gpt"), default="mnist", help="default: %(default)s")
    parser.add_argument("arguments", nargs="*", help="more for the example, after --")
    return parser.parse_args()


def job_of(options: argparse.Namespace) -> list[str]:
    """Return the job's module and arguments."""
    return [f"examples.{options.example}", "--max-steps", "1", *options.arguments]


def start(options: argparse.Namespace, starts: Starts, cache: str | None = None) -> float:
    """Run the job to its end, add what it took to `starts`, and return the seconds."""
    with tempfile.TemporaryDirectory(prefix="clcomm-bench-") as folder:
        report = Path(folder, "report.json")
        arguments = ["-m", "benchmarks.resident", folder, *job_of(options), "--report", str(report)]
        at, begin, before_s = time.time(), time.perf_counter(), _processor_s()
        _run(options, arguments, cache)
        seconds = time.perf_counter() - begin
        starts.processor_s.append(_processor_s() - before_s)
        ranks = [json.loads(path.read_text(encoding="utf-8")) for path in Path(folder).glob("memory-*.json")]
        records = json.loads(report.read_text(encoding="utf-8"))["ranks"]
    starts.memory = ranks
    launch_s = max(0.0, statistics.median(each["began"] for each in ranks) - at)
    _add(starts, launch_s, records, seconds)
    return seconds


def _add(starts: Starts, launch_s: float, records: list[dict[str, Any]], seconds: float) -> None:
    """Add a start's parts, on the rank that completed its first step last."""
    slowest = max((record["start_s"] for record in records), key=lambda parts: sum(parts.values()))
    known = {LAUNCH: launch_s, **slowest}
    to_first_step_s = sum(known.values())
    starts.to_first_step_s.append(to_first_step_s)
    starts.parts_s.append({**known, END: seconds - to_first_step_s})


def start_cold(options: argparse.Namespace, starts: Starts) -> float:
    """Run the job with an empty kernel cache."""
    with tempfile.TemporaryDirectory(prefix="clcomm-bench-") as folder:
        return start(options, starts, folder)


def times(command: str, whole: dict[str, Samples], first: dict[str, Samples], found: dict[str, Starts]) -> Grid:
    """Return the table of whole starts."""
    columns = ("kernel cache", "s to the first step", "min-max", "s to the end", "min-max", "processor s of all ranks")
    grid = Grid(f"{command}, from the shell", columns)
    for kind, total in whole.items():
        processor = statistics.median(found[kind].processor_s[1:])
        cells = [
            text for each in (first[kind], total) for text in (f"{each.median:.2f}", f"{each.low:.2f}-{each.high:.2f}")
        ]
        grid.add(kind, *cells, f"{processor:.2f}")
    return grid


def parts(found: dict[str, Starts]) -> Grid:
    """Return the table of a start's parts, medians of each."""
    names = list(found["warm"].parts_s[0])
    grid = Grid("parts of a start, s", ("kernel cache", *names))
    for kind, starts in found.items():
        grid.add(kind, *(f"{statistics.median(each[name] for each in starts.parts_s[1:]):.2f}" for name in names))
    return grid


def space(command: str, starts: Starts) -> Grid:
    """Return the table of the ranks' memory."""
    grid = Grid(f"{command}, MB a rank", ("memory", "median", "largest"))
    for name in FIELDS:
        values = [each[name] for each in starts.memory]
        grid.add(name, f"{statistics.median(values):.0f}", f"{max(values):.0f}")
    return grid


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run(options: argparse.Namespace, arguments: list[str], cache: str | None) -> None:
    environment = {**os.environ, **({"POCL_CACHE_DIR": cache, "CLCOMM_CACHE_DIR": cache} if cache else {})}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    run_to_end(options.ranks, *arguments, environment=environment)


if __name__ == "__main__":
    run(main)
