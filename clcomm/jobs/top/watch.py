"""Selection of a job, and its display once or until it ends."""

from __future__ import annotations

import contextlib
import os
import sys
import time

from clcomm.base.errors import ArgumentError, ClcommError
from clcomm.comm.watch.running_jobs import RunningJob, find_jobs
from clcomm.jobs.top import view
from clcomm.jobs.top.view import RankRow, rows_of

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
        raise ArgumentError(
            f"{command}: {len(own)} jobs run here: {view.choices(own)}; choose one with --job {own[0].pid}"
        )
    if jobs:
        raise ArgumentError(f"--job: expected one of {view.choices(jobs)}, got {pid}")
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
    sys.stdout.write(view.as_json(job, rows) if as_json else f"{view.table(job, rows)}\n")
    sys.stdout.flush()
    return 0


def settled(job: RunningJob, within_s: float = 2.0) -> list[RankRow]:
    """Return the rows once all ranks have written figures, which takes about a second."""
    deadline = time.monotonic() + within_s
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
        sys.stdout.write(view.as_json(job, rows) if as_json else f"{view.table(job, rows)}\n\n")
        sys.stdout.flush()
        time.sleep(interval_s)


def _repaint_until_end(job: RunningJob, interval_s: float) -> None:
    from rich.live import Live

    from clcomm.base.console.output import make_console

    console = make_console(highlight=False, soft_wrap=False)
    with Live(console=console, screen=False, auto_refresh=False) as live:
        while not job.has_ended():
            most = max(1, console.size.height - _FRAME)
            live.update(view.table(job, rows_of(job.lines()), most), refresh=True)
            time.sleep(interval_s)
