"""Findings of `clcomm doctor` and `clcomm verify`: statements with a level and a remedy, as a table and as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from clcomm._version import __version__
from clcomm.base.console.table import TextColumn, TextTable

#: Levels: as it should be; works, but slower or not everywhere; fails, or gives wrong results.
OK, NOTE, PROBLEM = "ok", "note", "problem"


SCHEMA = 1


_STYLES = {OK: "green", NOTE: "yellow", PROBLEM: "bold red"}


_COLUMNS = (TextColumn("", right=False, least=len(PROBLEM)), TextColumn("", right=False), TextColumn("", right=False))


@dataclass(frozen=True)
class Finding:
    """One statement of a check.

    Attributes:
        check: the check's name, such as "mpiexec".
        level: OK, NOTE or PROBLEM.
        what: the statement, with its figures.
        remedy: what to do, with the command; "" where nothing needs to be done.
        evidence: the figures behind it, JSON-compatible.
    """

    check: str
    level: str
    what: str
    remedy: str = ""
    evidence: Mapping[str, object] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def ok(check: str, what: str, **evidence: object) -> Finding:
    """Return a finding without a fault."""
    return Finding(check, OK, what, "", evidence)


def note(check: str, what: str, remedy: str, **evidence: object) -> Finding:
    """Return a finding that works, but slower or not everywhere."""
    return Finding(check, NOTE, what, remedy, evidence)


def problem(check: str, what: str, remedy: str, **evidence: object) -> Finding:
    """Return a finding that fails, or gives wrong results."""
    return Finding(check, PROBLEM, what, remedy, evidence)


def table(findings: Sequence[Finding], command: str) -> TextTable:
    """Return the findings in their order, each remedy below its finding, and how many problems and notes there are."""
    rows, styles = [], []
    for finding in findings:
        rows.append((finding.level if finding.level == OK else finding.level.upper(), finding.check, finding.what))
        styles.append("" if finding.level == OK else _STYLES[finding.level])
        if finding.remedy:
            rows.append(("", "", f"-> {finding.remedy}"))
            styles.append("")
    return TextTable(_COLUMNS, rows, styles=styles, note=summary(findings, command))


def summary(findings: Sequence[Finding], command: str) -> str:
    counts = {level: sum(finding.level == level for finding in findings) for level in (PROBLEM, NOTE, OK)}
    bad = ", ".join(f"{count} {level}{'s' if count > 1 else ''}" for level, count in counts.items()
                    if count and level != OK)  # fmt: skip
    return f"{command}: {bad or 'nothing to complain of'}, {counts[OK]} ok"


def as_text(findings: Sequence[Finding], command: str) -> str:
    return f"{table(findings, command)}\n"


def show(findings: Sequence[Finding], command: str, is_json: bool) -> None:
    """Print the findings of a command."""
    if is_json:
        sys.stdout.write(as_json(findings))
        return
    try:
        from clcomm.base.console.output import make_console

        make_console(highlight=False, soft_wrap=False).print(table(findings, command))
    except ImportError:  # Rich is hidden or missing, which is one of the doctor's findings
        sys.stdout.write(as_text(findings, command))


def as_json(findings: Sequence[Finding]) -> str:
    """Return the findings as JSON: schema, version, the number of each level, and each finding's fields."""
    counts = {level: sum(finding.level == level for finding in findings) for level in (OK, NOTE, PROBLEM)}
    found = {"schema": SCHEMA, "clcomm": __version__, "counts": counts,
             "findings": [finding.as_dict() for finding in findings]}  # fmt: skip
    return json.dumps(found, indent=1) + "\n"
