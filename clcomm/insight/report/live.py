"""The report of a running job, from what its ranks write on their status page; `clcomm report --serve` shows it."""

from __future__ import annotations

import hmac
import secrets
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from importlib.resources import files
from types import TracebackType

from clcomm.base.errors import name_ranks
from clcomm.base.units import format_number
from clcomm.comm.watch.running_jobs import RunningJob
from clcomm.insight.exporters.prometheus import TextServer
from clcomm.insight.report.chart_kinds import Bars, Chart, Curve, Curves
from clcomm.insight.report.elements import Column, Table
from clcomm.insight.report.formats import as_html
from clcomm.insight.report.report import Report
from clcomm.insight.report.sentences import Tile
from clcomm.insight.report.step_parts import COMPUTING_TOO, WAIT, moving
from clcomm.jobs.top.view import (
    COLUMNS,
    WORTH_NAMING,
    RankRow,
    brief,
    cells,
    let_the_job_go_first,
    rows_of,
    settled,
    title,
)

#: Between two looks: ranks write their figures once a second.
_EVERY_S = 1.0
#: Of the curves, at most.
_MOST_POINTS = 600
_MOVING = moving(several=True, compressed=False)


def serve(job: RunningJob, port: int) -> int:
    """Serve the job's page until the job ends or Ctrl-C; return the exit code. `port` 0: any that is free."""
    let_the_job_go_first()
    report, script = LiveReport(job), files("clcomm.insight.report").joinpath("live.js").read_text(encoding="utf-8")
    try:
        with PageServer(port) as server:
            rows = settled(job)
            while not job.has_ended():
                server.page = as_html(report.look(rows), script)
                if report.looks == 1:
                    print(f"{title(job, rows)}\n{server.address} has its page until Ctrl-C", flush=True)
                time.sleep(_EVERY_S)
                rows = rows_of(job.lines())
    except KeyboardInterrupt:
        print(f"the page of process {job.pid}'s job is no longer served", file=sys.stderr)
        return 0
    print(f"the job of process {job.pid} has ended", file=sys.stderr)
    return 0


class LiveReport:
    """Reports of one job, whose curves have a point for each look at which the job had come further.

    Attributes:
        looks: how many there were.
    """

    def __init__(self, job: RunningJob):
        self._job, self.looks = job, 0
        # The step, then the curves' values.
        self._points: deque[tuple[int, float, float, float]] = deque(maxlen=_MOST_POINTS)

    def look(self, rows: Sequence[RankRow]) -> Report:
        """Return the report of the ranks' present rows."""
        self.looks += 1
        step, steps_per_s = max(row.step for row in rows), max(row.steps_per_s for row in rows)
        samples_per_s, communication = sum(row.samples_per_s for row in rows), _mean(row.communication for row in rows)
        if self._points and step < self._points[-1][0]:
            self._points.clear()  # another run has begun
        if step and (not self._points or step > self._points[-1][0]):
            self._points.append((step, steps_per_s, samples_per_s, 100 * communication))
        tiles = [
            Tile(f"{step:,}", "steps"), Tile(format_number(steps_per_s, 1), "steps a second"),
            Tile(f"{samples_per_s:,.0f}", "samples a second, all ranks"),
            Tile(f"{communication:.0%}", "of a mean rank's time in collectives"),
            Tile(f"{_mean(row.waiting for row in rows):.0%}", "of it waiting for others"),
        ]  # fmt: skip
        charts: list[Chart] = [_shares(rows), *self._curves()]
        return Report(title(self._job, rows), {}, tiles, causes(rows), [_table(rows)], charts, [])

    def _curves(self) -> list[Chart]:
        if len(self._points) < 2:
            return []
        steps, *values = zip(*self._points, strict=True)
        names = "steps a second", "samples a second", "collectives, % of the time"
        return [Curves("By step", steps, [Curve(*each) for each in zip(names, values, strict=True)])]


def causes(rows: Sequence[RankRow]) -> list[str]:
    """Return a sentence for each rank that holds others up or does not run, and one on communication."""
    found = [
        f"Rank {row.rank} {_STATES.get(row.state, f'is {row.state}')}: {row.doing}."
        for row in rows
        if row.state not in ("running", "starting")
    ]
    awaited = {rank: [row for row in rows if rank in row.waits_for] for row in rows for rank in row.waits_for}
    for rank, waiting in sorted(awaited.items(), key=lambda each: -sum(row.waiting for row in each[1])):
        doing = next((f"; it is in {brief(row.doing)}" for row in rows if row.rank == rank and row.doing), "")
        found.append(
            f"Rank {rank} keeps others waiting: {name_ranks([row.rank for row in waiting])} waited for it most, "
            f"{max(row.waiting for row in waiting):.0%} of the last second{doing}."
        )
    if not awaited and any(row.state == "running" for row in rows):
        found.append(f"No rank keeps another waiting for more than {WORTH_NAMING:.0%} of the time.")
    return found


#: States that are no adjective.
_STATES = {"left": "has left the program", "unknown": "cannot be asked", "silent": "has written no figures for a while"}


def _table(rows: Sequence[RankRow]) -> Table:
    columns = [Column(each.heading, each.heading, "right" if each.right else "text") for each in COLUMNS]
    shown = [dict(zip([each.heading for each in COLUMNS], cells(row), strict=True)) for row in rows]
    return Table("ranks", "Ranks", columns, shown, "Shares and cores are those of the last second.")


def _shares(rows: Sequence[RankRow]) -> Bars:
    values = [
        (100 * row.waiting, 100 * (row.communication - min(row.waiting, row.communication)),
         100 * (1 - max(row.communication, row.waiting))) for row in rows
    ]  # fmt: skip
    names = [f"rank {row.rank}" for row in rows]
    return Bars("Where the last second went", (WAIT, _MOVING, COMPUTING_TOO), names, values, "%")


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


# --- A page that is served to this user alone: on 127.0.0.1, at an address that nobody can guess. ---


class PageServer(TextServer):
    """Serves `page`, which may be replaced at any time, from threads, until the `with` block ends.

    Other users of the host can connect too, so the address has a token of 128 random bits; without it there is no page.
    Raises ArgumentError if the port is taken.

    Args:
        port: 0: any that is free.

    Attributes:
        page: HTML.
    """

    def __init__(self, port: int):
        self.page = ""
        self._path = f"/{secrets.token_urlsafe(16)}/"
        expected = f"--serve: expected a free port, got {port}", "leave it out to have one chosen"
        super().__init__(("127.0.0.1", port), self._answer, expected)

    @property
    def address(self) -> str:
        """The page's address, for a browser."""
        return f"http://127.0.0.1:{self.server_port}{self._path}"

    def _answer(self, path: str) -> tuple[HTTPStatus, str, str]:
        if hmac.compare_digest(path.encode(errors="replace"), self._path.encode()):
            return HTTPStatus.OK, _HTML, self.page
        return HTTPStatus.FORBIDDEN, _HTML, _FORBIDDEN

    def __enter__(self) -> PageServer:
        self.serve()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_HTML = "text/html; charset=utf-8"
_FORBIDDEN = "<!DOCTYPE html><title>403</title>The address that clcomm printed has the page.\n"
