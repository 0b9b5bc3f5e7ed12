"""The exit monitor: a small process per host that reports a rank's unexpected exit, by SIGKILL, a crash or os._exit.

Launchers then end all other ranks within milliseconds, so no rank can report it. Each rank keeps a record in memory
shared with the monitor: its number, its step, and the state of its exit. The process runs exit_monitor_process.py and
ends with the last rank of its host. It also ends ranks whose launcher is gone, which would run forever and write the
same files as a restarted job. Until a rank has a Communicator, a separate process watches that rank alone.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from clcomm import variables
from clcomm.job.exit_monitor_process import (
    FAILING,
    FINALIZED,
    JOB_VARIABLE,
    JOINED,
    LEAVING,
    PID,
    RANK,
    RECORD_BYTES,
    REPORTED,
    RUNNING,
    STATE,
    STEP,
    STOPPING,
    children_of,
    is_gone,
    launcher_of,
)
from clcomm.launcher import launched_rank_in_words
from clcomm.transport.mpi_runtime import Intracomm, launched_ranks


class _Own:
    """This rank's record: in private memory at first, in memory shared with the host's ranks once those are watched.

    `start` is the index of its first word in `records`; `start_pipe` leads to the process that watches this rank until
    it has a Communicator.
    """

    records: Any = memoryview(bytearray(RECORD_BYTES)).cast("q")
    start = 0
    is_watched = False
    start_pipe = -1


def wants_hooks() -> bool:
    """Return whether clcomm may hook this process's exits, signals and forks: not with CLCOMM_HOOKS=off."""
    return variables.seems_on("CLCOMM_HOOKS")


def note_step(step: int) -> None:
    """Note this rank's step of the training, for messages about its end."""
    _Own.records[_Own.start + STEP] = step


def rank() -> int:
    """Return this process's rank in the job; 0 in a job of one rank, and before the first Communicator."""
    return int(_Own.records[_Own.start + RANK])


def note_finalized() -> None:
    """Note that the program has called MPI.Finalize()."""
    _note(FINALIZED)


def note_leaving() -> None:
    """Note that this rank runs Python's exit handlers."""
    _note(LEAVING)


def note_stopping() -> None:
    """Note that this rank ends the job, perhaps because of another rank's failure."""
    _note(STOPPING)


def note_failing() -> None:
    """Note that this rank ends the job and reports the reason."""
    _note(FAILING)


def _note(state: int) -> None:
    _Own.records[_Own.start + STATE] = max(state, _Own.records[_Own.start + STATE])
    _notify_start_monitor(state)


def _notify_start_monitor(state: int) -> None:
    if _Own.start_pipe >= 0:
        with suppress(OSError):
            os.write(_Own.start_pipe, bytes([state]))


def at_step() -> str:
    """Return " at step N", or "" if no step was noted."""
    step = _Own.records[_Own.start + STEP]
    return f" at step {step}" if step else ""


def another_failed() -> bool:
    """Return whether another rank of this host ends the job, or is dead."""
    words = RECORD_BYTES // 8
    for start in range(0, len(_Own.records), words):
        state, pid = _Own.records[start + STATE], _Own.records[start + PID]
        if start != _Own.start and pid and (state == FAILING or (state == RUNNING and is_gone(pid))):
            return True
    return False


def wait_for_report(within_s: float) -> None:
    """Wait until the exit monitor has reported another rank's death; the launcher may end with this process."""
    deadline = time.monotonic() + within_s
    while _Own.is_watched and not any(_Own.records[REPORTED :: RECORD_BYTES // 8]) and time.monotonic() < deadline:
        time.sleep(0.005)


def siblings() -> list[int]:
    """Return the known processes of the job's other ranks on this host.

    They are the ranks in the records, and the launcher's other children that belong to the same job; the launcher is
    this process's parent.
    """
    words = RECORD_BYTES // 8
    found = {_Own.records[start + PID] for start in range(0, len(_Own.records), words)}
    found.update(children_of(os.getppid(), os.environ.get(JOB_VARIABLE, "")))
    return sorted(found - {0, os.getpid()})


def end_siblings() -> None:
    """Kill the job's other ranks on this host."""
    for pid in siblings():
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def watch_start() -> None:
    """Start the process that watches this rank until it has a Communicator; no-op without pidfds."""
    if not hasattr(os, "pidfd_open"):
        return
    with ExitStack() as opened, suppress(OSError):
        reading, _Own.start_pipe = os.pipe()
        opened.callback(os.close, reading)
        handle = os.pidfd_open(os.getpid())
        opened.callback(os.close, handle)
        numbers = os.getppid(), os.getpid(), handle, reading
        job = os.environ.get(JOB_VARIABLE, "")
        _run_monitor("start", launched_rank_in_words(), job, *map(str, numbers), descriptors=(handle, reading))


def watch_host(host: Intracomm, rank: int) -> None:
    """Start the exit monitor of the ranks of `host`; collective, once.

    A rank that is already watched keeps its monitor; its number may have changed after losses. Where a system call
    fails there is no monitor, and exits are not reported.

    Args:
        host: a communicator of the ranks of this host.
        rank: this rank's number in the job.
    """
    from clcomm.job.common_memory import common_memory

    if _Own.is_watched:
        _Own.records[_Own.start + RANK] = rank
    launcher = launcher_of(os.getpid())
    if host.Get_size() < 2 and (_Own.is_watched or not launcher):
        return
    reading, writing = os.pipe()  # closed by the end of this process
    here = _Own.is_watched, os.getpid(), reading, launcher
    watched, pids, pipes, launchers = zip(*host.allgather(here), strict=True)
    with ExitStack() as opened:
        opened.callback(os.close, reading)
        memory, descriptor = None, -1
        if not any(watched):
            memory, descriptor = common_memory(host, "clcomm-exit-monitor", host.Get_size() * RECORD_BYTES)
        if memory is None:
            os.close(writing)
        else:
            _join(memory.cast("q"), host.Get_rank(), rank)
            _Own.is_watched = True
            if launched_ranks() < 2 or not wants_hooks():
                note_leaving()  # its exit needs no report: no rank waits for it, or no hook notes how it exits
        ends = None
        if descriptor >= 0:
            opened.callback(os.close, descriptor)
            if memory is not None:
                ends = ends_of(pids, pipes, opened, sorted({*launchers} - {0}))
        host.Barrier()  # all records are written, and all later exits are queued
        if ends is not None:
            _start_host_monitor(descriptor, *ends)


def _join(records: Any, local_rank: int, rank: int) -> None:
    start = local_rank * RECORD_BYTES // 8
    records[start + STEP] = _Own.records[_Own.start + STEP]
    records[start + STATE] = _Own.records[_Own.start + STATE]
    records[start + RANK], records[start + PID] = rank, os.getpid()
    _Own.records, _Own.start = records, start
    _notify_start_monitor(JOINED)


def ends_of(
    pids: Sequence[int], pipes: Sequence[int], opened: ExitStack, launchers: Sequence[int] = ()
) -> tuple[select.epoll, list[int]] | None:
    """Return an epoll that queues these processes' exits in order, and its handles; None where Linux is too old.

    The handles are the processes' pidfds, then their pipes, then the launchers' pidfds. When a process ends, the kernel
    closes the last opened descriptor first: so a rank's pipe ends before the launcher notices its death and ends the
    other ranks. The pidfd reports the exit a moment later; it is needed if a child has the pipe too. Exits are queued
    while the monitor starts.

    Args:
        pids: the processes.
        pipes: of each process, the read descriptor of a pipe to which it alone writes.
        opened: closes the handles.
        launchers: the launchers' processes.
    """
    try:
        ends = opened.enter_context(select.epoll())
        handles = [os.pidfd_open(pid) for pid in pids]
        flags = os.O_RDONLY | os.O_NONBLOCK  # do not block for a writer
        handles += [os.open(f"/proc/{pid}/fd/{pipe}", flags) for pid, pipe in zip(pids, pipes, strict=True)]
        handles += [os.pidfd_open(launcher) for launcher in launchers]
        for handle in handles:
            opened.callback(os.close, handle)
            ends.register(handle, select.EPOLLIN)  # a pipe's end is reported in any case
    except (OSError, AttributeError):  # AttributeError: not Linux
        return None
    return ends, handles


def _start_host_monitor(memory: int, ends: select.epoll, handles: Sequence[int]) -> None:
    descriptors = (memory, ends.fileno(), *handles)
    with suppress(OSError):
        _run_monitor("host", *map(str, descriptors), descriptors=descriptors)


def _run_monitor(*arguments: str, descriptors: Sequence[int]) -> None:
    script = Path(__file__).with_name("exit_monitor_process.py")
    subprocess.Popen(
        [sys.executable, "-I", "-S", str(script), *arguments],
        pass_fds=descriptors, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True, cwd="/",
    ).returncode = 0  # it outlives this process; without a code Popen would warn that it still runs  # fmt: skip
