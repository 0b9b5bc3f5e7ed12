"""The states of a job's ranks, from their lines on the hosts' status pages, as a table, as text and as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple

from clcomm.base.console.table import TextColumn, TextTable
from clcomm.base.errors import ArgumentError, ClcommError, escaped
from clcomm.base.units import format_size
from clcomm.comm.watch.running_jobs import RunningJob, find_jobs
from clcomm.comm.watch.stall_message import LEFT, SILENT_S, UNKNOWN
from clcomm.comm.watch.status_page import RankStatus

#: A rank that has been in its collective for so long when its line was written waits for those that are not in it.
WAITS_S = 0.5
#: A smaller share of time spent waiting is not worth a rank's name.
WORTH_NAMING = 0.02
SCHEMA = 1
COLUMNS = (
    TextColumn("rank"), TextColumn("step"), TextColumn("samples/s"), TextColumn("comm"), TextColumn("wait"),
    TextColumn("for", right=False), TextColumn("cores"), TextColumn("memory"), TextColumn("doing", right=False),
)  # fmt: skip
_DROPPED_FIRST = ("memory", "cores", "comm", "for")
_STYLES = {"stopped": "bold red", "dead": "bold red", "unknown": "bold red", "silent": "yellow", "left": "dim"}
#: Of a collective: its number; length, dtype, bucket, root.
_NUMBER, _DETAILS = re.compile(r" #\d+"), re.compile(r" \(([^()]*)\)")
#: The most ranks that a cell names.
_MOST_NAMED = 3


class RankRow(NamedTuple):
    """One rank.

    Attributes:
        state: "running", "stopped", "dead", "unknown" (its host does not answer), "silent" (no line for SILENT_S),
            "left" (its program has ended) or "starting" (no figures yet).
        doing: its collective or its phase, with the time in a collective if that is long.
        waits_for: the ranks it waits for now, or else waited for most in the last second.
        step, samples: so far; samples_per_s, steps_per_s: of the last seconds.
        communication, waiting: shares of the last second, 0 to 1; waiting is a part of communication.
        memory: bytes; cores: busy in the last second.
        age_s: of the line.
    """

    rank: int
    state: str
    doing: str
    waits_for: tuple[int, ...]
    step: int
    steps_per_s: float
    samples: int
    samples_per_s: float
    communication: float
    waiting: float
    memory: int
    cores: float
    collectives: int
    age_s: float
    place: str


def rows_of(lines: Sequence[RankStatus]) -> list[RankRow]:
    """Return the ranks' rows; steps and samples are those of one moment, the oldest line's of a rank that runs."""
    now_ns = perf_counter_ns()
    moment_ns = min((line.beat_ns for line in lines if _state(line, now_ns) == "running"), default=now_ns)
    return [_row(line, lines, now_ns, moment_ns) for line in lines]


def _at(line: RankStatus, moment_ns: int, step: int, samples: int) -> tuple[int, int]:
    """Return a rank's step and samples at a moment between its last two looks, in which both grew evenly."""
    try:
        then, trained, since_s = line.figures["before"]
        if step <= then:  # it stands, or another run has begun
            return step, samples
        share = max(0.0, 1 - max(0, line.beat_ns - moment_ns) / (1e9 * since_s))
        taken = int(share * (step - then))
        return then + taken, trained + round((samples - trained) * taken / (step - then))
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return step, samples


def _row(line: RankStatus, lines: Sequence[RankStatus], now_ns: int, moment_ns: int) -> RankRow:
    figures = line.figures

    def number(name: str) -> Any:
        value = figures.get(name, 0)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else 0

    step, samples = _at(line, moment_ns, int(number("step")), int(number("samples")))
    return RankRow(
        line.rank, _state(line, now_ns), _doing(line), _waits_for(line, lines), step,
        number("steps_per_s"), samples, number("samples_per_s"), number("communication"),
        number("waiting"), int(number("memory")), number("cores"), int(number("collectives")), _age_s(line, now_ns),
        line.place,
    )  # fmt: skip


def _age_s(line: RankStatus, now_ns: int) -> float:
    return (now_ns - line.beat_ns) / 1e9 if line.beat_ns else 0.0


def _state(line: RankStatus, now_ns: int) -> str:
    if line.text == LEFT:
        return "left"
    if line.state != "running":
        return line.state
    if not line.figures:
        return "starting"
    return "silent" if _age_s(line, now_ns) > SILENT_S else "running"


def _waited_s(line: RankStatus) -> float:
    """Return how many seconds a rank had been in its collective when its line was written."""
    return (line.beat_ns - line.began_ns) / 1e9 if line.waits else 0.0


def _doing(line: RankStatus) -> str:
    if line.state == UNKNOWN:
        return "its host does not answer"
    if line.text:
        waited_s = _waited_s(line)
        return line.text + (f" for {waited_s:.0f} s" if waited_s > WAITS_S else "")
    innermost, _, program = line.place.partition(", from ")
    phase = str(line.figures.get("phase", ""))
    return phase or (program if program and innermost.startswith("<") else innermost)


def _waits_for(line: RankStatus, lines: Sequence[RankStatus]) -> tuple[int, ...]:
    if _waited_s(line) > WAITS_S:
        missing = tuple(other.rank for other in lines if other.key != line.key)
        if missing:
            return missing
    named, share = line.figures.get("waits_for", -1), line.figures.get("waiting", 0.0)
    known = isinstance(named, int) and isinstance(share, (int, float)) and share > WORTH_NAMING
    return (named,) if known and named not in (-1, line.rank) else ()


def table(job: RunningJob, rows: Sequence[RankRow], most: int | None = None) -> TextTable:
    """Return the table of a job's ranks.

    most: rows that fit the terminal, late ranks first; None: all.
    """
    shown = list(rows) if most is None or len(rows) <= most else _most_telling(rows, most)
    note = "" if len(shown) == len(rows) else f"{len(rows) - len(shown)} more ranks; --once shows all"
    texts = [cells(row) for row in shown]
    styles = [_STYLES.get(row.state, "") for row in shown]
    return TextTable(COLUMNS, texts, title=title(job, rows), note=note, dropped_first=_DROPPED_FIRST, styles=styles)


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
        f"{escaped(job.program)}: process {job.pid}, {job.size} ranks{where}",
        f"for {_duration(time.time() - job.started_s)}",
    ]
    step, samples = max((row.step for row in rows), default=0), sum(row.samples_per_s for row in rows)
    if step:
        parts.append(f"step {step:,}, {max(row.steps_per_s for row in rows):.3g} steps/s")
    if samples:
        parts.append(f"{samples:,.0f} samples/s")
    return ", ".join(parts)


def brief(doing: str) -> str:
    """Return what a rank does with no more of its collective than the bucket."""
    bucket = re.search(r"bucket \d+", doing)
    return _NUMBER.sub("", _DETAILS.sub(f" ({bucket[0]})" if bucket else "", doing))


def cells(row: RankRow) -> tuple[str, ...]:
    """Return a rank's texts under COLUMNS."""
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


def json_line(job: RunningJob, rows: Sequence[RankRow]) -> str:
    """Return one line of JSON with the job's and its ranks' fields."""
    found: dict[str, object] = {
        "schema": SCHEMA, "time_s": time.time(), "pid": job.pid, "program": job.program, "size": job.size,
        "hosts": job.about.get("hosts", 1), "started_s": job.started_s, "ranks": [row._asdict() for row in rows],
    }  # fmt: skip
    return json.dumps(found) + "\n"


def choices(jobs: Sequence[RunningJob]) -> str:
    """Return jobs in words: "4711 (python train.py, 4 ranks), 4800 (...)"."""
    return ", ".join(f"{job.pid} ({job.program[:60]}, {job.size} ranks)" for job in jobs)


# --- Selection of a job, and its display once or until it ends. ---

#: Lines of a terminal that the table's frame takes.
_FRAME = 5


class NoJobError(ClcommError):
    """There is no job to show."""

    exit_code = 1


def choose(pid: int | None, command: str = "top") -> RunningJob:
    """Return this user's only job here, or the job of a process; messages name the command.

    Raises NoJobError without a job, ArgumentError where there are several and none is chosen.
    """
    try:
        jobs, problems = find_jobs()
    except OSError as error:
        raise NoJobError(f"{command}: the processes here could not be looked at: {error.strerror}") from None
    own = [job for job in jobs if pid is None or pid == job.pid]
    if len(own) == 1:
        return own[0]
    if own:
        raise ArgumentError(f"{command}: {len(own)} jobs run here: {choices(own)}; choose one with --job {own[0].pid}")
    if jobs:
        raise ArgumentError(f"--job: expected one of {choices(jobs)}, got {pid}")
    if problems:
        raise NoJobError(f"{command}: {problems[0]}; use the clcomm of that job")
    raise NoJobError(
        f"{command}: no job of yours with several ranks runs on this host; start one, such as mpiexec -n 4 python "
        f"train.py, or run clcomm {command} on one of its hosts"
    )


def show_once(job: RunningJob, as_json: bool) -> int:
    """Print the job's ranks and return the exit code."""
    rows = settled(job)
    if job.has_ended():
        raise NoJobError(f"top: the job of process {job.pid} has ended")
    sys.stdout.write(json_line(job, rows) if as_json else f"{table(job, rows)}\n")
    sys.stdout.flush()
    return 0


def settled(job: RunningJob) -> list[RankRow]:
    """Return the rows once all ranks have written figures, which takes about a second."""
    deadline = time.monotonic() + 2.0
    while True:
        rows = rows_of(job.lines())
        if all(row.state != "starting" for row in rows) or time.monotonic() > deadline:
            return rows
        time.sleep(0.1)


def show_live(job: RunningJob, interval_s: float, as_json: bool) -> int:
    """Show the ranks until the job ends or Ctrl-C: in place on a terminal, else as plain tables or lines of JSON."""
    let_the_job_go_first()
    try:
        if as_json or not sys.stdout.isatty():
            _print_until_end(job, interval_s, as_json)
        else:
            _repaint_until_end(job, interval_s)
    except KeyboardInterrupt:
        return 0
    print(f"the job of process {job.pid} has ended", file=sys.stderr)
    return 0


def let_the_job_go_first() -> None:
    """Run this process at the scheduler's idle priority, where there is one."""
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _print_until_end(job: RunningJob, interval_s: float, as_json: bool) -> None:
    while not job.has_ended():
        rows = rows_of(job.lines())
        sys.stdout.write(json_line(job, rows) if as_json else f"{table(job, rows)}\n\n")
        sys.stdout.flush()
        time.sleep(interval_s)


def _repaint_until_end(job: RunningJob, interval_s: float) -> None:
    from rich.live import Live

    from clcomm.base.console.output import make_console

    console = make_console(highlight=False, soft_wrap=False)
    with Live(console=console, screen=False, auto_refresh=False) as live:
        while not job.has_ended():
            most = max(1, console.size.height - _FRAME)
            live.update(table(job, rows_of(job.lines()), most), refresh=True)
            time.sleep(interval_s)
