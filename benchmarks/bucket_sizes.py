"""`python -m benchmarks.bucket_sizes`: a dozen bucket sizes beside the one that `bucket_size="auto"` chooses.

Every rank averages a model's gradients repeatedly; the sizes take turns, and a synchronisation counts with the
slowest rank's time over a window. It starts itself on --ranks ranks, or with `--hosts 2 2 --delay-ms 0.5 --rate-mbit
1000` on two hosts made of network namespaces, with two ranks on each; under mpiexec it runs on the job's ranks.
"""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np

from benchmarks import harness
from benchmarks.harness import Bar, Grid, Ratio, Report, Samples
from benchmarks.on_ranks import cable, relaunch, relaunch_on_hosts, slowest_s
from clcomm import Communicator, Synchronizer
from clcomm.base.units import format_size
from clcomm.comm.costs.forecast import MODELS
from clcomm.comm.watch import run

PROGRAM = "benchmarks.bucket_sizes"
AUTO = "auto"
#: How much slower than the best of the sweep the chosen size may be.
TARGET = 1.10
_SWEPT = 12
#: Synchronisations before each window: auto has separate memory, not in the caches at first.
_SETTLING = 5
#: Gradients in bytes, tensor by tensor; "deep" has 24 layers of a weight and a bias each, 6 MiB in all.
TENSORS = {**MODELS, "deep": (262144, 1024) * 24}


class Gradients:
    """A model of NumPy arrays for `clcomm.sync.adapters.numpy`, whose gradients stay the same."""

    def __init__(self, sizes: tuple[int, ...], rank: int):
        generator = np.random.default_rng(rank)
        self._parameters = [(str(index), _Parameter(generator, nbytes // 4)) for index, nbytes in enumerate(sizes)]

    def named_parameters(self) -> list[tuple[str, _Parameter]]:
        return self._parameters


class _Parameter:
    def __init__(self, generator: np.random.Generator, count: int):
        self.data = np.zeros(count, np.float32)
        self.grad = generator.standard_normal(count).astype(np.float32)


def main() -> int:
    options, console = parse(), harness.make_console()
    if options.hosts is None:
        ended = relaunch(PROGRAM, options.ranks)
    else:
        ended = relaunch_on_hosts(PROGRAM, tuple(options.hosts), options.delay_ms, options.rate_mbit)
    if ended is not None:
        return ended
    report = Report("bucket sizes", harness.command_line(PROGRAM))
    with Communicator(transport=options.transport) as comm:
        for model in options.model:
            measure_model(report, comm, model, options)
        place = f"{comm.size} ranks, {comm.hosts} host{'s' if comm.hosts > 1 else ''}"
        report.title += f", {place}"
        if cable():
            report.notes.append(f"between the hosts: {cable()}")
        if comm.rank == 0:
            harness.conclude(report, console, options.record)
    return 0


def parse() -> argparse.Namespace:
    parser = harness.parser(PROGRAM, "Bucket sizes beside the automatic one.", windows=7, window_s=0.1)
    parser.add_argument("--ranks", type=harness.positive, default=4, help="default: %(default)s")
    parser.add_argument("--hosts", type=harness.positive, nargs=2, metavar="RANKS", help="ranks on each of two hosts")
    parser.add_argument("--delay-ms", type=harness.from_zero, default=0.0, help="from host to host; default: none")
    parser.add_argument(
        "--rate-mbit", type=harness.from_zero, default=0.0, help="of the hosts' cable; default: no limit"
    )
    parser.add_argument(
        "--model", nargs="+", choices=TENSORS, default=["convnet", "deep"], help="default: convnet deep"
    )
    parser.add_argument("--transport", choices=("auto", "shared", "mpi"), default="auto", help="default: %(default)s")
    return parser.parse_args()


def measure_model(report: Report, comm: Communicator, name: str, options: argparse.Namespace) -> None:
    """Let auto choose, then measure it in turns with the sweep, and add table, evidence and bar; collective."""
    model = Gradients(TENSORS[name], comm.rank)
    chosen = Synchronizer(comm, bucket_size=AUTO)
    while not chosen.decisions():
        chosen.sync_gradients(model)
    swept = Synchronizer(comm)
    other = Gradients(TENSORS[name], comm.rank)

    def timed(size: int | None, repeats: int) -> float:
        """Return a synchronisation's seconds on the slowest rank; size None: auto's choice."""
        if size is None:
            once = partial(chosen.sync_gradients, model)
        else:
            swept.bucket_size = size
            once = partial(swept.sync_gradients, other)
        once()
        return slowest_s(comm, once, repeats)

    sizes = {format_size(size): size for size in sweep(sum(TENSORS[name]))}
    measures = {}
    for label, size in {**sizes, AUTO: None}.items():
        timed(size, 1)  # prepares
        measures[label] = partial(timed, size, harness.repeats_for(timed(size, 3), options.window_s))
    add(report, name, harness.alternate(measures, options.windows), swept, other, sizes, chosen)


def sweep(nbytes: int) -> list[int]:
    """Return a dozen sizes, each twice the one before, up to the whole model."""
    largest = 1 << (nbytes - 1).bit_length()
    return [largest >> shift for shift in reversed(range(_SWEPT))]


def add(
    report: Report, name: str, samples: dict[str, Samples], swept: Synchronizer, model: Gradients,
    sizes: dict[str, int], chosen: Synchronizer,
) -> None:  # fmt: skip
    """Add a model's table, the evidence of auto, and its bar."""
    best = min(sizes, key=lambda label: samples[label].median)
    title = f"{name}: {len(TENSORS[name])} tensors, {format_size(sum(TENSORS[name]))} of gradients"
    grid = Grid(title, ("bucket size", "buckets", "us a synchronisation", "to the best"))
    for label, each in samples.items():
        if label == AUTO:
            buckets = "as chosen"
        else:
            swept.bucket_size = sizes[label]
            buckets = str(len(swept.bucket_plan(model)))
        grid.add(label, buckets, f"{each.median * 1e6:.0f}", str(Ratio.of(each, samples[best])))
    report.grids.append(grid)
    report.notes += [f"{name}: {decision}" for decision in chosen.decisions()]
    ratio = samples[AUTO].median / samples[best].median
    report.bars.append(Bar(f"{name}: auto to the best of {len(sizes)} sizes", ratio, TARGET, at_least=False))


if __name__ == "__main__":
    run(main)
