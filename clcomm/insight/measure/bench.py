"""`clcomm bench`: times collectives by size on one or more transports, with nccl-tests' columns.

clcomm/insight/measure/timing.py describes how calls are timed, docs/bench.md the columns.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence

from clcomm._version import __version__
from clcomm.base.console.option_types import number, whole_number
from clcomm.base.console.output import make_console
from clcomm.base.errors import ArgumentError
from clcomm.base.host import require_memory
from clcomm.base.storage.files import write_whole
from clcomm.base.units import parse_size
from clcomm.comm.collectives.world import TRANSPORTS
from clcomm.comm.communicator import Communicator
from clcomm.comm.costs.model import fit
from clcomm.insight.drawing.svg import require_svg
from clcomm.insight.measure.bench_report import Printer, average_busbw, header
from clcomm.insight.measure.collective_cases import CASES, OPS
from clcomm.insight.measure.plot import draw_bench
from clcomm.insight.measure.summation import add_sums_option, agreed_fold
from clcomm.insight.measure.timing import BenchRow, MeasuredTransport, TimingSchedule, measure, sizes_between
from clcomm.jobs.checkpoint.output_files import check_writable

SCHEMA = 1
#: The most calls of one size, and the largest factor between sizes.
MOST_CALLS, MOST_FACTOR = 10**6, 1e6
#: The most arrays of its size that a case holds on a rank.
_ARRAYS = 3
DTYPES = ("float32", "float64", "float16", "int8", "uint8", "int32", "int64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--operation", nargs="+", default=["all_reduce"], choices=CASES, metavar="NAME",
        help=f"one or more of {', '.join(CASES)}; default: all_reduce")  # fmt: skip
    add("--transport", nargs="+", default=["auto"], choices=TRANSPORTS, metavar="NAME",
        help=f"one or more of {', '.join(TRANSPORTS)}, timed in turns; default: auto")  # fmt: skip
    add_sizes(parser, "256B", "16MiB")
    add("--dtype", default="float32", choices=DTYPES, help="of the elements; default: %(default)s")
    add("--op", default="sum", choices=OPS, help="of reductions; default: %(default)s")
    add_sums_option(parser)
    add_schedule(parser)
    add("--json", metavar="FILE", help="also write the rows to this file")
    add("--plot", metavar="FILE.svg", help="also draw time and bandwidth by size")


def add_sizes(parser: argparse.ArgumentParser, smallest: str, largest: str) -> None:
    """Add the options for the measured sizes; smallest, largest: the defaults."""
    add = parser.add_argument
    add("--min", default=smallest, metavar="SIZE", help="smallest size; default: %(default)s")
    add("--max", default=largest, metavar="SIZE", help="largest size; default: %(default)s")
    add(
        "--factor",
        type=number(1, above=True, most=MOST_FACTOR),
        default=4.0,
        help="between one size and the next; default: %(default)g",
    )


def add_schedule(parser: argparse.ArgumentParser) -> None:
    """Add the options for the timing schedule."""
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
        help="turns of each transport at each size; default: %(default)s",
    )
    add(
        "--warmup",
        type=whole_number(0, MOST_CALLS),
        default=3,
        help="untimed calls before; default: %(default)s",
    )


def schedule_of(options: argparse.Namespace) -> TimingSchedule:
    """Return the options' schedule; raises ArgumentError for fewer iterations than windows."""
    if options.iterations < options.windows:
        raise ArgumentError(
            f"--iterations: expected at least one in each of {options.windows} windows, got {options.iterations}"
        )
    return TimingSchedule(-(-options.iterations // options.windows), options.windows, options.warmup)


def run(options: argparse.Namespace) -> int:
    """Measure, and print each row on rank 0 at once; return 1 if any element was wrong, else 0. Collective."""
    schedule = schedule_of(options)
    sizes = sizes_between(parse_size(options.min, "--min"), parse_size(options.max, "--max"), options.factor)
    require_svg("--plot", options.plot)
    with Communicator(transport="mpi") as control:
        check_writable(control, {"--json": options.json, "--plot": options.plot})
        require_memory("--max", options.max, _ARRAYS * sizes[-1] * len(set(options.transport)), control.local_size)
        fold = agreed_fold(control, options.sums)
        targets = [MeasuredTransport(name, fold=fold) for name in dict.fromkeys(options.transport)]
        first_lines = header(control, schedule, options.sums != "numpy", "numpy" if fold is None else "device")
        printer = Printer(make_console(highlight=False), len(targets) > 1, sizes[-1]) if control.rank == 0 else None
        if printer:
            printer.begin(first_lines)
        rows = measure_all(targets, control, options, sizes, schedule, printer.show if printer else lambda rows: None)
        document = as_document(rows, control, schedule)
        for target in targets:
            target.comm.finalize()
    if printer:
        printer.conclude(rows)
        write_results(document, options)
    return 1 if any(row.wrong for row in rows) else 0


def measure_all(
    targets: Sequence[MeasuredTransport],
    control: Communicator,
    options: argparse.Namespace,
    sizes: Sequence[int],
    schedule: TimingSchedule,
    show: Callable[[Sequence[BenchRow]], object],
) -> list[BenchRow]:
    """Measure and return all rows; `show` gets those of each size at once. Collective over `control`."""
    rows: list[BenchRow] = []
    for operation in dict.fromkeys(options.operation):
        done: set[int] = set()
        for nbytes in sizes:
            try:
                found = measure(targets, control, operation, nbytes, options.dtype, options.op, schedule)
            except MemoryError:
                raise ArgumentError(f"--max: expected sizes that fit into memory, got {nbytes} bytes") from None
            if found[0].bytes not in done:  # sizes below one element a rank are all rounded up to that
                done.add(found[0].bytes)
                rows += found
                show(found)
    return rows


def as_document(rows: Sequence[BenchRow], control: Communicator, schedule: TimingSchedule) -> dict[str, object]:
    """Return the content of --json's file: the job, then the rows; docs/bench.md names the fields."""
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
        "fits": _fits(rows),
        "rows": [row.as_dict() for row in rows],
    }


def _fits(rows: Sequence[BenchRow]) -> list[dict[str, object]]:
    """Return the latency and the bandwidth of each operation and transport with two sizes or more."""
    points: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        if row.p50_us > 0:  # else it took less than the clock can tell
            points.setdefault((row.operation, row.transport), []).append((row.bytes, row.p50_us / 1e6))
    return [
        {"operation": operation, "transport": transport, "alpha_s": found.cost.alpha_s,
         "beta_s_per_byte": found.cost.beta_s_per_byte, "median_error": found.median_error}
        for (operation, transport), measured in points.items()
        if len({nbytes for nbytes, _ in measured}) > 1
        for found in [fit(measured)]
    ]  # fmt: skip


def write_results(document: dict[str, object], options: argparse.Namespace) -> None:
    if options.json:
        write_whole(options.json, json.dumps(document, indent=1) + "\n", "--json")
    if options.plot:
        draw_bench(document, options.plot)
