"""Reads and merges the files of a run, in any order.

A file may come from anyone: its size is checked before it is read, it has to be JSON, and every field has to be of its
kind and within its range (schema.py), which refuses text that could act on a terminal or a page.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from clcomm.base.errors import DataError
from clcomm.base.storage.field_checks import refuse_constant
from clcomm.comm.stats.comm_stats import CommStats
from clcomm.insight.report.documents import Document, Record
from clcomm.insight.report.schema import checked_run

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
