"""`python -m benchmarks.jax_collectives`: all-reduces in jitted programs beside JAX's own on gloo, and mpi4jax.

The same ranks take turns on arrays of float32: clcomm.jax, the same Communicator called by JAX's `io_callback`, JAX's
`psum` between processes, and mpi4jax where it is installed. Results have to agree. A call counts with the slowest
rank's time: many in a loop of one program, as a simulation has them, or a program for each. A third table has means of
gradients, in one program as a training step has them: `clcomm.jax.sync` beside an all-reduce of each. A fourth has
programs with several all-reduces, each before the next or all in flight, where ranks take turns in being late.
"""

from __future__ import annotations

import argparse
import socket
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax  # after clcomm.jax, below, it makes arrays
import numpy as np

from benchmarks import harness
from benchmarks.harness import Bar, Grid, Ratio, Report, Samples
from benchmarks.on_ranks import relaunch, slowest_s
from clcomm import Communicator
from clcomm.base.units import format_size, parse_size
from clcomm.jax import all_reduce, all_reduce_async, sync

PROGRAM = "benchmarks.jax_collectives"
#: Numbers of gradients, and the size of each.
TREES = (40, "4KiB"), (16, "1MiB"), (4, "16MiB")
SIZES = "4KiB", "64KiB", "1MiB", "4MiB", "64MiB"
#: All-reduces in one program, and by how much a rank is late at every other one, as products of square matrices.
FLYING, LATE_PRODUCTS, LATE_SIDE = 8, 4, 256
OURS, CALLBACK, GLOO, MPI4JAX = "clcomm.jax", "io_callback", "JAX, gloo", "mpi4jax"

#: Adds an array up over the ranks, within a program.
Reduce = Callable[[Any], Any]
#: Runs a number of all-reduces of one array in a program.
Program = Callable[[int], Any]


class Sides:
    """What is compared: programs by name, on arrays of zeros, which stay zeros however often they are added up."""

    def __init__(self, comm: Communicator):
        self._comm = comm
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = comm.bcast(free.getsockname()[1])
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", comm.size, comm.rank)
        self._mesh = jax.make_mesh((comm.size,), ("ranks",))
        self._reduces: dict[str, Reduce] = {OURS: partial(all_reduce, comm=comm), CALLBACK: self._called_back}
        if find_spec("mpi4jax"):
            import mpi4jax
            from mpi4py import MPI

            self._reduces[MPI4JAX] = partial(mpi4jax.allreduce, op=MPI.SUM)

    def programs(self, array: np.ndarray) -> dict[str, Program]:
        """Return each side's program on an array of this rank."""
        own = jax.numpy.asarray(array)
        found = {
            name: partial(jax.jit(partial(_loop, each), static_argnums=1), own) for name, each in self._reduces.items()
        }
        spec = jax.sharding.PartitionSpec("ranks")
        placed = jax.sharding.NamedSharding(self._mesh, spec)
        whole = jax.make_array_from_process_local_data(placed, array, (array.size * self._comm.size,))

        def between_processes(x: Any, times: int) -> Any:
            loop = partial(_loop, lambda y: jax.lax.psum(y, "ranks"), times=times)
            return jax.shard_map(loop, mesh=self._mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)

        return found | {GLOO: partial(jax.jit(between_processes, static_argnums=1), whole)}

    def means(self, count: int, size: int) -> dict[str, Program]:
        """Return each side's program for the mean of so many gradients; it takes a number only to be a Program."""
        arrays = [np.zeros(size // 4, np.float32)] * count
        spec = jax.sharding.PartitionSpec("ranks")
        placed = jax.sharding.NamedSharding(self._mesh, spec)
        whole = [
            jax.make_array_from_process_local_data(placed, each, (each.size * self._comm.size,)) for each in arrays
        ]

        def between_processes(tree: Any) -> Any:
            mean = partial(jax.lax.pmean, axis_name="ranks")
            return jax.shard_map(mean, mesh=self._mesh, in_specs=spec, out_specs=spec, check_vma=False)(tree)

        ways = {OURS: partial(sync, comm=self._comm), GLOO: between_processes}
        if MPI4JAX in self._reduces:
            ways[MPI4JAX] = lambda tree: [self._reduces[MPI4JAX](each) / self._comm.size for each in tree]
        own = [*map(jax.numpy.asarray, arrays)]
        return {name: _once(jax.jit(way), whole if name == GLOO else own) for name, way in ways.items()}

    def _called_back(self, x: Any) -> Any:
        reduce = partial(_reduced, self._comm)
        return jax.experimental.io_callback(reduce, jax.ShapeDtypeStruct(x.shape, x.dtype), x, ordered=True)


def _reduced(comm: Communicator, x: Any) -> np.ndarray:
    array = np.asarray(x)
    return comm.all_reduce(array, out=np.empty_like(array))


def _once(program: Callable[[Any], Any], tree: Any) -> Program:
    return lambda times: program(tree)[-1]


def _loop(reduce: Reduce, x: Any, times: int) -> Any:
    return jax.lax.fori_loop(0, times, lambda _, y: reduce(y), x) if times > 1 else reduce(x)


def main() -> int:
    options, console = parse(), harness.make_console()
    ended = relaunch(PROGRAM, options.ranks)
    if ended is not None:
        return ended
    comm = Communicator()
    sides = Sides(comm)
    _require_sums(comm, sides)
    report = Report(f"All-reduces in JAX's programs, {comm.size} ranks", harness.command_line(PROGRAM))
    for title, in_loop in (("A call of many in a loop, us", True), ("A program with one call, us", False)):
        report.grids.append(_grid(comm, sides, options, report, title, in_loop))
    report.grids.append(_means(comm, sides, options, report))
    report.grids.append(_in_flight(comm, options))
    if comm.rank == 0:
        harness.conclude(report, console, options.record)
    jax.distributed.shutdown()
    return 0


def _require_sums(comm: Communicator, sides: Sides) -> None:
    for name, program in sides.programs(np.full(1000, comm.rank + 1, np.float32)).items():
        found = program(1).addressable_shards[0].data
        assert (found == comm.size * (comm.size + 1) / 2).all(), f"{name}: {found}"


def _grid(
    comm: Communicator, sides: Sides, options: argparse.Namespace, report: Report, title: str, in_loop: bool
) -> Grid:
    grid: Grid | None = None
    for size in map(parse_size, options.size):
        programs = sides.programs(np.zeros(size // 4, np.float32))
        grid = grid or Grid(
            title, ("an array of", *programs, *(f"{name} to ours" for name in programs if name != OURS))
        )
        estimate = _seconds(comm, programs[OURS], 4, in_loop)
        repeats = harness.repeats_for(estimate, options.window_s)
        measures = {n: partial(_seconds, comm, each, repeats, in_loop) for n, each in programs.items()}
        samples = harness.alternate(measures, options.windows)
        ratios = {name: Ratio.of(samples[name], samples[OURS]) for name in programs if name != OURS}
        grid.add(format_size(size), *map(_us, samples.values()), *map(str, ratios.values()))
        for name in (each for each in (GLOO, MPI4JAX) if each in ratios):
            how = "in a loop" if in_loop else "a program each"
            report.bars.append(Bar(f"{name}'s time to ours, {format_size(size)}, {how}", ratios[name].value, 1.0))
    assert grid is not None, "no size"
    return grid


def _means(comm: Communicator, sides: Sides, options: argparse.Namespace, report: Report) -> Grid:
    grid: Grid | None = None
    for count, size in TREES:
        programs = sides.means(count, parse_size(size))
        grid = grid or Grid(
            "A mean of gradients, us", ("", *programs, *(f"{n} to ours" for n in programs if n != OURS))
        )
        repeats = harness.repeats_for(_seconds(comm, programs[OURS], 4, False), options.window_s)
        measures = {name: partial(_seconds, comm, each, repeats, False) for name, each in programs.items()}
        samples = harness.alternate(measures, options.windows)
        ratios = {name: Ratio.of(samples[name], samples[OURS]) for name in programs if name != OURS}
        grid.add(f"{count} of {size}", *map(_us, samples.values()), *map(str, ratios.values()))
        for name, ratio in ratios.items():
            report.bars.append(Bar(f"{name}'s time to ours, mean of {count} of {size}", ratio.value, 1.0))
    assert grid is not None, "no tree"
    return grid


def _in_flight(comm: Communicator, options: argparse.Namespace) -> Grid:
    grid = Grid(f"{FLYING} all-reduces, ranks late in turn, us", ("each of", "blocking", "in flight", "to blocking"))
    late = jax.numpy.full((LATE_SIDE, LATE_SIDE), 1 / LATE_SIDE, np.float32)

    def work(number: int, array: Any) -> Any:
        """Return an array that is ready later on a rank whose turn it is."""
        product = late
        for _ in range(LATE_PRODUCTS * (number % comm.size == comm.rank)):
            product = product @ late
        return array + product[0, 0] * 0

    def blocking(array: Any) -> list[Any]:
        return [all_reduce(work(number, array), comm=comm) for number in range(FLYING)]

    def flying(array: Any) -> list[Any]:
        handles = [all_reduce_async(work(number, array), comm=comm) for number in range(FLYING)]
        return [handle.wait() for handle in handles]

    for size in "4KiB", "64KiB", "1MiB":
        own = jax.numpy.zeros(parse_size(size) // 4, np.float32)
        programs = {name: _once(jax.jit(way), own) for name, way in (("blocking", blocking), ("in flight", flying))}
        repeats = harness.repeats_for(_seconds(comm, programs["blocking"], 4, False), options.window_s)
        measures = {name: partial(_seconds, comm, each, repeats, False) for name, each in programs.items()}
        samples = harness.alternate(measures, options.windows)
        grid.add(size, *map(_us, samples.values()), str(Ratio.of(samples["in flight"], samples["blocking"])))
    return grid


def _seconds(comm: Communicator, program: Program, repeats: int, in_loop: bool) -> float:
    if in_loop:
        return slowest_s(comm, lambda: program(repeats).block_until_ready(), 1) / repeats
    return slowest_s(comm, lambda: program(1).block_until_ready(), repeats)


def _us(samples: Samples) -> str:
    return f"{samples.median * 1e6:,.0f}"


def parse() -> argparse.Namespace:
    parser = harness.parser(PROGRAM, "All-reduces of clcomm.jax beside JAX's own and mpi4jax.", windows=7, window_s=0.2)
    parser.add_argument("--ranks", type=harness.positive, default=2, help="default: %(default)s")
    parser.add_argument("--size", nargs="+", default=list(SIZES), help="of the arrays; default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
