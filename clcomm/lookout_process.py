"""What a host's lookout runs: wait for the ranks' ends, and tell of the first that nobody meant.

Standard library only, and started without site-packages: it is there in 20 ms and costs nothing while it waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import signal
import struct
import sys
import time

#: A rank's record: words (int64) of it, and their places.
RECORD_BYTES = 64
STATE, STEP, RANK, PID = range(4)
#: What a rank is doing: its work, leaving on purpose, ending the job with words of its own.
RUNNING, LEAVING, FAILING = range(3)
#: Where /proc/PID/stat has a process's flags, counted from behind its name, and the kernel's flag of one that ends.
_FLAGS, _PF_EXITING = 6, 0x4
#: The kernel's request for what it knows of a process, and its flag for how that ended (linux/pidfd.h).
_PIDFD_GET_INFO, _PIDFD_INFO_EXIT = 0xC040FF0B, 0x8
#: Ranks that die so soon after one that failed were ended by the launcher.
ENDED_BY_LAUNCHER_S = 2.0


def main(memory: int, ends: int, *handles: int) -> None:
    """Watch ranks until the last is gone.

    memory: descriptor of their records. handles: their pidfds, in the same order. ends: an epoll that knows these, and
    hands out ends in the order in which they came: most often the culprit's first, as the launcher ends the others.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    size = os.fstat(memory).st_size
    words = memoryview(mmap.mmap(memory, size)).cast("q")
    records = [words[start : start + RECORD_BYTES // 8] for start in range(0, len(words), RECORD_BYTES // 8)]
    watched = dict(zip(handles, records, strict=True))
    coming = select.epoll.fromfd(ends)
    quiet_until = 0.0
    while watched:
        gone = [(handle, watched.pop(handle)) for handle, _ in coming.poll()]
        for handle, record in gone:
            coming.unregister(handle)
            explained = record[STATE] != RUNNING or any(other[STATE] == FAILING for other in records)
            if not explained and time.monotonic() > quiet_until:
                with_it = [other for other in records if other is not record and is_ending(other[PID])]
                os.write(2, message(record, handle, with_it).encode())
                quiet_until = time.monotonic() + ENDED_BY_LAUNCHER_S


def message(record: memoryview, handle: int, with_it: list[memoryview]) -> str:
    """Return the line that names the rank which died without a word; handle: its pidfd.

    Where we come late, on a busy machine, the launcher has ended others by then, and one of those may have been the
    first: it learns of a death a moment before the kernel notes the end. So these are named as well.
    """
    others = [f"rank {other[RANK]}{at(other[STEP])}" for other in with_it if other[STATE] == RUNNING]
    same = f", at the same time as {', '.join(others)}" if others else ""
    return f"clcomm: rank {record[RANK]} died{at(record[STEP])}{cause(record[PID], handle)}{same}\n"


def at(step: int) -> str:
    return f" at step {step}" if step else ""


def cause(pid: int, handle: int) -> str:
    """Return what ended a process."""
    status = _status(pid)
    if status is None:
        status = _status_after_wait(handle)
    if status is None:
        return " without a word"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f" of {signal.Signals(number).name}"
    return f" with exit code {os.WEXITSTATUS(status)}"


def is_gone(pid: int) -> bool:
    """Say whether a process has ended."""
    fields = stat_fields(pid)
    return not fields or fields[0] in ("Z", "X")


def is_ending(pid: int) -> bool:
    """Say whether a process has ended, or is about to."""
    fields = stat_fields(pid)
    return not fields or bool(int(fields[_FLAGS]) & _PF_EXITING)


def _status(pid: int) -> int | None:
    fields = stat_fields(pid)
    return int(fields[-1]) if fields and fields[0] == "Z" else None


def _status_after_wait(handle: int) -> int | None:
    """Return the wait status of a process whose parent has asked for it already; None before Linux 6.15."""
    info = bytearray(struct.pack("=Q56x", _PIDFD_INFO_EXIT))
    try:
        fcntl.ioctl(handle, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    mask, status = struct.unpack("=Q52xi", info)
    return status if mask & _PIDFD_INFO_EXIT else None


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the command's name; nothing for a process that is no more."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # nobody explains
        main(*map(int, sys.argv[1:]))
