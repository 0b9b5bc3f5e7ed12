"""Other jobs of this user on the same hosts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from clcomm.doctor.finding import Finding
from clcomm.doctor.job import Job


def probe() -> dict[str, Any]:
    return {"jobs": []}


def check(job: Job) -> Iterator[Finding]:
    return iter(())
