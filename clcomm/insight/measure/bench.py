"""`clcomm bench`: times collectives by size on one or more transports, with nccl-tests' columns.

clcomm/insight/measure/timing.py describes how calls are timed, docs/bench.md the columns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from clcomm._version import __version__
from clcomm.base.console.option_types import number, whole_number
from clcomm.base.console.output import make_console
from clcomm.base.console.table import Layout, Line, TextColumn, TextTable, wrapped
from clcomm.base.errors import ArgumentError, DeviceError
from clcomm.base.host import require_memory
from clcomm.base.storage.files import write_whole
from clcomm.base.units import parse_size
from clcomm.comm.collectives.world import TRANSPORTS
from clcomm.comm.communicator import Communicator
from clcomm.comm.costs.costfile import SUMMED_BY
from clcomm.comm.costs.model import fit
from clcomm.comm.transport.mpi_runtime import library
from clcomm.insight.drawing.svg import require_svg
from clcomm.insight.measure.collective_cases import CASES, OPS
from clcomm.insight.measure.plot import draw_bench
from clcomm.insight.measure.timing import (
    BenchRow,
    MeasuredTransport,
    TimingSchedule,
    add_sums_option,
    agreed_fold,
    measure,
    sizes_between,
)
from clcomm.jobs.checkpoint.outputs import check_writable

if TYPE_CHECKING:
    from rich.console import Console

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


# --- The output of `clcomm bench`: versions and devices, the rows, and each transport's average busbw. ---


class Placement(NamedTuple):
    """A rank's host, share of the host's cores, and device ("" for none)."""

    host: str
    cores: int
    device: str


def header(control: Communicator, schedule: TimingSchedule, has_devices: bool, sums: str) -> list[str]:
    """Return the lines above the rows: versions, ranks, hosts, devices, and the schedule. Collective.

    Args:
        sums: in shared memory, a key of SUMMED_BY.
    """
    places = control.all_gather_object(Placement(os.uname().nodename, control.cores, _device(control, has_devices)))
    return [
        f"clcomm {__version__}, Python {platform.python_version()}, NumPy {np.__version__}, "
        f"mpi4py {version('mpi4py')}, {library()}",
        f"{_count(control.size, 'rank')} on {_count(control.hosts, 'host')}",
        *map(_placement_line, _ranks_by_placement(places)),
        f"{schedule.calls * schedule.windows} timed calls at each size, in {_count(schedule.windows, 'window')}, "
        f"after {schedule.warmup}; sums by {SUMMED_BY[sums]}",
    ]


def _device(control: Communicator, has_devices: bool) -> str:
    if not has_devices:
        return ""
    from clcomm.engine import selection

    try:
        candidate = selection.choose(None, control.local_rank)
    except (DeviceError, ImportError):
        return ""
    return f"{candidate.label} {candidate.cl_device.name.strip()}"


def _ranks_by_placement(places: Sequence[Placement]) -> Iterator[tuple[list[int], Placement]]:
    for place in dict.fromkeys(places):
        yield [rank for rank, each in enumerate(places) if each == place], place


def _placement_line(found: tuple[list[int], Placement]) -> str:
    ranks, (host, cores, device) = found
    numbers = ", ".join(map(str, ranks))
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        numbers = f"{ranks[0]} to {ranks[-1]}"
    each = " each" if len(ranks) > 1 else ""
    where = f"{host}, {_count(cores, 'core')}{each}{f', {device}' if device else ''}"
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}: {where}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


Write = Callable[[BenchRow], str]
_COLUMNS: tuple[tuple[TextColumn, Write], ...] = (
    (TextColumn("operation", right=False), lambda row: row.operation),
    (
        TextColumn("transport", right=False),
        lambda row: row.transport if row.moved_by == row.transport else f"{row.transport}:{row.moved_by}",
    ),
    (TextColumn("bytes"), lambda row: str(row.bytes)),
    (TextColumn("count"), lambda row: str(row.count)),
    (TextColumn("dtype"), lambda row: row.dtype),
    (TextColumn("op"), lambda row: row.op),
    (TextColumn("sums"), lambda row: row.sums),
    (TextColumn("min us", least=7), lambda row: f"{row.min_us:.1f}"),
    (TextColumn("p50 us", least=7), lambda row: f"{row.p50_us:.1f}"),
    (TextColumn("p99 us", least=7), lambda row: f"{row.p99_us:.1f}"),
    (TextColumn("algbw GB/s"), lambda row: f"{row.algbw_gb_s:.3f}"),
    (TextColumn("busbw GB/s"), lambda row: f"{row.busbw_gb_s:.3f}"),
    (TextColumn("wrong"), lambda row: str(row.wrong)),
)
#: The columns that are dropped first on a narrow terminal.
_DROPPED_FIRST = ("op", "dtype", "sums", "count", "p99 us", "min us", "algbw GB/s", "wrong", "busbw GB/s")


class Printer:
    """Prints rows as they are measured; with several transports, each row's speed relative to the first transport."""

    def __init__(self, console: Console, compare: bool, largest: int = 0):
        """Print on `console`; `compare` is for several transports, `largest` the largest size to come, in bytes."""
        self.console, self.compare = console, compare
        self._rows: list[tuple[str, ...]] = []
        self._layout: Layout | None = None
        least = {"bytes": len(str(largest)), "count": len(str(largest // 4))}
        self._columns = [
            column._replace(least=max(column.least, least.get(column.heading, 0))) for column, _ in _COLUMNS
        ]

    def begin(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._print(line)

    def _print(self, text: str, style: str = "") -> None:
        for line in wrapped(text, self.console.width):
            self.console.print(line, style=style, markup=False)

    def show(self, rows: Sequence[BenchRow]) -> None:
        """Print the rows of one size; headings above the first row, and again when columns become wider."""
        if self.compare and len(self._columns) == len(_COLUMNS):
            self._columns.append(TextColumn(f"speed/{rows[0].transport}"))
        cells = [self._cells(row, rows[0]) for row in rows]
        self._rows += cells
        styles = ["bold red" if row.wrong else "" for row in rows]
        layout = self._table(self._rows).layout(self.console.width)
        for line in self._lines(cells, styles, layout):
            self.console.print(line.text, style=line.style, markup=False)
        self._layout = layout

    def _lines(self, cells: Sequence[tuple[str, ...]], styles: Sequence[str], layout: Layout | None) -> Iterator[Line]:
        table = self._table(cells, styles)
        if layout is None:
            yield from table.stacked(self.console.width)
            return
        if layout != self._layout:
            yield from table.row_lines([column.heading for column in self._columns], layout, "bold")
        for row, style in zip(cells, styles, strict=True):
            yield from table.row_lines(row, layout, style)

    def _cells(self, row: BenchRow, first: BenchRow) -> tuple[str, ...]:
        ratio = first.p50_us / row.p50_us if row.p50_us else 0.0
        return (*(write(row) for _, write in _COLUMNS), *([f"{ratio:.2f}x"] if self.compare else []))

    def _table(self, rows: Sequence[tuple[str, ...]], styles: Sequence[str] = ()) -> TextTable:
        last = self._columns[-1].heading if self.compare else "transport"
        return TextTable(self._columns, rows, dropped_first=(*_DROPPED_FIRST, last), styles=styles)

    def conclude(self, rows: Sequence[BenchRow]) -> None:
        """Print the averages, the columns that were dropped, and a warning about wrong elements."""
        for operation in dict.fromkeys(row.operation for row in rows):
            averages = average_busbw([row for row in rows if row.operation == operation])
            shown = ", ".join(f"{value:.3f} GB/s through {name}" for name, value in averages.items())
            self._print(f"average busbw of {operation}: {shown}")
        missing = self._table(self._rows).missing(self._layout)
        if missing:
            self._print(f"{missing}; --json has them too")
        wrong = sum(row.wrong for row in rows)
        if wrong:
            self._print(f"{wrong} elements are wrong: do not trust this transport", "bold red")


def average_busbw(rows: Sequence[BenchRow]) -> dict[str, float]:
    """Return each transport's mean bus bandwidth over sizes, in GB/s."""
    by_transport: dict[str, list[float]] = {}
    for row in rows:
        by_transport.setdefault(row.transport, []).append(row.busbw_gb_s)
    return {name: sum(values) / len(values) for name, values in by_transport.items()}
