"""Reports and timelines without code in the program: environment variables name the files."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from clcomm.base.errors import DataError
from clcomm.base.host import variables
from clcomm.base.storage.field_checks import refuse_constant
from clcomm.comm.communicator import Communicator
from clcomm.comm.stats.comm_stats import CommStats
from clcomm.insight.report.documents import Document, Record
from clcomm.insight.report.record import RANK, gather_records, run_document, write_document
from clcomm.insight.report.schema import checked_run
from clcomm.insight.trace import Trace
from clcomm.jobs.checkpoint.outputs import check_writable

REPORT, TIMELINE = "CLCOMM_REPORT", "CLCOMM_TRACE"


class Recording:
    """Writes a report and a timeline.

    Args:
        comm: the ranks.
        report: the file for `clcomm report`; "": none.
        live: whether timelines can be read while the job runs; see `Trace`.
    """

    def __init__(self, comm: Communicator, report: str, *, live: bool = False):
        self._comm, self._report, self._live = comm, report, live
        self._trace: Trace | None = None

    @classmethod
    def wanted(cls, comm: Communicator, *others: str) -> Recording | None:
        """Return a recording where rank 0's environment asks for one; collective.

        others: variables that name the timeline's file besides CLCOMM_TRACE, or Horovod's word "DYNAMIC" for one that
            the program begins later; with any, timelines can be read while the job runs.

        Raises ArgumentError on every rank where a file could not be written.
        """
        named = [os.environ.get(name, "") for name in others]
        asked = (
            variables.text(REPORT),
            variables.text(TIMELINE) or next((each for each in named if each not in ("", "DYNAMIC")), ""),
        )
        report, timeline = comm.broadcast_object(asked)
        if not report and not timeline:
            return None
        if report:
            own, whole = (report.replace(RANK, str(comm.rank)), None) if RANK in report else (None, report)
            check_writable(comm, {REPORT: whole}, of_each_rank={REPORT: own})
        recording = cls(comm, report, live=bool(others))
        if timeline:
            recording.start_trace(timeline)
        return recording

    def start_trace(self, path: str) -> None:
        """Begin a timeline; collective."""
        if self._trace is None:
            self._trace = Trace(self._comm, path, live=self._live)

    def stop_trace(self) -> None:
        """Write the timeline; collective."""
        if self._trace is not None:
            self._trace.close()
            self._trace = None

    def write(self) -> None:
        """Write the requested files; collective."""
        self.stop_trace()
        if self._report:
            document = run_document(gather_records(self._comm), engine="torch")
            write_document(self._report, document, self._comm, REPORT)
            self._report = ""


# --- Reads and merges the files of a run, in any order. ---
# A file may come from anyone: its size is checked before it is read, it has to be JSON, and every field has to be of
# its kind and within its range (schema.py), which refuses text that could act on a terminal or a page.

MOST_BYTES = 256 << 20


@dataclass(frozen=True)
class Run:
    """One run: `figures` of the whole, the records of the `ranks` found, in rank order, and the `problems` met."""

    figures: Record
    ranks: list[Record]
    problems: list[str] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        return int(self.figures["world_size"])

    def stats(self, ranks: Iterable[Record] | None = None) -> CommStats:
        """Return the stats of an average rank over these records, by default over all."""
        return CommStats.merged((each["stats"] for each in (self.ranks if ranks is None else ranks)), self.world_size)


def read_runs(paths: Iterable[str]) -> Run:
    """Return the run in these files; `problems` has a line for each file that is left out.

    Left out are unreadable files, and those of another run than the first readable file's. Raises DataError if
    no file can be read.
    """
    found: list[Record] = []
    ranks: dict[int, Record] = {}
    problems = []
    for path in paths:
        problem = _add_file(path, found, ranks)
        problems += [f"{path}: {problem}"] if problem else []
    if not found:
        raise DataError("; ".join(problems) or "FILE: expected the JSON of a run's --report")
    first = min(found, key=lambda document: min(record["rank"] for record in document["ranks"]))
    figures = {name: value for name, value in first.items() if name != "ranks"}
    return Run(figures, [ranks[rank] for rank in sorted(ranks)], problems)


def _add_file(path: str, found: list[Record], ranks: dict[int, Record]) -> str:
    """Add a file's document to `found` and its records to `ranks`; return why it is left out, "" if it is not."""
    try:
        document = read(path)
    except DataError as error:
        return str(error)
    for name in ("run", "world_size"):
        if found and document[name] != found[0][name]:
            return f"belongs to another run: {name} is {document[name]!r}, not {found[0][name]!r}"
    for record in document["ranks"]:
        if ranks.get(record["rank"], record) != record:
            return f"rank {record['rank']} is in an earlier file, with different figures"
    found.append(document)
    ranks.update({record["rank"]: record for record in document["ranks"]})
    return ""


def read(path: str, checked: Callable[[Document], Document] = checked_run) -> Document:
    """Return the document in a file, checked; raises DataError, with a message without the path.

    Args:
        checked: returns the known fields of the decoded document; raises ValueError for an invalid one.
    """
    try:
        info = Path(path).stat()
        if not stat.S_ISREG(info.st_mode):
            raise ValueError("expected a regular file")
        if info.st_size > MOST_BYTES:
            raise ValueError(f"expected at most {MOST_BYTES >> 20} MiB, got {info.st_size >> 20}")
        with open(path, "rb") as file:
            return checked(_decoded(file.read(info.st_size)))
    except OSError as error:
        raise DataError(error.strerror or "cannot be read") from None
    except RecursionError:
        raise DataError("expected the JSON of a run's --report, got JSON that is nested too deeply") from None
    except ValueError as error:
        text = "".join(c if c.isprintable() else " " for c in str(error))
        raise DataError(text[:300]) from None


def parse(content: bytes) -> Document:
    """Return the known fields of a run's document; raises ValueError for a field that breaks schema.py's rules."""
    return checked_run(_decoded(content))


def _decoded(content: bytes) -> Document:
    try:
        document = json.loads(content.decode("utf-8"), parse_constant=refuse_constant)
    except UnicodeDecodeError:
        raise ValueError("expected JSON text in UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"expected JSON, got a file that is damaged or cut off in line {error.lineno}") from None
    if not isinstance(document, dict):
        raise ValueError("expected the JSON of a run's --report")
    return document
