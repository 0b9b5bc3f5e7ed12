"""`clcomm bench`: collectives by size, with nccl-tests' columns, through one transport or several side by side.

How it is measured stands in clcomm/measure.py, what the columns mean in docs/bench.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from clcomm._version import __version__
from clcomm.cache import write_whole
from clcomm.collective_cases import CASES
from clcomm.communicator import Communicator
from clcomm.errors import ArgumentError
from clcomm.measure import Lane, Row, Schedule, measure, sizes_between
from clcomm.outputs import check_writable
from clcomm.sums import add_sums, agreed_fold
from clcomm.transport.reduction import FOLDS
from clcomm.units import parse_size
from clcomm.world import TRANSPORTS

SCHEMA = 1
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
    add("--factor", type=float, default=4.0, help="from one size to the next; default: %(default)g")
    add("--dtype", default="float32", choices=DTYPES, help="of the elements; default: %(default)s")
    add("--op", default="sum", choices=FOLDS, help="of reductions; default: %(default)s")
    add_sums(parser)
    add_schedule(parser)
    add("--json", metavar="FILE", help="also write the rows there")
    add("--plot", metavar="FILE.png", help="also draw time and bandwidth by size (needs clcomm[plot])")


def add_schedule(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how often each call is timed."""
    add = parser.add_argument
    add("--iterations", type=int, default=20, help="timed calls, in all windows together; default: %(default)s")
    add("--windows", type=int, default=4, help="turns that transports take at each size; default: %(default)s")
    add("--warmup", type=int, default=3, help="calls before, which do not count; default: %(default)s")


def schedule_of(options: argparse.Namespace) -> Schedule:
    """Return the options' schedule; raises ArgumentError for numbers that make none."""
    for name, least in (("windows", 1), ("warmup", 0)):
        if getattr(options, name) < least:
            raise ArgumentError(f"--{name}: expected a number from {least} up, got {getattr(options, name)}")
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
        fold = agreed_fold(control, options.sums)
        lanes = [Lane(name, fold=fold) for name in dict.fromkeys(options.transport)]
        printer = Printer(Console(soft_wrap=True, highlight=False), len(lanes) > 1) if control.rank == 0 else None
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
        "rows": [row.as_dict() for row in rows],
    }


def write_results(document: dict[str, Any], options: argparse.Namespace) -> None:
    """Write --json's and --plot's files."""
    if options.json:
        write_whole(options.json, json.dumps(document, indent=1) + "\n", "--json")
    if options.plot:
        from clcomm.plot import draw_bench  # here, because matplotlib is an extra

        draw_bench(document, options.plot)


_COLUMNS = (
    ("operation", 15, lambda row: row.operation),
    (
        "transport",
        13,
        lambda row: row.transport if row.moved_by == row.transport else f"{row.transport}:{row.moved_by}",
    ),
    ("bytes", 11, lambda row: str(row.bytes)),
    ("count", 11, lambda row: str(row.count)),
    ("dtype", 8, lambda row: row.dtype),
    ("op", 5, lambda row: row.op),
    ("sums", 6, lambda row: row.sums),
    ("min us", 10, lambda row: f"{row.min_us:.1f}"),
    ("p50 us", 10, lambda row: f"{row.p50_us:.1f}"),
    ("p99 us", 10, lambda row: f"{row.p99_us:.1f}"),
    ("algbw GB/s", 11, lambda row: f"{row.algbw_gb_s:.3f}"),
    ("busbw GB/s", 11, lambda row: f"{row.busbw_gb_s:.3f}"),
    ("wrong", 6, lambda row: str(row.wrong)),
)
_LEFT = ("operation", "transport")


class Printer:
    """Prints rows as they come; with several transports each row says how its median compares with the first's."""

    def __init__(self, console: Console, compare: bool):
        self.console, self.compare = console, compare
        self._began = False

    def show(self, rows: Sequence[Row]) -> None:
        """Print the rows of one size."""
        if not self._began:
            headings = [(name, width, name) for name, width, _ in _COLUMNS]
            self._print(headings, f"speed/{rows[0].transport}", "bold")
            self._began = True
        for row in rows:
            cells = [(name, width, write(row)) for name, width, write in _COLUMNS]
            ratio = rows[0].p50_us / row.p50_us if row.p50_us else 0.0
            self._print(cells, f"{ratio:.2f}x", "bold red" if row.wrong else "")

    def _print(self, cells: Sequence[tuple[str, int, str]], last: str, style: str) -> None:
        line = " ".join(text.ljust(width) if name in _LEFT else text.rjust(width) for name, width, text in cells)
        self.console.print(Text(f"{line} {last:>13}" if self.compare else line, style))

    def conclude(self, rows: Sequence[Row]) -> None:
        """Print what needs attention."""
        wrong = sum(row.wrong for row in rows)
        if wrong:
            self.console.print(Text(f"{wrong} elements are wrong: do not trust this transport", "bold red"))
