"""The exit monitor: a small process per host that reports a rank's unexpected exit, by SIGKILL, a crash or os._exit.

Launchers then end all other ranks within milliseconds, so no rank can report it. Each rank keeps a record in memory
shared with the monitor (`rank_record.py`). The process runs exit_monitor_process.py and
ends with the last rank of its host. It also ends ranks whose launcher is gone, which would run forever and write the
same files as a restarted job. Until a rank has a Communicator, a separate process watches that rank alone.
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from clcomm.base.host import variables
from clcomm.base.host.launcher import JOB_VARIABLE, launched_rank_in_words
from clcomm.base.host.rank_process import ancestors
from clcomm.comm.transport.common_memory import common_memory
from clcomm.comm.transport.mpi_failures import place_in_world
from clcomm.comm.transport.mpi_runtime import Intracomm
from clcomm.comm.watch import exit_monitor_process
from clcomm.comm.watch.exit_monitor_process import LEAVING, RECORD_BYTES
from clcomm.comm.watch.forced_end import start_helper
from clcomm.comm.watch.rank_record import RankRecord


def wants_hooks() -> bool:
    """Return whether clcomm may hook this process's exits, signals and forks: not with CLCOMM_HOOKS=off."""
    return variables.seems_on("CLCOMM_HOOKS")


def watch_start(record: RankRecord) -> None:
    """Start the process that watches this rank until it has a Communicator; no-op without a launcher or pidfds."""
    between, launcher = ancestors(os.getpid())
    if not launcher or not hasattr(os, "pidfd_open"):
        return
    rank = between[-1] if between else os.getpid()
    with ExitStack() as opened, suppress(OSError):
        handles = [os.pidfd_open(pid) for pid in (launcher, rank, os.getpid())]
        for handle in handles:
            opened.callback(os.close, handle)
        if ancestors(os.getpid()) != (between, launcher):
            return  # ended before its pidfd was opened
        reading, record.start_pipe = os.pipe()
        opened.callback(os.close, reading)
        numbers = bool(between), launcher, handles[0], rank, *handles[1:], reading
        job = os.environ.get(JOB_VARIABLE, "")
        words = "start", launched_rank_in_words(), job, *map(int, numbers)
        start_helper(exit_monitor_process.__file__, *words, descriptors=(*handles, reading))


def watch_host(record: RankRecord, host: Intracomm, rank: int) -> None:
    """Start the exit monitor of the ranks of `host`; collective, once.

    A rank that is already watched keeps its monitor; its number may have changed after losses. Where a system call
    fails there is no monitor, and exits are not reported.

    Args:
        record: this rank's.
        host: a communicator of the ranks of this host.
        rank: this rank's number in the job.
    """
    if record.is_watched:
        record.rank = rank
    launcher = ancestors(os.getpid())[1]
    if host.Get_size() < 2 and (record.is_watched or not launcher):
        return
    reading, writing = os.pipe()  # closed by the end of this process
    here = record.is_watched, os.getpid(), reading, os.fstat(reading).st_ino, launcher
    watched, pids, pipes, inodes, launchers = zip(*host.allgather(here), strict=True)
    with ExitStack() as opened:
        opened.callback(os.close, reading)
        memory, descriptor = None, -1
        if not any(watched):
            memory, descriptor = common_memory(host, "clcomm-exit-monitor", host.Get_size() * RECORD_BYTES)
        if memory is None:
            os.close(writing)
        else:
            record.join(memory.cast("q"), host.Get_rank(), rank)
            if place_in_world()[1] < 2 or not wants_hooks():
                record.note(LEAVING)  # its exit needs no report: no rank waits for it, or no hook notes how it exits
        ends = None
        if descriptor >= 0:
            opened.callback(os.close, descriptor)
            if memory is not None:
                ends = ends_of(pids, pipes, opened, sorted({*launchers} - {0}))
                if ends is not None and not _are_own(ends[1], pids, inodes, launchers):
                    ends = None
        host.Barrier()  # all records are written, and all later exits are queued
        if ends is not None:
            _start_host_monitor(descriptor, *ends)


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


def _are_own(handles: Sequence[int], pids: Sequence[int], inodes: Sequence[int], launchers: Sequence[int]) -> bool:
    """Return whether the handles are the ranks' and their launchers': a container's process numbers are its own.

    A pipe has one number on a host: so a process that has it is the rank.
    """
    opened = [os.fstat(handle).st_ino for handle in handles[len(pids) : 2 * len(pids)]]
    return opened == list(inodes) and [ancestors(pid)[1] for pid in pids] == list(launchers)


def _start_host_monitor(memory: int, ends: select.epoll, handles: Sequence[int]) -> None:
    descriptors = (memory, ends.fileno(), *handles)
    with suppress(OSError):
        start_helper(exit_monitor_process.__file__, "host", *descriptors, descriptors=descriptors)
