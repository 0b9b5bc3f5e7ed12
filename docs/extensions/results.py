"""The page of benchmarks: RESULTS.md and HISTORY.md by subject, tables of ratios with a chart, the latest run first.

`<!-- results -->` stands for all of it, older runs of a subject folded, `<!-- results in short -->` for some ratios.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from clcomm.insight.drawing.scene import CHARACTER, Rect, Scale, Text, level
from docs.extensions import drawings
from docs.extensions.svg import BLUE, FONT, GREEN, LINE, PURPLE, VERMILLION, legend, line, svg

ROOT = Path(__file__).resolve().parent.parent.parent
MARKER, SHORT = "<!-- results -->", "<!-- results in short -->"
WIDTH = 720
_FIRST = (
    "images per second",
    "PyTorch DDP",
    "Horovod",
    "LizarDist",
    "time to",
    "all-reduce",
    "kernels",
    "convolutions",
)
#: What the page shows in short: a name, a part of the command, the start of a table's caption, a row, a column.
IN_SHORT = (
    ("ConvNet, 4 ranks, to DDP", "peers --model convnet mlp", "convnet", "PyTorch DDP, gloo", "clcomm is (range)"),
    ("MLP, 4 ranks, to DDP", "peers --model convnet mlp", "mlp", "PyTorch DDP, gloo", "clcomm is (range)"),
    ("ResNet, 4 ranks, to DDP", "networks --model resnet", "resnet", "PyTorch DDP, gloo", "clcomm is (range)"),
    ("GPT, 4 ranks, to DDP", "networks --model gpt", "gpt", "PyTorch DDP, gloo", "clcomm is (range)"),
    ("DDP's MLP on clcomm, 2 ranks, to gloo", "torch_ddp --ranks 2", "A training step", "mlp", "of gloo's"),
    ("all-reduce of 1 MiB, 2 ranks, to MPI's", "all_reduce", "all-reduce, 2 ranks", "1 MiB", "to MPI Allreduce"),
    ("all-reduce of 4 KiB, 2 ranks, to DeepSpeed's", "all_reduce", "all-reduce, 2 ranks", "4 KiB", "to DeepSpeed"),
    ("4096³ product on an H200, to PyTorch", "kernels --device gpu", "GFLOP/s, gemm", "GEMM NN 4096 x 4096 x 4096",
     "to PyTorch"),
)  # fmt: skip
#: The most characters of a row's name.
_NAME = 44
_COLOURS = (BLUE, VERMILLION, GREEN, PURPLE)
_RATIO = re.compile(r"^([\d,.]+)x \(([\d,.]+)-([\d,.]+)\)$")
_TABLE = re.compile(r"((?:^\|.*\|(?:\n|\Z))+)", re.MULTILINE)


class Bar(NamedTuple):
    """A row of a chart of ratios: a name, and a median with its range for each series; None: not measured."""

    name: str
    values: Sequence[tuple[float, float, float] | None]


class Run(NamedTuple):
    """A section of RESULTS.md: its subject, date and text."""

    subject: str
    date: str
    body: str


def sections(results: str) -> str:
    """Return a file's sections, without what stands above them."""
    return results[results.index("\n## ") + 1 :]


def runs(results: str) -> list[Run]:
    """Return the sections, the latest first."""
    parts = re.findall(r"^## ([\d-]+): (.+?)\n(.*?)(?=^## |\Z)", results, re.MULTILINE | re.DOTALL)
    return [Run(subject.split(",")[0], date, body.strip()) for date, subject, body in parts][::-1]


def page(results: str) -> str:
    """Return the page's Markdown: a heading a subject, in it the latest run, and the others folded."""
    by_subject: dict[str, list[Run]] = {}
    for run in runs(results):
        by_subject.setdefault(run.subject, []).append(run)
    lines = []
    for subject, (latest, *older) in sorted(by_subject.items(), key=lambda item: _rank(item[0])):
        lines.append(f"## {subject[0].upper()}{subject[1:]}\n")
        lines.append(f"### Run of {latest.date}\n\n{with_charts(latest.body)}\n")
        for run in older:
            options = escape(command_of(run).partition("benchmarks.")[2])
            title = f"Run of {run.date}: <code>{options}</code>"
            lines.append(f"<details>\n<summary>{title}</summary>\n\n{with_charts(run.body)}\n\n</details>\n")
    return "\n".join(lines)


def command_of(run: Run) -> str:
    """Return the command at the top of a section, without --record."""
    return run.body.partition("\n")[0].strip("`").replace(" --record", "")


def in_short(results: str) -> str:
    """Return the latest ratio of each line of IN_SHORT, as Markdown: a chart, and a table of the same numbers."""
    found = runs(results)
    measured = [_ratio(latest(found, *where)) for _, *where in IN_SHORT]
    shown = [(about, ratio) for about, ratio in zip(IN_SHORT, measured, strict=True) if ratio is not None]
    bars = [Bar(name, [ratio]) for (name, *_), ratio in shown]
    drawn = drawings.inline(ratios(bars, ["clcomm to the other"]), "Chart of the ratios of some results")
    rows = [
        f"| {name} | {ratio:g}x | {low:g} to {high:g} | `benchmarks.{command}` |"
        for (name, command, *_), (ratio, low, high) in shown
    ]
    table = "\n".join(["| result | clcomm is | range | command |", "|---|---:|---:|---|", *rows])
    return f"```{{raw}} html\n{drawn}\n```\n\n{table}"


def latest(found: list[Run], command: str, caption: str, row: str, column: str) -> str:
    """Return a cell of the latest run that has it: command, start of the table's caption, row, column.

    Raises LookupError if no run has it.
    """
    for run in found:
        if f"benchmarks.{command}" not in command_of(run):
            continue
        for head, table in re.findall(r"^\*\*(.+?)\*\*\n\n((?:^\|.*\|\n?)+)", run.body, re.MULTILINE):
            names, _, *rows = [[cell.strip() for cell in each.strip("|").split("|")] for each in table.splitlines()]
            cells = next((cells for cells in rows if cells[0] == row), None) if column in names else None
            if head.startswith(caption) and cells and cells[names.index(column)]:
                return cells[names.index(column)]
    raise LookupError(f"{command}: no {row!r} with {column!r} in a table {caption!r}")


def _rank(subject: str) -> int:
    """Return a subject's place: what most readers look for comes first."""
    return next((place for place, words in enumerate(_FIRST) if subject.startswith(words)), len(_FIRST))


def with_charts(body: str) -> str:
    """Return a section with a chart before each table that has ratios."""

    def add(table: re.Match[str]) -> str:
        drawn = chart(table[1])
        return f"```{{raw}} html\n{drawn}\n```\n\n{table[1]}" if drawn else table[1]

    return _TABLE.sub(add, body)


def chart(table: str) -> str:
    """Return a chart of a table's ratios with their ranges, as HTML; "" for a table without any."""
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.strip().splitlines()]
    head, cells = rows[0], rows[2:]
    columns = [at for at in range(1, len(head)) if any(_RATIO.match(row[at]) for row in cells)][: len(_COLOURS)]
    bars = [Bar(row[0], [_ratio(row[at]) for at in columns]) for row in cells]
    bars = [bar for bar in bars if any(bar.values)]
    names = [head[at] for at in columns]
    return drawings.inline(ratios(bars, names), f"Chart of the ratios in the table: {', '.join(names)}") if bars else ""


def _ratio(cell: str) -> tuple[float, float, float] | None:
    found = _RATIO.match(cell)
    return tuple(float(each.replace(",", "")) for each in found.groups()) if found else None  # type: ignore[return-value]


def ratios(bars: list[Bar], names: list[str]) -> str:
    """Return medians as points and ranges as lines, a row each, on a logarithmic axis with a line at 1x."""
    values = [value for bar in bars for each in bar.values if each for value in each]
    low, high = min(*values, 1.0) / 1.1, max(*values, 1.0) * 1.1
    left = min(max(len(bar.name) for bar in bars), _NAME) * CHARACTER + 16
    top, row = LINE * 2, LINE * max(1.0, 0.7 * len(names))
    bottom = top + row * len(bars) + 4
    x = Scale(low, high, left, WIDTH - 24, logarithmic=True)
    parts = legend(0, FONT, list(zip(names, _COLOURS, strict=False)))
    for tick in ticks(low, high):
        parts += [
            line(x(tick), top, x(tick), bottom, (3.0, 3.0) if tick != 1 else ()),
            Text(x(tick), bottom + 15, f"{tick:g}x", "middle"),
        ]
    for number, bar in enumerate(bars):
        middle = top + row * (number + 0.5)
        parts.append(Text(left - 8, middle + 4, bar.name[:_NAME], "end"))
        for series, value in enumerate(bar.values):
            if value:
                y = middle + (series - (len(names) - 1) / 2) * row * 0.7 / len(names)
                note = f"{bar.name}, {names[series]}: {value[0]:g}x ({value[1]:g} to {value[2]:g})"
                parts.append(level(x(value[1]), x(value[2]), y, _COLOURS[series], 2.0))
                parts.append(Rect(x(value[0]) - 4, y - 4, 8, 8, _COLOURS[series], note))
    return svg(WIDTH, bottom + 24, parts)


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers on a logarithmic axis, 1 among them, few enough to be read."""
    for steps in ((1, 1.2, 1.5, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        found = [step * 10.0**power for power in range(-4, 6) for step in steps if low <= step * 10.0**power <= high]
        if len(found) <= 9:
            return found
    return [1.0]


def setup(app: Any) -> dict[str, Any]:
    def on_source_read(app: Any, docname: str, source: list[str]) -> None:
        if MARKER in source[0]:
            newest, earlier = ((ROOT / "benchmarks" / name).read_text() for name in ("RESULTS.md", "HISTORY.md"))
            source[0] = (
                source[0].replace(SHORT, in_short(newest)).replace(MARKER, page(sections(earlier) + sections(newest)))
            )

    app.connect("source-read", on_source_read)
    return {"parallel_read_safe": True}
