"""The page of the fault matrix, docs/faults.md: a line for each mechanism, which unfolds to its cases."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from html import escape
from typing import NamedTuple

from tests.faults.launch import END_S

#: Number of a message's characters that a case shows, and a mechanism.
LINE, SHORT_LINE = 160, 100
#: The page's sections, each with a pattern of its faults' names; a fault belongs to the first that matches.
SECTIONS = {
    "A rank leaves, or does not end": "exception|sys.exit|os._exit|thread|exit handler",
    "Signals": "SIG",
    "Ranks that differ, are late or compute wrong numbers": "mis|slow|clock|NaN|flipped|different",
    "Options, files and disks": "",
}
TABLE_HEAD = "| fault | place | rank | exit code | what the user reads |\n|---|---|---|---|---|\n"
_HEAD = """# Faults

Faults that are caused in a job of two ranks, or as many as are named, with their place and rank, and the job's exit
code and first line about it. Each mechanism below has one line: its number of cases, their exit codes, and the message
that most of them end with. It unfolds to the cases.

In each case the harness checks that the job ends within {end_s:g} s of the fault, or of the time-out where a rank stops
(or that it finishes with the right result), that the message names rank and cause, that the newest checkpoint is
complete and as recent as it can be, and that no process and no file in /dev/shm is left. A full or read-only disk is a
small file system of the job's own. `make faults` runs all {count} cases and writes this page; CI runs one of each
mechanism.

Under MPICH the launcher determines the exit code of a job in which a rank is killed or calls `os._exit`. A signal that
ends a rank while MPI starts is reported by the launcher alone, and MPICH's own file (4 MB) stays in /dev/shm. "Plain
script": one that does not call `clcomm.job.run(main)`; Python has no hook for SystemExit, so the job's exit code is 1
where another rank waits for the one that has left. "ULFM" is Open MPI's `mpiexec --with-ft ulfm`, with which the other
ranks survive when one dies.
"""


class Row(NamedTuple):
    """A case and its end as the page tells them; `line` is what the user reads first."""

    fault: str
    place: str
    rank: str
    code: int
    line: str


def page(rows: list[Row]) -> str:
    """Return the page's text."""
    by_fault: dict[str, list[Row]] = {}
    for row in rows:
        by_fault.setdefault(row.fault, []).append(row)
    parts = [_HEAD.format(end_s=END_S, count=len(rows))]
    for section in SECTIONS:
        parts.append(f"\n## {section}\n")
        parts += [_folded(fault, of_it) for fault, of_it in by_fault.items() if section_of(fault) == section]
    return "".join(parts)


def section_of(fault: str) -> str:
    """Return the section that a fault belongs to."""
    return next(section for section, pattern in SECTIONS.items() if re.match(pattern, fault))


def table(rows: Iterable[Row]) -> str:
    """Return rows as a table, their lines shortened."""
    return TABLE_HEAD + "".join(
        f"| {row.fault} | {row.place} | {row.rank} | {row.code} | {_code(row.line)} |\n" for row in rows
    )


def _folded(fault: str, rows: list[Row]) -> str:
    codes = sorted({row.code for row in rows})
    cases = f"{len(rows)} cases" if len(rows) > 1 else "1 case"
    ends = f"exit code{'s' if len(codes) > 1 else ''} {', '.join(map(str, codes))}"
    most = _most(rows)
    most = most if len(most) <= SHORT_LINE else f"{most[:SHORT_LINE].rstrip()} …"
    said = f": <code>{escape(most, quote=False)}</code>" if most else ""
    return f"\n<details>\n<summary><b>{fault}</b>, {cases}, {ends}{said}</summary>\n\n{table(rows)}\n</details>\n"


def _most(rows: list[Row]) -> str:
    """Return the line of the first of the rows that most resemble each other, but for numbers."""
    alike = Counter(re.sub(r"\d+", "0", row.line) for row in rows)
    form = alike.most_common(1)[0][0]
    return next(row.line for row in rows if re.sub(r"\d+", "0", row.line) == form)


def _code(line: str) -> str:
    return f"`{line.replace('|', chr(92) + '|')}`" if line else ""
