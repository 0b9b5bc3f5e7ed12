"""`python -m benchmarks.all_reduce`: time until every rank can read the reduced buffer, by size.

clcomm averages a buffer of `Communicator.allocate` into one of `allocate_common` with a prepared all-reduce, as the
Synchronizer does: summed by the rank's device, where that runs in the calling thread, and by NumPy; and with an
all-reduce that is not prepared. "Own" is an ordinary array, summed in place, as MPI, gloo and DeepSpeed do.
--also names the Pythons of environments with other MPIs, mpi4py and NumPy. Two limits are measured in the same rounds:
each rank copies as many bytes in its memory, and two ranks exchange a cache line. Every rank writes its buffer before
each call, which is not counted. It runs with a core for each rank, and with two ranks on each core.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec

from rich.console import Console

from benchmarks import harness
from benchmarks.all_reduce import deepspeed
from benchmarks.harness import Bar, Grid, Ratio, Report, Samples
from benchmarks.machine import cores
from benchmarks.workers import Job
from clcomm.base.units import format_size, parse_size
from clcomm.comm.watch import run

PROGRAM = "benchmarks.all_reduce"
SIZES = ("4", "256", "4KiB", "16KiB", "64KiB", "256KiB", "827688", "1MiB", "8MiB", "64MiB")
OURS, BY_NUMPY, UNPREPARED = "clcomm", "by NumPy", "unprepared"
OWN, OWN_UNPREPARED = "own", "own, unprepared"
MPI, GLOO, DEEPSPEED = "MPI Allreduce", "gloo", "DeepSpeed"
COPY, EXCHANGE = "copy", "exchange"
GLOO_TARGET, COPY_TARGET = 15.0, 0.77
#: How many exchanges of a cache line an all-reduce of the smallest size may take.
EXCHANGES_TARGET = 3.0
#: From a size on, how many times as fast as MPI it has to be: with a core for each rank, and with less.
MPI_TARGETS = {1 << 18: (3.0, 5.0), 0: (1.0, 1.0)}
#: The systems on the MPI ranks, by their worker's names.
ON_MPI = {
    OURS: "clcomm", BY_NUMPY: "by NumPy", UNPREPARED: "unprepared", OWN: "own", OWN_UNPREPARED: "own unprepared",
    MPI: "mpi", COPY: "copy", EXCHANGE: "exchange",
}  # fmt: skip
#: PyTorch's, each in a worker of its own.
ON_TORCH = {GLOO: "gloo", DEEPSPEED: "deepspeed"}
_OWN_WAYS, _LIMITS = (OURS, BY_NUMPY, UNPREPARED, OWN, OWN_UNPREPARED), (COPY, EXCHANGE)
_COPY_FROM = 1 << 26

Results = dict[int, dict[str, Samples]]


def main() -> None:
    options, console = parse(), harness.make_console()
    report = Report("all-reduce of a flat buffer", harness.command_line(PROGRAM))
    rivals = [] if options.no_torch else rivals_here(report)
    for ranks in options.ranks:
        results = measure_all(ranks, rivals, options, console)
        report.grids.append(table(results, ranks))
        report.bars += bars(results, ranks)
    harness.conclude(report, console, options.record)


def parse() -> argparse.Namespace:
    parser = harness.parser(PROGRAM, "All-reduce by size, beside MPI, DeepSpeed and gloo.", windows=5, window_s=0.2)
    both = [cores(), 2 * cores()]
    parser.add_argument("--ranks", nargs="+", type=harness.positive, default=both, help="default: %(default)s")
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="SIZE", help=f"default: {' '.join(SIZES)}")
    parser.add_argument("--also", nargs="+", default=[], metavar="PYTHON", help="of environments with other MPIs")
    parser.add_argument("--no-torch", action="store_true", help="leave gloo and DeepSpeed out")
    return parser.parse_args()


def rivals_here(report: Report) -> list[str]:
    """Return PyTorch's systems that can run here; the report notes which are left out."""
    lacking = {
        GLOO: "" if find_spec("torch") else "torch",
        DEEPSPEED: deepspeed.missing(),
    }
    for name, needed in lacking.items():
        if needed:
            report.notes.append(f"Without {name}, which needs {needed}: pip install '.[anchors]', and a compiler")
    return [name for name, needed in lacking.items() if not needed]


def measure_all(ranks: int, rivals: list[str], options: argparse.Namespace, console: Console) -> Results:
    """Return the samples of every size on this number of ranks."""
    sizes = [parse_size(text, "size") // 4 * 4 for text in options.sizes]
    with ExitStack() as stack, console.status("starting") as status:
        on_mpi = stack.enter_context(Job("benchmarks.all_reduce.mpi", ranks=ranks))
        systems = {name: (on_mpi, way) for name, way in ON_MPI.items()}
        for name in rivals:
            job = stack.enter_context(Job(f"benchmarks.all_reduce.{ON_TORCH[name]}", ranks=ranks, mpi=False))
            systems[name] = job, ON_TORCH[name]
        for python in options.also:
            job = stack.enter_context(Job("benchmarks.all_reduce.other_mpi", ranks=ranks, python=python))
            systems[job.ask(library="")[0]["library"]] = job, "mpi"
        results: Results = {}
        for nbytes in sizes:
            status.update(f"{ranks} ranks, {format_size(nbytes)}")
            results[nbytes] = measure(nbytes, systems, options)
    return results


def measure(nbytes: int, systems: dict[str, tuple[Job, str]], options: argparse.Namespace) -> dict[str, Samples]:
    """Return calls a second at one size, in alternating windows."""

    def speed(name: str, repeats: int) -> float:
        job, system = systems[name]
        answers = job.ask(system=system, nbytes=nbytes, repeats=repeats)
        seconds = max(a["stop"] for a in answers) - min(a["start"] for a in answers)
        return repeats / max(1e-9, seconds - sum(a["altering"] for a in answers) / len(answers))

    repeats: dict[str, int] = {}
    for name in systems:
        if name == EXCHANGE and len(systems[name][0].ask(system="exchange", nbytes=nbytes, repeats=1)[0]) == 0:
            continue  # of more than two ranks, or where kernels run in other threads
        speed(name, 1)  # allocates, checks
        repeats[name] = harness.repeats_for(1 / speed(name, 5), options.window_s)
    return harness.alternate({name: partial(speed, name, repeats[name]) for name in repeats}, options.windows)


def rivals_of(samples: dict[str, Samples]) -> list[str]:
    """Return the systems of others."""
    return [name for name in samples if name not in (*_OWN_WAYS, *_LIMITS)]


def table(results: Results, ranks: int) -> Grid:
    """Return times of a call, ratios, the limits, and the memory traffic in bytes a second."""
    measured = next(iter(results.values()))
    rivals, timed = rivals_of(measured), [name for name in measured if name != COPY]
    ratios_to = [*(f"to {name}" for name in rivals), *(f"{OWN} to {name}" for name in rivals)]
    columns = ["size", *(f"{name}, us" for name in timed), *ratios_to, "GB/s", "copy GB/s"]
    grid = Grid(f"all-reduce, {ranks} ranks on {cores()} cores, float32", columns)
    for nbytes, samples in results.items():
        times = [f"{1e6 / samples[name].median:.2f}" for name in timed]
        ratios = [str(Ratio.of(samples[own], samples[name])) for own in (OURS, OWN) for name in rivals]
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
    shares_cores = ranks > cores()
    found: list[Bar] = []
    for nbytes, samples in results.items():
        size, ours = f"{ranks} ranks, {format_size(nbytes)}", samples[OURS]
        target = next(targets[shares_cores] for least, targets in MPI_TARGETS.items() if nbytes >= least)
        found.append(Bar(f"{size} against MPI's Allreduce", Ratio.of(ours, samples[MPI]).value, target))
        if GLOO in samples and shares_cores:
            found.append(Bar(f"{size} against gloo", Ratio.of(ours, samples[GLOO]).value, GLOO_TARGET))
        fastest = harness.best_of(samples, rivals_of(samples))
        for own in (OURS, OWN):
            what = f"{size}, {own} against the fastest ({fastest})"
            found.append(Bar(what, Ratio.of(samples[own], samples[fastest]).value, 1.0))
        if EXCHANGE in samples and nbytes == min(results):
            exchanges = Ratio.of(samples[EXCHANGE], ours).value
            found.append(Bar(f"{size}: exchanges of a cache line", exchanges, EXCHANGES_TARGET, at_least=False))
        if nbytes >= _COPY_FROM:
            moved, copied = bandwidths(nbytes, samples, ranks)
            found.append(Bar(f"{size}: bytes a second against a copy's", moved / copied, COPY_TARGET))
    return found


if __name__ == "__main__":
    run(main)
