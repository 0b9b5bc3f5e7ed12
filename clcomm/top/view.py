"""A job's ranks as a table, as plain lines and as JSON."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence

from clcomm.console.table import TextColumn, TextTable
from clcomm.job.running_jobs import RunningJob
from clcomm.top.rows import RankRow
from clcomm.units import format_size

SCHEMA = 1
_COLUMNS = (
    TextColumn("rank"), TextColumn("step"), TextColumn("samples/s"), TextColumn("comm"), TextColumn("wait"),
    TextColumn("for", right=False), TextColumn("cores"), TextColumn("memory"), TextColumn("doing", right=False),
)  # fmt: skip
_DROPPED_FIRST = ("memory", "cores", "comm", "for")
_STYLES = {"stopped": "bold red", "dead": "bold red", "unknown": "bold red", "silent": "yellow", "left": "dim"}
#: Of a collective: length, dtype, bucket, root.
_DETAILS = re.compile(r" \([^()]*\)")
#: The most ranks that a cell names.
_MOST_NAMED = 3


def table(job: RunningJob, rows: Sequence[RankRow], most: int | None = None) -> TextTable:
    """Return the table of a job's ranks; at most `most` rows, late ranks first."""
    shown = list(rows) if most is None or len(rows) <= most else _most_telling(rows, most)
    note = "" if len(shown) == len(rows) else f"{len(rows) - len(shown)} more ranks; --once shows all"
    cells = [_cells(row) for row in shown]
    styles = [_STYLES.get(row.state, "") for row in shown]
    return TextTable(_COLUMNS, cells, title=title(job, rows), note=note, dropped_first=_DROPPED_FIRST, styles=styles)


def _most_telling(rows: Sequence[RankRow], most: int) -> list[RankRow]:
    """Return the rows of ranks that do not run, then those that others wait for, then the lowest; in rank order."""
    awaited = {rank for row in rows for rank in row.waits_for}
    ordered = sorted(rows, key=lambda row: (row.state == "running", row.rank not in awaited, row.rank))
    return sorted(ordered[:most])


def title(job: RunningJob, rows: Sequence[RankRow]) -> str:
    """Return a line on the whole job: its program, ranks, time, step and speed."""
    hosts = int(job.about.get("hosts", 1))
    where = f" on {hosts} hosts" if hosts > 1 else ""
    parts = [
        f"{job.program}: process {job.pid}, {job.size} ranks{where}",
        f"for {_duration(time.time() - job.started_s)}",
    ]
    step, samples = max((row.step for row in rows), default=0), sum(row.samples_per_s for row in rows)
    if step:
        parts.append(f"step {step:,}, {max(row.steps_per_s for row in rows):.3g} steps/s")
    if samples:
        parts.append(f"{samples:,.0f} samples/s")
    return ", ".join(parts)


def _cells(row: RankRow) -> tuple[str, ...]:
    known = row.state not in ("unknown", "starting")
    doing = _DETAILS.sub("", row.doing)  # one line a rank; JSON has all of it
    if row.state == "silent":
        doing = f"silent for {row.age_s:.0f} s: {doing}"
    elif row.state not in ("running", "unknown", "left"):
        doing = f"{row.state}: {doing}"
    return (
        str(row.rank),
        f"{row.step:,}" if row.step else "-",
        f"{row.samples_per_s:,.0f}" if row.samples_per_s else "-",
        f"{row.communication:.0%}" if known else "-",
        f"{row.waiting:.0%}" if known else "-",
        _ranks(row.waits_for),
        f"{row.cores:.2f}" if known else "-",
        format_size(row.memory) if row.memory else "-",
        doing,
    )


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    more = f" +{len(ranks) - _MOST_NAMED}" if len(ranks) > _MOST_NAMED else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ",".join(map(str, ranks[:_MOST_NAMED])) + more


def _duration(seconds: float) -> str:
    """Return a time in words: "12 s", "3 min 5 s", "2 h 10 min"."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole // 60 % 60} min"


def as_json(job: RunningJob, rows: Sequence[RankRow]) -> str:
    """Return one line of JSON with the job's and its ranks' fields."""
    found: dict[str, object] = {
        "schema": SCHEMA, "time_s": time.time(), "pid": job.pid, "program": job.program, "size": job.size,
        "hosts": job.about.get("hosts", 1), "started_s": job.started_s, "ranks": [row._asdict() for row in rows],
    }  # fmt: skip
    return json.dumps(found) + "\n"


def choices(jobs: Sequence[RunningJob]) -> str:
    """Return jobs in words: "4711 (python train.py, 4 ranks), 4800 (...)"."""
    return ", ".join(f"{job.pid} ({job.program[:60]}, {job.size} ranks)" for job in jobs)
