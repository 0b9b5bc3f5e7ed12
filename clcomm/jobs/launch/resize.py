"""`clcomm run --resize 4 JOB`: another number of ranks for a job that runs under `clcomm run --min-ranks`."""

from __future__ import annotations

import contextlib
from pathlib import Path

from clcomm.base.errors import ArgumentError
from clcomm.comm.watch import worlds


def resize(ranks: int, job: list[str]) -> str:
    """Ask a job for this number of ranks; return what was asked in words.

    Args:
        job: the process of its `clcomm run` or of one of its ranks; none: the only such job of this user.

    Raises ArgumentError where no such job runs, and for a number that is out of its bounds.
    """
    running = worlds.running()
    wanted = job[0] if job else str(running[0].pid) if len(running) == 1 else ""
    found = next((each for each in running if wanted in (str(each.pid), _job_of(wanted, each.folder))), None)
    if found is None:
        known = ", ".join(str(each.pid) for each in running) or "none"
        raise ArgumentError(
            f"--resize: expected the process of a clcomm run --min-ranks or of one of its ranks, got "
            f"{wanted or 'none'}; such jobs here: {known}"
        )
    if not found.least <= ranks <= found.most:
        raise ArgumentError(f"--resize: expected {found.least} to {found.most} ranks, the job's bounds, got {ranks}")
    if not worlds.tell(found.folder, worlds.RESIZE, 0, ranks):
        raise ArgumentError(f"--resize: expected a job that runs, but {found.pid} has ended")
    return f"job {found.pid} is asked to go on with {ranks} ranks"


def _job_of(process: str, folder: Path) -> str:
    """Return the process's number where it belongs to a job, "" where it does not."""
    setting = f"{worlds.MEMORY}={folder}".encode()
    with contextlib.suppress(OSError, ValueError):
        if process.isdecimal() and setting in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
            return process
    return ""
