"""The common parts of all benchmarks: alternating windows, medians, ratios, bars, and reports.

Systems take turns, A B C A B C, so that other load on the machine affects all of them alike; only ratios within one run
are meaningful, and the report gives them beside the figures.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import results_file
from benchmarks.machine import describe_machine, describe_versions
from clcomm.base.errors import ArgumentError

_FILE_WIDTH = 160
_FILLED = 0.8  # of a window: enough to tell how many repetitions fill it


@dataclass(frozen=True)
class Samples:
    """One system's figures, a value for each window, in the windows' order."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ArgumentError("samples: expected at least one value, got none")

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)


@dataclass(frozen=True)
class Ratio:
    """One system's figure over another's in the same round: the median over the rounds, and their range.

    Load of others that lasts longer than a round slows both sides of it, but not the medians of both alike.
    """

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, mine: Samples, theirs: Samples) -> Ratio:
        """Return mine over theirs. Raises ArgumentError unless both were measured in the same rounds."""
        if len(mine.values) != len(theirs.values):
            raise ArgumentError(
                f"samples: expected as many on both sides, got {len(mine.values)}, {len(theirs.values)}"
            )
        rounds = [a / b for a, b in zip(mine.values, theirs.values, strict=True)]
        return cls(statistics.median(rounds), min(rounds), max(rounds))

    def __str__(self) -> str:
        return f"{self.value:.2f}x ({self.low:.2f}-{self.high:.2f})"


def alternate(
    measures: Mapping[str, Callable[[], float]],
    windows: int,
    *,
    warm_up: int = 1,
    show: Callable[[str], object] = lambda line: None,
) -> dict[str, Samples]:
    """Call each measure in turn, in `windows` rounds after `warm_up` rounds that do not count.

    Each round begins with another measure, so that effects of the window before are shared by all.
    """
    if windows < 1:
        raise ArgumentError(f"windows: expected a number from 1 up, got {windows}")
    values: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(-warm_up, windows):
        show("warming up" if number < 0 else f"window {number + 1} of {windows}")
        for name in rotated(list(measures), number):
            value = measures[name]()
            if number >= 0:
                values[name].append(value)
    return {name: Samples(tuple(list_)) for name, list_ in values.items()}


def measured(jobs: Mapping[str, Any], options: argparse.Namespace, **case: Any) -> dict[str, Samples]:
    """Return the runs a second of each way of a case, in alternating windows; its job answers for case and way."""

    def seconds(way: str, repeats: int) -> float:
        return float(jobs[way].ask(**case, way=way, repeats=repeats)[0][options.clock])

    repeats = {}
    for way in jobs:
        seconds(way, 4)  # builds and records
        repeats[way] = repeats_that_fill(partial(seconds, way), options.window_s)

    def speed(way: str) -> float:
        return repeats[way] / seconds(way, repeats[way])

    return alternate({way: partial(speed, way) for way in jobs}, options.windows)


def rotated(names: list[str], by: int) -> list[str]:
    """Return the names in their order, beginning with another one."""
    start = by % max(1, len(names))
    return names[start:] + names[:start]


def repeats_for(seconds_each: float, window_s: float, least: int = 3) -> int:
    """Return the number of repetitions that fills a window."""
    return max(least, round(window_s / seconds_each)) if seconds_each > 0 else least


def repeats_that_fill(seconds: Callable[[int], float], window_s: float) -> int:
    """Return the number of repetitions that fills a window; `seconds` measures any number of them.

    What only the first runs cost, as the recording of a step does, does not count: of two runs the shorter one does.
    """
    repeats, elapsed = 1, min(seconds(1), seconds(1))
    while elapsed < _FILLED * window_s:
        repeats = max(repeats + 1, min(10 * repeats, repeats_for(elapsed / repeats, window_s)))
        elapsed = min(seconds(repeats), seconds(repeats))
    return repeats_for(elapsed / repeats, window_s, least=1)


def best_of(samples: Mapping[str, Samples], names: Sequence[str]) -> str:
    """Return the name with the highest median."""
    return max(names, key=lambda name: samples[name].median)


@dataclass(frozen=True)
class Bar:
    """A goal for a figure; `at_least`: whether `target` is a lower bound, else an upper one."""

    what: str
    value: float
    target: float
    unit: str = "x"
    at_least: bool = True

    @property
    def reached(self) -> bool:
        return self.value >= self.target if self.at_least else self.value <= self.target

    def __str__(self) -> str:
        relation = "at least" if self.at_least else "at most"
        verdict = "reached" if self.reached else "missed"
        return f"{self.what}: {self.value:.3g}{self.unit}, {relation} {self.target:g}{self.unit} asked for: {verdict}"


@dataclass
class Grid:
    """A table as text: the first column is left-aligned, the others right-aligned."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        """Append a row."""
        if len(cells) != len(self.columns):
            raise ArgumentError(f"row: expected {len(self.columns)} cells, got {len(cells)}")
        self.rows.append(cells)

    def rich(self) -> Table:
        """Return the table for a terminal."""
        table = Table(title=self.title, title_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="right" if index else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """Return the table as Markdown."""
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        lines = [_row(self.columns), _row(rule), *(_row(row) for row in self.rows)]
        return f"**{self.title}**\n\n" + "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


@dataclass
class Report:
    """The results of one benchmark."""

    title: str
    command: str
    grids: list[Grid] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def show(self, console: Console) -> None:
        """Print the report."""
        for grid in self.grids:
            console.print(grid.rich())
        for line in self.notes:
            console.print(line, highlight=False)
        for bar in self.bars:
            console.print(str(bar), style="green" if bar.reached else "bold red", highlight=False)
        if self.bars:
            console.print(self.verdict(), highlight=False)

    def verdict(self) -> str:
        """Return one line: how many bars hold on this machine, and which do not."""
        missed = [bar.what for bar in self.bars if not bar.reached]
        held = f"on this machine ({describe_machine()}) {len(self.bars) - len(missed)} of {len(self.bars)} bars hold"
        return f"{held}; missed: {'; '.join(missed)}" if missed else held

    def markdown(self, today: date | None = None) -> str:
        """Return the report as a section of RESULTS.md, with date, machine, versions and command."""
        parts = [
            f"## {(today or date.today()).isoformat()}: {self.title}",
            f"`{self.command}`",
            f"{describe_machine()}; {describe_versions()}.",
            *(grid.markdown() for grid in self.grids),
        ]
        lines = [*self.notes, *(str(bar) for bar in self.bars)]
        if lines:
            parts.append("\n".join(f"- {line}" for line in lines))
        return "\n\n".join(parts) + "\n"

    def record(self, path: Path = results_file.RESULTS) -> None:
        """Keep it in a file of results, in place of the same command's earlier one on such a machine."""
        results_file.record(self.markdown(), path)


def parser(program: str, description: str, *, windows: int, window_s: float) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    result = argparse.ArgumentParser(prog=f"python -m {program}", description=description, allow_abbrev=False)
    result.add_argument("--windows", type=positive, default=windows, help="rounds that count; default: %(default)s")
    result.add_argument("--window-s", type=float, default=window_s, help="length of one; default: %(default)s")
    result.add_argument(
        "--record", action="store_true", help=f"keep the results in benchmarks/{results_file.RESULTS.name}"
    )
    return result


def add_clock(parser: argparse.ArgumentParser) -> None:
    """Add --clock, for benchmarks in one thread of one process."""
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall",
        help="cpu counts the process's own time: for CPU devices on a machine that is busy; default: %(default)s",
    )  # fmt: skip


def positive(text: str) -> int:
    """Read a whole number from 1 up."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 up, got {text!r}")
    return int(text)


def count(text: str) -> int:
    """Read a whole number from 0 up."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 up, got {text!r}")
    return int(text)


def from_zero(text: str) -> float:
    """Read a finite number from 0 up."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number from 0 up, got {text!r}")
    return value


def make_console() -> Console:
    """Return the console of a benchmark; in a file, lines are as wide as the tables need."""
    return Console(soft_wrap=True) if sys.stdout.isatty() else Console(soft_wrap=True, width=_FILE_WIDTH)


def command_line(program: str) -> str:
    """Return the command that started this program."""
    return " ".join(["python", "-m", program, *sys.argv[1:]])


def conclude(report: Report, console: Console, record: bool) -> None:
    """Show a report, and record it if --record asks for it."""
    report.show(console)
    if record:
        report.record()
        console.print(f"recorded in benchmarks/{results_file.RESULTS.name}", highlight=False)
