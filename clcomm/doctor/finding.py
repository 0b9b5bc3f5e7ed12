"""What the doctor finds: a statement, how bad it is, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

#: Levels: as it should be; works, but slower or not everywhere; fails, or gives wrong results.
OK, NOTE, PROBLEM = "ok", "note", "problem"


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

    def as_dict(self) -> dict[str, Any]:
        """Return the fields in JSON-compatible form."""
        return asdict(self)


def ok(check: str, what: str, **evidence: object) -> Finding:
    """Return a finding for what is as it should be."""
    return Finding(check, OK, what, "", evidence)


def note(check: str, what: str, remedy: str, **evidence: object) -> Finding:
    """Return a finding for what works, but slower or not everywhere."""
    return Finding(check, NOTE, what, remedy, evidence)


def problem(check: str, what: str, remedy: str, **evidence: object) -> Finding:
    """Return a finding for what fails, or gives wrong results."""
    return Finding(check, PROBLEM, what, remedy, evidence)
