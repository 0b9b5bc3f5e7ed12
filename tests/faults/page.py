"""The tables of the fault matrix in docs/proofs.md: a row for each mechanism."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

#: Number of a message's characters that the table shows.
SHORT_LINE = 100
#: The tables, each with a pattern of its faults' names; a fault belongs to the first that matches.
SECTIONS = {
    "A rank leaves, or does not end": "exception|sys.exit|os._exit|thread|exit handler",
    "Signals": "SIG",
    "Ranks that differ, are late or compute wrong numbers": "mis|slow|clock|NaN|flipped|different",
    "Options, files, disks and hosts": "",
}
_HEAD = "| fault | cases | exit codes | what the user reads in most of them |\n|---|---|---|---|\n"


class Row(NamedTuple):
    """How a case ended; `line` is what the user reads first."""

    fault: str
    code: int
    line: str


def page(title: str, rows: Sequence[Row]) -> str:
    """Return the tables of all cases."""
    by_fault: dict[str, list[Row]] = {}
    for row in rows:
        by_fault.setdefault(row.fault, []).append(row)
    parts = [f"# {title}\n\n{len(rows)} cases, {len(by_fault)} mechanisms.\n"]
    for section in SECTIONS:
        shown = [_line(fault, of_it) for fault, of_it in by_fault.items() if section_of(fault) == section]
        parts += [f"\n**{section}**\n\n{_HEAD}", *shown] if shown else []
    return "".join(parts)


def section_of(fault: str) -> str:
    """Return the table that a fault belongs to."""
    return next(section for section, pattern in SECTIONS.items() if re.match(pattern, fault))


def _line(fault: str, rows: Sequence[Row]) -> str:
    codes = ", ".join(map(str, sorted({row.code for row in rows})))
    most = _most(rows).replace("|", r"\|")
    most = most if len(most) <= SHORT_LINE else f"{most[:SHORT_LINE].rstrip()} …"
    return f"| {fault} | {len(rows)} | {codes} | {f'`{most}`' if most else ''} |\n"


def _most(rows: Sequence[Row]) -> str:
    """Return the line of the first of the rows that most resemble each other, but for numbers."""
    alike = Counter(re.sub(r"\d+", "0", row.line) for row in rows)
    form = alike.most_common(1)[0][0]
    return next(row.line for row in rows if re.sub(r"\d+", "0", row.line) == form)
