"""The output of `clcomm bench`: versions and devices, the rows, and each transport's average busbw."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from clcomm._version import __version__
from clcomm.base.console.table import Layout, Line, TextColumn, TextTable, wrapped
from clcomm.base.errors import DeviceError
from clcomm.comm.communicator import Communicator
from clcomm.comm.costs.costfile import SUMMED_BY
from clcomm.comm.transport.mpi_runtime import library
from clcomm.insight.measure.timing import BenchRow, TimingSchedule

if TYPE_CHECKING:
    from rich.console import Console


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
