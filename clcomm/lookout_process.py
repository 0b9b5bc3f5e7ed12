"""What a host's lookout runs: wait for the ranks' ends, and tell of the first that nobody meant.

Standard library only, and started without site-packages: it is there in 20 ms and costs nothing while it waits.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import sys
import time

#: A rank's record: words (int64) of it, and their places.
RECORD_BYTES = 64
STATE, STEP, RANK, PID = range(4)
#: What a rank is doing: its work, leaving on purpose, ending the job with words of its own.
RUNNING, LEAVING, FAILING = range(3)
#: Where /proc/PID/stat has a process's flags, counted from behind its name, and the kernel's flag of one that ends.
_FLAGS, _PF_EXITING = 6, 0x4
#: Ranks that die so soon after one that failed were ended by the launcher.
ENDED_BY_LAUNCHER_S = 2.0


def main(descriptor: int) -> None:
    """Watch the ranks whose records lie in the memory behind `descriptor` until the last is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    size = os.fstat(descriptor).st_size
    words = memoryview(mmap.mmap(descriptor, size)).cast("q")
    records = [words[start : start + RECORD_BYTES // 8] for start in range(0, len(words), RECORD_BYTES // 8)]
    poll, watched, dead = select.poll(), {}, []
    for record in records:
        try:
            handle = os.pidfd_open(record[PID])
        except ProcessLookupError:
            dead.append(record)
            continue
        watched[handle] = record
        poll.register(handle, select.POLLIN)
    quiet_until = 0.0
    while True:
        lost = [record for record in dead if record[STATE] == RUNNING]
        if lost and time.monotonic() > quiet_until and not any(record[STATE] == FAILING for record in records):
            os.write(2, message(lost, records).encode())
            quiet_until = time.monotonic() + ENDED_BY_LAUNCHER_S
        if not watched:
            return
        dead = []
        for handle, _ in poll.poll():
            poll.unregister(handle)
            dead.append(watched.pop(handle))


def message(lost: list[memoryview], records: list[memoryview]) -> str:
    """Return the line that names the rank which died without a word.

    The launcher ends the others at once; on a busy machine one of them may be gone before. So it names those as well.
    """
    first = lost[0]
    gone = [record for record in records if record[STATE] == RUNNING and (record in lost or is_ending(record[PID]))]
    others = [f"rank {record[RANK]}" for record in gone if record is not first]
    same = f", at the same time as {', '.join(others)}" if others else ""
    return f"clcomm: rank {first[RANK]} died{at(first[STEP])}{cause(first[PID])}{same}\n"


def at(step: int) -> str:
    return f" at step {step}" if step else ""


def cause(pid: int) -> str:
    """Return what ended a process, as long as its parent has not asked for that."""
    status = _status(pid)
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


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the command's name; nothing for a process that is no more."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # a system without pidfds: nobody explains
        main(int(sys.argv[1]))
