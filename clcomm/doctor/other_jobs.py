"""Other jobs of this user on the same hosts, which use the same cores."""

from __future__ import annotations

import os
from collections.abc import Iterator

from clcomm.doctor.finding import Finding, note, ok
from clcomm.doctor.job import Job


def probe() -> dict[str, object]:
    """Return the jobs that run, and what is wrong with the boards of those that cannot be read."""
    from clcomm.job.running_jobs import find_jobs

    jobs, problems = find_jobs()
    return {"jobs": [[job.pid, job.program, len(job.ranks)] for job in jobs], "problems": problems,
            "load": os.getloadavg()[0]}  # fmt: skip


def check(job: Job) -> Iterator[Finding]:
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
