"""`clcomm bench`: collectives by size, with nccl-tests' columns, through one transport or several side by side.

How it is measured stands in clcomm/measure.py, what the columns mean in docs/bench.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Sequence
from typing import Any

from clcomm._version import __version__
from clcomm.bench_report import Printer, average_busbw, header
from clcomm.collective_cases import CASES, OPS
from clcomm.communicator import Communicator
from clcomm.console import make_console
from clcomm.errors import ArgumentError
from clcomm.files import write_whole
from clcomm.host_memory import require_memory
from clcomm.measure import Lane, Row, Schedule, measure, sizes_between
from clcomm.option_types import number, whole_number
from clcomm.outputs import check_writable
from clcomm.sums import add_sums, agreed_fold
from clcomm.units import parse_size
from clcomm.world import TRANSPORTS

SCHEMA = 1
#: Calls of one size, and the factor between sizes, at the most.
MOST_CALLS, MOST_FACTOR = 10**6, 1e6
#: How many arrays of its size a case holds on a rank, at the most.
_ARRAYS = 3
DTYPES = ("float32", "float64", "float16", "int8", "uint8", "int32", "int64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `clcomm bench`."""
    add = parser.add_argument
    add("--operation", nargs="+", default=["all_reduce"], choices=CASES, metavar="NAME",
        help=f"one or more of {', '.join(CASES)}; default: all_reduce")  # fmt: skip
    add("--transport", nargs="+", default=["auto"], choices=TRANSPORTS, metavar="NAME",
        help=f"one or more of {', '.join(TRANSPORTS)}, which take turns; default: auto")  # fmt: skip
    add("--min", default="256", metavar="SIZE", help="smallest size; default: %(default)s bytes")
    add("--max", default="16MiB", metavar="SIZE", help="largest size; default: %(default)s")
    add(
        "--factor",
        type=number(1, above=True, most=MOST_FACTOR),
        default=4.0,
        help="from one size to the next; default: %(default)g",
    )
    add("--dtype", default="float32", choices=DTYPES, help="of the elements; default: %(default)s")
    add("--op", default="sum", choices=OPS, help="of reductions; default: %(default)s")
    add_sums(parser)
    add_schedule(parser)
    add("--json", metavar="FILE", help="also write the rows there")
    add("--plot", metavar="FILE.png", help="also draw time and bandwidth by size (needs clcomm[plot])")


def add_schedule(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how often each call is timed."""
    add = parser.add_argument
    add(
        "--iterations",
        type=whole_number(1, MOST_CALLS),
        default=20,
        help="timed calls, in all windows together; default: %(default)s",
    )
    add(
        "--windows",
        type=whole_number(1, MOST_CALLS),
        default=4,
        help="turns that transports take at each size; default: %(default)s",
    )
    add(
        "--warmup",
        type=whole_number(0, MOST_CALLS),
        default=3,
        help="calls before, which do not count; default: %(default)s",
    )


def schedule_of(options: argparse.Namespace) -> Schedule:
    """Return the options' schedule; raises ArgumentError for numbers that make none."""
    if options.iterations < options.windows:
        raise ArgumentError(
            f"--iterations: expected at least one in each of {options.windows} windows, got {options.iterations}"
        )
    return Schedule(-(-options.iterations // options.windows), options.windows, options.warmup)


def run(options: argparse.Namespace) -> int:
    """Measure and print, on rank 0, as the rows come; return 0, or 1 when any element was wrong. Collective."""
    schedule = schedule_of(options)
    sizes = sizes_between(parse_size(options.min, "--min"), parse_size(options.max, "--max"), options.factor)
    if options.plot is not None and not options.plot.lower().endswith(".png"):
        raise ArgumentError(f"--plot: expected a file whose name ends in .png, got {options.plot!r}")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError("--plot: needs matplotlib, which is not installed; pip install 'clcomm[plot]'")
    with Communicator(transport="mpi") as control:
        check_writable(control, {"--json": options.json, "--plot": options.plot})
        require_memory("--max", options.max, _ARRAYS * sizes[-1] * len(set(options.transport)), control.local_size)
        fold = agreed_fold(control, options.sums)
        lanes = [Lane(name, fold=fold) for name in dict.fromkeys(options.transport)]
        first_lines = header(control, schedule, options.sums != "numpy", "numpy" if fold is None else "device")
        printer = Printer(make_console(highlight=False), len(lanes) > 1, sizes[-1]) if control.rank == 0 else None
        if printer:
            printer.begin(first_lines)
        rows = measure_all(lanes, control, options, sizes, schedule, printer.show if printer else lambda rows: None)
        document = as_document(rows, control, schedule)
        for lane in lanes:
            lane.comm.finalize()
    if printer:
        printer.conclude(rows)
        write_results(document, options)
    return 1 if any(row.wrong for row in rows) else 0


def measure_all(
    lanes: Sequence[Lane],
    control: Communicator,
    options: argparse.Namespace,
    sizes: Sequence[int],
    schedule: Schedule,
    show: Callable[[Sequence[Row]], object],
) -> list[Row]:
    """Return all rows; `show` gets those of one size at a time, as they come."""
    rows: list[Row] = []
    for operation in dict.fromkeys(options.operation):
        done: set[int] = set()
        for nbytes in sizes:
            try:
                found = measure(lanes, control, operation, nbytes, options.dtype, options.op, schedule)
            except MemoryError:
                raise ArgumentError(f"--max: expected sizes that fit into memory, got {nbytes} bytes") from None
            if found[0].bytes not in done:  # sizes below an element a rank all come to the same
                done.add(found[0].bytes)
                rows += found
                show(found)
    return rows


def as_document(rows: Sequence[Row], control: Communicator, schedule: Schedule) -> dict[str, Any]:
    """Return what --json writes: the job, then the rows by their columns; see docs/bench.md."""
    return {
        "schema": SCHEMA,
        "clcomm": __version__,
        "world_size": control.size,
        "ranks_per_host": control.local_size,
        "cores_per_rank": control.cores,
        "iterations": schedule.calls * schedule.windows,
        "windows": schedule.windows,
        "warmup": schedule.warmup,
        "average_busbw_gb_s": {
            operation: average_busbw([row for row in rows if row.operation == operation])
            for operation in dict.fromkeys(row.operation for row in rows)
        },
        "rows": [row.as_dict() for row in rows],
    }


def write_results(document: dict[str, Any], options: argparse.Namespace) -> None:
    """Write --json's and --plot's files."""
    if options.json:
        write_whole(options.json, json.dumps(document, indent=1) + "\n", "--json")
    if options.plot:
        from clcomm.plot import draw_bench  # here, because matplotlib is an extra

        draw_bench(document, options.plot)
