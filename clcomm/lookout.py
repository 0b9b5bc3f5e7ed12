"""A host's lookout: a small process that names the rank that dies without a word, of SIGKILL or a crash.

Launchers end all other ranks within milliseconds then, so no rank can tell. Each rank keeps a record in memory that
it shares with the lookout: who it is, its step, and whether it leaves on purpose. clcomm/lookout_process.py is what
the process runs; it ends with the last rank of its host. It also ends ranks whose launcher is gone, which would go on
for ever, and write what a job that was started again writes too.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from clcomm.common_memory import common_memory
from clcomm.lookout_process import (
    FAILING,
    LEAVING,
    PID,
    RANK,
    RECORD_BYTES,
    RUNNING,
    STATE,
    STEP,
    STOPPING,
    is_gone,
    launcher_of,
    stat_fields,
)

#: Names a job among those that one of Open MPI's daemons serves.
_JOB_VARIABLE = "PMIX_NAMESPACE"


class _Own:
    """This rank's record, in memory of its own until it joins its host's."""

    records: Any = memoryview(bytearray(RECORD_BYTES)).cast("q")
    start = 0
    is_watched = False


def note_step(step: int) -> None:
    """Note which step this rank is at."""
    _Own.records[_Own.start + STEP] = step


def rank() -> int:
    """Return this process's rank in the job; 0 as long as it is alone or has no Communicator."""
    return _Own.records[_Own.start + RANK]


def note_leaving() -> None:
    """Note that this rank leaves on purpose."""
    _Own.records[_Own.start + STATE] = max(LEAVING, _Own.records[_Own.start + STATE])


def note_stopping() -> None:
    """Note that this rank ends the job, unless another one does and so is the cause."""
    _Own.records[_Own.start + STATE] = max(STOPPING, _Own.records[_Own.start + STATE])


def note_failing() -> None:
    """Note that this rank ends the job, and says why."""
    _Own.records[_Own.start + STATE] = FAILING


def at_step() -> str:
    """Return " at step N", or nothing where no step was noted."""
    step = _Own.records[_Own.start + STEP]
    return f" at step {step}" if step else ""


def another_failed() -> bool:
    """Say whether another rank of this host ends the job, or is dead."""
    words = RECORD_BYTES // 8
    for start in range(0, len(_Own.records), words):
        state, pid = _Own.records[start + STATE], _Own.records[start + PID]
        if start != _Own.start and pid and (state == FAILING or (state == RUNNING and is_gone(pid))):
            return True
    return False


def siblings() -> list[int]:
    """Return the processes of the job's other ranks on this host, as far as they are known.

    Those are the ranks in the records, and where there are none yet the other children of this process's parent, the
    launcher, that belong to the same job.
    """
    words = RECORD_BYTES // 8
    found = {_Own.records[start + PID] for start in range(0, len(_Own.records), words)}
    for entry in os.listdir("/proc"):
        fields = stat_fields(int(entry)) if entry.isdigit() else []
        if len(fields) > 1 and int(fields[1]) == os.getppid() and _is_of_this_job(entry):
            found.add(int(entry))
    return sorted(found - {0, os.getpid()})


def _is_of_this_job(pid: str) -> bool:
    """Say whether a child of the same launcher is of the same job: Open MPI's daemons can serve several."""
    own = os.environ.get(_JOB_VARIABLE)
    if own is None:
        return True
    with suppress(OSError):
        return f"{_JOB_VARIABLE}={own}".encode() in Path("/proc", pid, "environ").read_bytes().split(b"\0")
    return False


def end_siblings() -> None:
    """Kill the job's other ranks on this host."""
    for pid in siblings():
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def watch_host(host: Any, rank: int) -> None:
    """Start the lookout of the ranks of `host`, of which this one has this rank in the job; collective, once.

    Where a rank is watched already, or the system refuses something, there is none: it only helps to explain. A rank
    that is watched already may have another number, where some have died.
    """
    if _Own.is_watched:
        _Own.records[_Own.start + RANK] = rank
    launcher = launcher_of(os.getpid())
    if host.Get_size() < 2 and (_Own.is_watched or not launcher):
        return
    reading, writing = os.pipe()  # its end comes with ours
    here = _Own.is_watched, os.getpid(), reading, launcher
    watched, pids, pipes, launchers = zip(*host.allgather(here), strict=True)
    with ExitStack() as opened:
        opened.callback(os.close, reading)
        memory, descriptor = None, -1
        if not any(watched):
            memory, descriptor = common_memory(host, "clcomm-lookout", host.Get_size() * RECORD_BYTES)
        if memory is None:
            os.close(writing)
        else:
            _join(memory.cast("q"), host.Get_rank(), rank)
            _Own.is_watched = True
            if host.Get_size() < 2:
                note_leaving()  # of a rank that is alone the launcher tells
        ends = None
        if descriptor >= 0:
            opened.callback(os.close, descriptor)
            if memory is not None:
                ends = ends_of(pids, pipes, opened, sorted({*launchers} - {0}))
        host.Barrier()  # all records are written, and all ends noted from here on
        if ends is not None:
            _start(descriptor, *ends)


def _join(records: Any, local_rank: int, rank: int) -> None:
    start = local_rank * RECORD_BYTES // 8
    records[start + STEP] = _Own.records[_Own.start + STEP]
    records[start + RANK], records[start + PID] = rank, os.getpid()
    _Own.records, _Own.start = records, start


def ends_of(
    pids: Sequence[int], pipes: Sequence[int], opened: ExitStack, launchers: Sequence[int] = ()
) -> tuple[select.epoll, list[int]] | None:
    """Return what notes these processes' ends in the order in which they come, their pidfds and then their pipes.

    The pidfds of the launchers come last. pipes: of each process, the descriptor to read from of a pipe that it alone
    writes to. The kernel closes what was opened last first: so a rank's pipe ends before its launcher, which ends the
    others, can know of its death. A pidfd tells a moment later, and where a child has the pipe too. None is missed
    while the lookout starts. Returns None where the system cannot; `opened` closes.
    """
    try:
        ends = opened.enter_context(select.epoll())
        handles = [os.pidfd_open(pid) for pid in pids]
        flags = os.O_RDONLY | os.O_NONBLOCK  # not to wait for somebody who writes
        handles += [os.open(f"/proc/{pid}/fd/{pipe}", flags) for pid, pipe in zip(pids, pipes, strict=True)]
        handles += [os.pidfd_open(launcher) for launcher in launchers]
        for handle in handles:
            opened.callback(os.close, handle)
            ends.register(handle, select.EPOLLIN)  # a pipe's end is told in any case
    except (OSError, AttributeError):  # AttributeError: not Linux
        return None
    return ends, handles


def _start(memory: int, ends: select.epoll, handles: Sequence[int]) -> None:
    script = Path(__file__).with_name("lookout_process.py")
    descriptors = (memory, ends.fileno(), *handles)
    with suppress(OSError):
        subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), *map(str, descriptors)],
            pass_fds=descriptors, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True, cwd="/",
        ).returncode = 0  # not ours to wait for: it outlives us  # fmt: skip
