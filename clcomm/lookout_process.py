"""What a host's lookout runs: wait for the ranks' ends and report the first that nobody meant; end orphaned ranks.

Standard library only, and started without site-packages: it is there in 20 ms and costs nothing while it waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
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
#: What a rank is doing: its work, leaving on purpose, stopping for what may be another's failure (as launchers send
#: SIGTERM), ending the job with words of its own.
RUNNING, LEAVING, STOPPING, FAILING = range(4)
#: The kernel's request for what it knows of a process, and its flag for how that ended (linux/pidfd.h).
_PIDFD_GET_INFO, _PIDFD_INFO_EXIT = 0xC040FF0B, 0x8
#: Processes that start ranks, and end them: those of MPICH, Open MPI and Slurm, in 15 characters as Linux has them.
LAUNCHERS = (
    "hydra_pmi_proxy", "pmi_proxy", "prted", "prterun", "orted", "orterun", "mpirun", "mpiexec", "mpiexec.hydra",
    "mpiexec.gforker", "slurmstepd",
)  # fmt: skip
#: Ranks that die so soon after one that failed were ended by the launcher.
ENDED_BY_LAUNCHER_S = 2.0
#: How long ranks whose launcher is gone may stay: until they are asked to end, as it may have killed them already, and
#: until they are killed.
NOTICE_S, ORPHAN_S = 0.5, 3.5
#: How long a process may take from the end of its pipe to its own.
DYING_S = 1.0


def main(memory: int, ends: int, *handles: int) -> None:
    """Watch ranks until the last is gone.

    memory: descriptor of their records. handles: their pidfds and then their pipes, in the same order, and then the
    pidfds of their launchers. ends: an epoll that knows these, and hands out ends in the order in which they came: the
    culprit's first.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    size = os.fstat(memory).st_size
    words = memoryview(mmap.mmap(memory, size)).cast("q")
    records = [words[start : start + RECORD_BYTES // 8] for start in range(0, len(words), RECORD_BYTES // 8)]
    pidfds, pipes = handles[: len(records)], handles[len(records) : 2 * len(records)]
    launchers = handles[2 * len(records) :]
    watched = set(range(len(records)))
    coming = select.epoll.fromfd(ends)
    quiet_until = 0.0
    plan: list[tuple[float, int]] = []  # when ranks without a launcher get which signal
    while watched:
        for handle, _ in coming.poll(max(0.0, plan[0][0] - time.monotonic()) if plan else None):
            coming.unregister(handle)
            if handle in launchers:
                gone_s, quiet_until = time.monotonic(), math.inf
                plan = plan or [(gone_s + NOTICE_S, signal.SIGTERM), (gone_s + ORPHAN_S, signal.SIGKILL)]
                continue
            which = (pidfds if handle in pidfds else pipes).index(handle)
            record = records[which]
            explained = record[STATE] != RUNNING or any(other[STATE] == FAILING for other in records)
            if which in watched and not explained and time.monotonic() > quiet_until:
                os.write(2, message(record, pidfds[which]).encode())
                quiet_until = time.monotonic() + ENDED_BY_LAUNCHER_S
            watched.discard(which)
        if plan and time.monotonic() >= plan[0][0]:
            _, wanted = plan.pop(0)
            end([records[which] for which in sorted(watched)], [pidfds[which] for which in sorted(watched)], wanted)


def end(records: list[memoryview], pidfds: list[int], number: int) -> None:
    """Send ranks that nobody else would ever end a signal; the first time, say so."""
    for pidfd in pidfds:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(pidfd, number)
    if number == signal.SIGTERM and records:
        ranks = ", ".join(str(record[RANK]) for record in records)
        with contextlib.suppress(OSError):  # what reads it may be gone too
            os.write(2, f"clcomm: rank {ranks}: the launcher is gone; ended by the lookout\n".encode())


def message(record: memoryview, handle: int) -> str:
    """Return the line that names the rank which died without a word, once it has; handle: its pidfd."""
    select.select([handle], [], [], DYING_S)
    return f"clcomm: rank {record[RANK]} died{at(record[STEP])}{cause(record[PID], handle)}\n"


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
        return f" of {signal_name(number)}"
    return f" with exit code {os.WEXITSTATUS(status)}"


def signal_name(number: int) -> str:
    """Return a signal's name, counted from the next named one where it has none: "SIGRTMIN+3"."""
    if signal.SIGRTMIN < number < signal.SIGRTMAX:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def is_gone(pid: int) -> bool:
    """Say whether a process has ended."""
    fields = stat_fields(pid)
    return not fields or fields[0] in ("Z", "X")


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


def launcher_of(pid: int) -> int:
    """Return the launcher of a rank: the nearest process above it that is known as one; 0 where there is none."""
    while pid > 1:
        fields = stat_fields(pid)
        pid = int(fields[1]) if fields else 0
        if pid and _name(pid) in LAUNCHERS:
            return pid
    return 0


def _name(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/comm") as file:
        return file.read().strip()
    return ""


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
