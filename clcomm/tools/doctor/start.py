"""A trial: two ranks that start, meet and share a window, as a job's ranks do.

`mpiexec -n 2 python -m clcomm.tools.doctor.start` is the trial; its rank 0 prints MPI's answers as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from clcomm.base.console.finding import Finding, ok, problem
from clcomm.jobs.launch import mpiexec
from clcomm.tools.doctor.job import JobFacts

RANKS = 2
#: How long the ranks may take; imports from a network file system are slow.
_LIMIT_S = 60.0


def probe() -> dict[str, object]:
    """Start RANKS ranks and return how many MPI sees, whether they share a window, and the seconds until their end."""
    launcher = mpiexec.find_mpiexec()
    command = [*launcher.command(RANKS, "", ""), sys.executable, "-m", "clcomm.tools.doctor.start"]
    began = time.monotonic()
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_S, check=False, stdin=subprocess.DEVNULL,
            env={**os.environ, **launcher.environment()},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"command": command, "seconds": _LIMIT_S, "reason": f"no answer within {_LIMIT_S:g} s"}
    seconds = time.monotonic() - began
    for line in ended.stdout.splitlines():
        if line.startswith("{"):
            return {"command": command, "seconds": seconds, "reason": "", **json.loads(line)}
    last = (ended.stderr.strip().splitlines() or ["no output"])[-1]
    return {"command": command, "seconds": seconds, "reason": f"exit code {ended.returncode}: {last}"}


def check(job: JobFacts) -> Iterator[Finding]:
    """Judge the trial."""
    for where, facts in job.by_host("start"):
        shown = " ".join([*facts["command"][:-3], "python", *facts["command"][-2:]])
        if facts["reason"]:
            yield problem(
                "start", f"{RANKS} ranks do not start{where}: {facts['reason']}",
                f"run it to see its messages: {shown}", **facts,
            )  # fmt: skip
        elif facts["size"] != RANKS:
            yield problem(
                "start", f"of {RANKS} ranks{where} MPI sees {facts['size']}: mpiexec and library are of two MPIs",
                "pip install --force-reinstall the MPI you want, uninstall the other (docs/installation.md)", **facts,
            )  # fmt: skip
        else:
            yield ok("start", f"{RANKS} ranks start, meet and end in {facts['seconds']:.1f} s{where}", **facts)
    for reason in list(job.failures("start").values())[:1]:
        if not any(facts["reason"] for facts in job.of("mpi").values()):  # else that says it already
            yield problem("start", f"no ranks can be started: {reason}", "see docs/launchers.md", reason=reason)


def main() -> None:
    """Meet the other ranks and make a window with them; collective."""
    from clcomm.comm.transport import mpi_communicators, mpi_runtime

    world = mpi_runtime.load_mpi().COMM_WORLD
    host = mpi_communicators.host_of(world)
    found = {"size": world.Get_size(), "window": mpi_communicators.shares_memory(host)}
    host.Free()
    if world.Get_rank() == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
