"""Ranks and their hosts, and other jobs of this user there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from clcomm.base.console.finding import Finding, note, ok
from clcomm.base.host.launcher import launched_rank
from clcomm.tools.doctor.job import JobFacts


def probe() -> dict[str, object]:
    """Return this process's host, rank by its launcher's variables, process number, user and Python."""
    return {
        "host": os.uname().nodename,
        "rank": launched_rank() or 0,
        "pid": os.getpid(),
        "user": os.geteuid(),
        "python": sys.executable,
    }


def check(job: JobFacts) -> Iterator[Finding]:
    """Say how many ranks run where."""
    if not job.launched:
        yield ok("ranks", "none started: this is the host alone; mpiexec -n 4 clcomm doctor looks at ranks too")
        return
    hosts = ", ".join(f"{len(ranks)} on {host}" for host, ranks in job.hosts.items())
    yield ok("ranks", f"{len(job.ranks)}: {hosts}", hosts={host: len(ranks) for host, ranks in job.hosts.items()})


def probe_other_jobs() -> dict[str, object]:
    """Return the running jobs, and the errors of status pages that cannot be read."""
    from clcomm.comm.watch.running_jobs import find_jobs

    jobs, problems = find_jobs()
    return {"jobs": [[job.pid, job.program, len(job.ranks)] for job in jobs], "problems": problems,
            "load": os.getloadavg()[0]}  # fmt: skip


def check_other_jobs(job: JobFacts) -> Iterator[Finding]:
    """Name the jobs on each host."""
    for where, facts in job.by_host("other jobs"):
        for pid, program, ranks in facts["jobs"]:
            yield note(
                "other jobs", f"process {pid}, {program}, runs on {ranks} of its ranks{where}: it uses these cores too",
                f"clcomm top --job {pid} shows what it does", pid=pid, ranks=ranks,
            )  # fmt: skip
        for problem in facts["problems"]:
            yield note("other jobs", f"{problem}{where}", "use the clcomm of that job")
        if not (facts["jobs"] or facts["problems"]):
            yield ok("other jobs", f"none of yours{where}; load {facts['load']:.1f}")
