"""`python -m benchmarks.all_reduce`: time until every rank can read the reduced buffer, by size.

clcomm averages a buffer of `Communicator.allocate` into one of `allocate_common` with a prepared all-reduce, as the
Synchronizer does: summed by the rank's device, where that runs in the calling thread, and by NumPy; and with an
all-reduce that is not prepared. MPI and gloo sum in place. For comparison each rank copies as many bytes in its memory.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from functools import partial

from benchmarks import harness
from benchmarks.harness import Bar, Grid, Ratio, Report, Samples
from benchmarks.workers import Job
from clcomm.job import run
from clcomm.units import format_size, parse_size

PROGRAM = "benchmarks.all_reduce"
SIZES = ("256", "4KiB", "16KiB", "64KiB", "256KiB", "827688", "1MiB", "8MiB", "64MiB")
OURS, BY_NUMPY, UNPREPARED = "clcomm", "by NumPy", "unprepared"
MPI, GLOO, COPY = "MPI Allreduce", "gloo", "copy"
GLOO_TARGET, SMALL_TARGET, COPY_TARGET = 15.0, 1.0, 0.7
#: The bars by size in bytes, as multiples of MPI's speed; up to 16 KiB it must not be slower.
MPI_TARGETS = {1 << 18: 5.0, 1 << 20: 5.0, 1 << 23: 5.0, 1 << 26: 5.0}
#: The systems on the MPI ranks, by their worker's names.
ON_MPI = {OURS: "clcomm", BY_NUMPY: "by NumPy", UNPREPARED: "unprepared", MPI: "mpi", COPY: "copy"}
_TIMED = (OURS, BY_NUMPY, UNPREPARED, MPI, GLOO)
_SMALL = 1 << 14
_COPY_FROM = 1 << 26

Results = dict[int, dict[str, Samples]]


def main() -> None:
    options, console = parse(), harness.make_console()
    report = Report("all-reduce of a flat buffer", harness.command_line(PROGRAM))
    sizes = [parse_size(text, "size") // 4 * 4 for text in options.sizes]
    with ExitStack() as stack, console.status("starting") as status:
        ranks = options.ranks
        on_mpi = stack.enter_context(Job("benchmarks.all_reduce.mpi", ranks=ranks))
        systems = {name: (on_mpi, way) for name, way in ON_MPI.items()}
        if not options.no_gloo:
            systems[GLOO] = (stack.enter_context(Job("benchmarks.all_reduce.gloo", ranks=ranks, mpi=False)), "gloo")
        results: Results = {}
        for nbytes in sizes:
            status.update(format_size(nbytes))
            results[nbytes] = measure(nbytes, systems, options)
    report.grids.append(table(results, options.ranks))
    report.bars = bars(results, options.ranks)
    harness.conclude(report, console, options.record)


def parse() -> argparse.Namespace:
    parser = harness.parser(PROGRAM, "All-reduce by size, beside MPI and gloo.", windows=5, window_s=0.2)
    parser.add_argument("--ranks", type=harness.positive, default=4, help="default: %(default)s")
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="SIZE", help=f"default: {' '.join(SIZES)}")
    parser.add_argument("--no-gloo", action="store_true", help="leave PyTorch out")
    return parser.parse_args()


def measure(nbytes: int, systems: dict[str, tuple[Job, str]], options: argparse.Namespace) -> dict[str, Samples]:
    """Return calls a second at one size, in alternating windows."""

    def speed(name: str, repeats: int) -> float:
        job, system = systems[name]
        answers = job.ask(system=system, nbytes=nbytes, repeats=repeats)
        return repeats / (max(a["stop"] for a in answers) - min(a["start"] for a in answers))

    repeats: dict[str, int] = {}
    for name in systems:
        speed(name, 1)  # allocates, checks
        repeats[name] = harness.repeats_for(1 / speed(name, 5), options.window_s)
    return harness.alternate({name: partial(speed, name, repeats[name]) for name in systems}, options.windows)


def table(results: Results, ranks: int) -> Grid:
    """Return times of a call, ratios, and the memory traffic in bytes a second."""
    columns = ["size", *(f"{name}, us" for name in _TIMED), "to MPI", "to gloo", "GB/s", "copy GB/s"]
    grid = Grid(f"all-reduce, {ranks} ranks, float32", columns)
    for nbytes, samples in results.items():
        times = [f"{1e6 / samples[name].median:.1f}" if name in samples else "" for name in _TIMED]
        ratios = [str(Ratio.of(samples[OURS], samples[name])) if name in samples else "" for name in (MPI, GLOO)]
        moved, copied = bandwidths(nbytes, samples, ranks)
        grid.add(format_size(nbytes), *times, *ratios, f"{moved / 1e9:.1f}", f"{copied / 1e9:.1f}")
    return grid


def bandwidths(nbytes: int, samples: dict[str, Samples], ranks: int) -> tuple[float, float]:
    """Return bytes read and written a second by all ranks, in our all-reduce and in a copy.

    The all-reduce reads every rank's buffer once and writes the result once; a copy reads and writes a buffer a rank.
    """
    return (ranks + 1) * nbytes * samples[OURS].median, 2 * ranks * nbytes * samples[COPY].median


def bars(results: Results, ranks: int) -> list[Bar]:
    """Return the bars of the measured sizes."""
    found: list[Bar] = []
    for nbytes, samples in results.items():
        size, ours = format_size(nbytes), samples[OURS]
        target = SMALL_TARGET if nbytes <= _SMALL else MPI_TARGETS.get(nbytes)
        if target is not None:
            found.append(Bar(f"{size} against MPI's Allreduce", Ratio.of(ours, samples[MPI]).value, target))
        if GLOO in samples:
            found.append(Bar(f"{size} against gloo", Ratio.of(ours, samples[GLOO]).value, GLOO_TARGET))
        if nbytes >= _COPY_FROM:
            moved, copied = bandwidths(nbytes, samples, ranks)
            found.append(Bar(f"{size}: bytes a second against a copy's", moved / copied, COPY_TARGET))
    return found


if __name__ == "__main__":
    run(main)
