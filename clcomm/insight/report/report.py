"""A run's report as plain data: sentences, tables, charts, and omissions with reasons."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from clcomm.base.console.table import TextColumn, TextTable
from clcomm.base.units import format_size
from clcomm.comm.stats.cores import parse_cpus
from clcomm.insight.report import charts, run_costs, sentences, tables, what_if
from clcomm.insight.report.chart_kinds import Chart
from clcomm.insight.report.documents import Record
from clcomm.insight.report.elements import Column, Table, count
from clcomm.insight.report.recording import Run
from clcomm.insight.report.run_costs import Analysis
from clcomm.insight.report.sentences import Tile
from clcomm.sync.synchronizer import GRADIENTS, PARAMETERS

#: Version of `clcomm report --format json`.
SCHEMA = 2


class LeftOut(NamedTuple):
    """An omission of the report, and its reason."""

    what: str
    why: str


@dataclass(frozen=True)
class Report:
    """A report for all output formats. Values are seconds, bytes and shares from 0 to 1."""

    title: str
    figures: Record
    tiles: list[Tile]
    headline: list[str]
    tables: list[Table]
    charts: list[Chart]
    left_out: list[LeftOut]
    subtitle: str = ""


def build(run: Run, what_if_too: bool = False) -> Report:
    """Return the report of a run; with what its steps would take without what slows them, if asked."""
    analysis = Analysis(run)
    found = [*(make(analysis) for make in tables.ALL), provenance_table(run)]
    headline = sentences.headline(analysis)
    if what_if_too:
        found.insert(0, what_if.table(analysis))
        headline += [line for line in [what_if.sentence(analysis)] if line]
    drawn = [make(analysis) for make in charts.ALL]
    return Report(
        sentences.title(analysis),
        {name: value for name, value in run.figures.items() if not isinstance(value, list)},
        sentences.tiles(analysis),
        headline,
        [table.filled() for table in found if table.rows],
        [chart for chart in drawn if chart is not None],
        left_out(analysis),
        subtitle(run),
    )


def left_out(analysis: Analysis) -> list[LeftOut]:
    """Return the omissions with their reasons and remedies."""
    unfit = run_costs.unfit(analysis.buckets)
    several, not_reported = analysis.run.world_size > 1, "this transport does not report"
    background = " for background all-reduces; --overlap off shows them" if analysis.reducing["hidden_s"] else ""
    command = f"mpiexec -n {analysis.run.world_size} clcomm tune{f' --sums {analysis.sums}' if analysis.sums else ''}"
    candidates = [
        (
            bool(analysis.stats.total("reduce_scatter", GRADIENTS)["calls"]),
            "gradient all-reduce, buckets",
            "a sharded update reduces and scatters all gradients at once",
        ),
        (
            bool(analysis.reductions["calls"]) and not analysis.buckets,
            "buckets",
            "the run ended while bucket sizes were still being tried, or reduced gradients without a Synchronizer",
        ),
        (not analysis.training_s, "share of a step", "the files do not hold the time of the steps"),
        (
            several and analysis.reducing["wait_unknown_s"] > 0,
            "wait for ranks",
            f"{not_reported} waiting and moving data separately{background}",
        ),
        (
            several and not analysis.counts["stragglers"],
            "who came last",
            f"{not_reported} the last rank",
        ),
        (several and isinstance(analysis.own_costs, str), "latency and bandwidth of this run", str(analysis.own_costs)),
        (
            several and not analysis.ceiling,
            "percent of the ceiling",
            f"{analysis.no_ceiling}; `{command}` measures such calls",
        ),
        (not analysis.layout, "other bucket sizes", "the files do not hold the bucket plan"),
        (several and bool(analysis.layout and analysis.costs and unfit), "other bucket sizes", unfit),
    ]
    return [LeftOut(what, why) for is_missing, what, why in candidates if is_missing]


# --- A report on a terminal, with Rich. ---


def show(report: Report, console: Console) -> None:
    """Print the report; tables wider than the console are split into pieces that repeat the first column."""
    console.print(Text(report.title, "bold"))
    if report.subtitle:
        console.print(Text(textwrap.fill(report.subtitle, console.width, break_on_hyphens=False), "dim"))
    for line in report.headline:
        console.print(Text(_item(line, console.width)))
    for table in report.tables:
        console.print()
        _print_table(table, console)
    if report.left_out:
        console.print(Text("\nLeft out", "bold"))
        for each in report.left_out:
            console.print(Text(_item(f"{each.what}: {each.why}", console.width)))


def _item(line: str, width: int) -> str:
    return textwrap.fill(f"- {line}", width, subsequent_indent="  ", break_on_hyphens=False)


def _print_table(table: Table, console: Console) -> None:
    cells = table.cells()
    console.print(Text(table.title, "bold"))
    for columns in _pieces(table, cells, console.width):
        console.print(_piece(table, cells, columns))
    for note in (table.note, table.left_out):
        if note:
            console.print(Text(note, "dim"))


def _piece(table: Table, cells: list[list[str]], columns: list[int]) -> TextTable:
    shown = [(table.columns[index].heading, table.columns[index].kind != "text") for index in columns]
    return TextTable([TextColumn(*each) for each in shown], [[row[index] for index in columns] for row in cells])


def _pieces(table: Table, cells: list[list[str]], width: int) -> list[list[int]]:
    """Return the column indices of each piece: those that name the row, then as many others as fit."""
    naming = [index for index, column in enumerate(table.columns) if index == 0 or column.key == "label"]
    pieces = [list(naming)]
    for index in range(len(table.columns)):
        if index in naming:
            continue
        if pieces[-1] != naming and _piece(table, cells, [*pieces[-1], index]).layout(width) is None:
            pieces.append(list(naming))
        pieces[-1].append(index)
    return pieces


# --- A run's provenance, for repeating or comparing it: model, settings, machine and versions. ---

#: Entries that have to be equal for two runs' times to be comparable: those on the machine and the software.
MACHINE = ("hosts", "cores", "device", "driver", "MPI", "Python", "numpy", "mpi4py", "pyopencl")


def provenance_table(run: Run) -> Table:
    rows = [{"what": what, "value": value} for what, value in provenance(run).items() if value]
    return Table("provenance", "What ran, and where", [Column("what", "", "text"), Column("value", "", "text")], rows)


def subtitle(run: Run) -> str:
    """Return the most important entries as one line, for a report's subtitle."""
    found = provenance(run)
    names = ("batch", "bucket size", "transport", "device", "cores", "hosts", "MPI", "date")
    prefixes = {"batch": "batch", "bucket size": "buckets of", "transport": "transport"}
    parts = [f"{prefixes[name]} {found[name]}" if name in prefixes else found[name] for name in names if found[name]]
    return " · ".join(parts).replace("buckets of none", "no buckets")


def line(run: Run) -> str:
    unnamed = ("model", "device", "driver", "cores", "date")
    return "; ".join(text if name in unnamed else f"{name} {text}" for name, text in provenance(run).items() if text)


def provenance(run: Run) -> dict[str, str]:
    """Return the entries as text by name; "" where the file lacks one."""
    figures, ranks = run.figures, run.ranks
    versions = [record["versions"] or {} for record in ranks]
    names = dict.fromkeys(name for each in versions for name in each)
    return {
        "model": figures["model"] or "",
        "data": figures["dataset"] or "",
        "engine": figures["engine"] or "",
        "batch": _batch(run),
        "bucket size": _bucket_size(run),
        "transport": _transport(run),
        "training loss": "" if figures["train_loss"] is None else f"{figures['train_loss']:.4f}",
        "date": (figures["date"] or "").replace("T", " ").replace("+00:00", " UTC"),
        "ranks": str(run.world_size),
        "hosts": _distinct(record["host_name"] for record in ranks),
        "cores": _cores(ranks),
        "device": _distinct(record["device"] for record in ranks),
        "driver": _distinct(record["driver"] for record in ranks),
        "clcomm": figures["clcomm"] or "",
        **{name: _distinct(each.get(name) for each in versions) for name in names if name != "clcomm"},
        **{name: "" for name in MACHINE if name not in (*names, "hosts", "cores", "device", "driver")},
    }


def _batch(run: Run) -> str:
    size, parts = run.figures["batch_size"], run.figures["grad_accumulation"] or 1
    if not size:
        return ""
    micro = f" in {parts} micro-batches of {size}" if parts > 1 else ""
    shards = _logical_shards(run)
    if shards:
        return f"{size * parts:,} for each of {shards} shards{micro}, {size * parts * shards:,} in all"
    together = _divided(run)
    own = "a rank" if together == 1 else f"for {together} ranks together"
    return f"{size * parts:,} {own}{micro}, {size * parts * run.world_size // together:,} in all"


def _divided(run: Run) -> int:
    """Return how many ranks divide a model, and have the same batches."""
    given = [str((run.figures["settings"] or {}).get(name)) for name in ("tp", "pp")]
    return math.prod(int(each) or 1 for each in given if each.isdecimal())


def _logical_shards(run: Run) -> int:
    """Return the number of a step's logical shards, 0 without any."""
    given = str((run.figures["settings"] or {}).get("logical_shards"))
    return int(given) if given.isdecimal() else 0


def _bucket_size(run: Run) -> str:
    settings = run.figures["settings"] or {}
    stage = settings.get("zero", "0")
    if _logical_shards(run) not in (0, run.world_size):
        return "none, the mean over shards has one sum"
    if stage == "1" or (stage == "0" and settings.get("sharded_optimizer") == "True"):
        return "none, a sharded update reduces all gradients at once"
    if run.figures["bucket_size"] is None:
        return "none, each tensor on its own" if settings else _reduced_sizes(run)
    asked = settings.get("bucket_size")
    return format_size(run.figures["bucket_size"]) + (" (auto)" if asked == "auto" else "")


def _reduced_sizes(run: Run) -> str:
    """Return the sizes of the buckets that a program without such a setting reduced, its first steps left out."""
    rows = [row for each in run.ranks[:1] for row in run_costs.warm(each, run.stats([each]))[1].as_dict()["buckets"]]
    sizes = [row["average_bytes_per_call"] for row in rows if row["label"] == GRADIENTS and row["calls"]]
    return " to ".join(dict.fromkeys(format_size(each) for each in (min(sizes), max(sizes)))) if sizes else ""


def _transport(run: Run) -> str:
    stats = run.stats()
    totals = [stats.total(*key) for key in (("all_reduce", GRADIENTS), ("reduce_scatter", GRADIENTS),
                                            ("all_gather", PARAMETERS))]  # fmt: skip
    return _distinct(total["transport"] for total in totals if total["calls"])


def _cores(ranks: list[Record]) -> str:
    """Return the number of cores that each host's ranks may use together."""
    hosts: dict[object, set[int]] = {}
    for record in ranks:
        if record["cpus"]:
            hosts.setdefault(record["host"], set()).update(parse_cpus(record["cpus"]))
    return _distinct(count(len(cpus), "core") for cpus in hosts.values())


def _distinct(values: Iterable[str | None]) -> str:
    return ", ".join(dict.fromkeys(value for value in values if value))
