"""Ranks and hosts: who takes part."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from clcomm.doctor.finding import Finding, ok
from clcomm.doctor.job import Job
from clcomm.launcher import launched_rank


def probe() -> dict[str, object]:
    """Return this process's host, rank by its launcher's variables, process number, user and Python."""
    return {
        "host": os.uname().nodename,
        "rank": launched_rank() or 0,
        "pid": os.getpid(),
        "user": os.geteuid(),
        "python": sys.executable,
    }


def check(job: Job) -> Iterator[Finding]:
    """Say how many ranks run where."""
    if not job.launched:
        yield ok("ranks", "none started: this is the host alone; mpiexec -n 4 clcomm doctor looks at ranks too")
        return
    hosts = ", ".join(f"{len(ranks)} on {host}" for host, ranks in job.hosts.items())
    yield ok("ranks", f"{len(job.ranks)}: {hosts}", hosts={host: len(ranks) for host, ranks in job.hosts.items()})
