"""The processes that watch for unexpected exits of ranks: they report the first, and end the remaining ranks.

With the argument `host` the process watches all ranks of a host once they have a Communicator, with `start` one rank
until then. It uses the standard library only, without site-packages: it starts in 20 ms and costs nothing while it
waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import select
import signal
import stat
import struct
import sys
import termios
import time
from collections.abc import Callable, Sequence

TYPE_CHECKING = False
if TYPE_CHECKING or __name__ != "__main__":
    from clcomm.base.errors import name_ranks
    from clcomm.base.host.host_processes import OF_MPI, Made, files_of, has, processes, remove, stat_fields
    from clcomm.base.host.launcher import JOB_VARIABLE
else:
    sys.path += [os.path.join(os.path.dirname(__file__), "../../base", folder) for folder in ("", "host")]
    from errors import name_ranks
    from host_processes import OF_MPI, Made, files_of, has, processes, remove, stat_fields
    from launcher import JOB_VARIABLE

#: A rank's record: its size, and the indices of its words (int64).
RECORD_BYTES = 64
STATE, STEP, RANK, PID, REPORTED, START = range(6)
#: A rank's state: running; after the program's MPI.Finalize(); in Python's exit handlers; stopping, perhaps because of
#: another rank's failure (launchers send SIGTERM); ending the job, which it reports itself.
RUNNING, FINALIZED, LEAVING, STOPPING, FAILING = range(5)
#: Written in place of a state to the process that watches a rank's start: the rank has a Communicator.
JOINED = 9
#: The kernel's request for information on a process, and its flag for the exit status (linux/pidfd.h).
_PIDFD_GET_INFO, _PIDFD_INFO_EXIT = 0xC040FF0B, 0x8
#: Whether MPICH's launcher has started ranks on other hosts too: their number here is less than that of all.
OTHER_HOSTS = 0 < int(os.environ.get("MPI_LOCALNRANKS") or 0) < int(os.environ.get("PMI_SIZE") or 0)
#: How long the launcher may take to read the report, and to pass it on, before it is ended.
READ_S, PASSED_ON_S = 1.0, 0.1
#: Ranks that die within this time after a reported exit were ended by the launcher, and are not reported.
ENDED_BY_LAUNCHER_S = 2.0
#: How long the other ranks may take to end after an unexpected exit before they are killed.
OTHERS_GRACE_S = 2.0
#: How long a report waits for the launcher to kill the others, and, after each word, for it to collect one of them:
#: where the job's exit code would be 0 else.
KILLED_S, COLLECTED_S = 0.5, 0.05
#: Whether the other ranks continue when one dies: under Open MPI's `mpiexec --with-ft ulfm`.
RANKS_MAY_DIE = os.environ.get("OMPI_MCA_mpi_ft_enable") == "1"  # noqa: SIM112 - Open MPI's own
#: When ranks get SIGTERM after their launcher's end, not at once as it may have killed them itself; and SIGKILL.
NOTICE_S, ORPHAN_S = 0.5, 3.5
#: How long a process may take to end after its pipe has closed.
DYING_S = 1.0


def watch_host(memory: int, ends: int, *handles: int) -> None:
    """Watch the ranks of a host until the last is gone.

    Args:
        memory: descriptor of the ranks' records.
        ends: descriptor of an epoll of the handles, which returns exits in order, so the one that caused the others is
            the first.
        handles: the ranks' pidfds, then their pipes in the same order, then the pidfds of their launchers.
    """
    ignore_signals()
    size = os.fstat(memory).st_size
    words = memoryview(mmap.mmap(memory, size)).cast("q")
    records = [words[start : start + RECORD_BYTES // 8] for start in range(0, len(words), RECORD_BYTES // 8)]
    pidfds, pipes = handles[: len(records)], handles[len(records) : 2 * len(records)]
    launchers = handles[2 * len(records) :]
    watched = set(range(len(records)))
    exits = select.epoll.fromfd(ends)
    reporter = ExitReporter(alone=len(records) == 1)
    plan: list[tuple[float, int]] = []  # times and signals for the ranks that remain
    while watched:
        for handle, _ in exits.poll(max(0.0, plan[0][0] - time.monotonic()) if plan else None):
            exits.unregister(handle)
            if handle in launchers:
                now_s, reporter.quiet_until = time.monotonic(), math.inf
                plan = plan or [(now_s + NOTICE_S, signal.SIGTERM), (now_s + ORPHAN_S, signal.SIGKILL)]
                continue
            which = (pidfds if handle in pidfds else pipes).index(handle)
            if which not in watched:
                continue
            watched.discard(which)
            is_expected = records[which][STATE] >= LEAVING or any(other[STATE] == FAILING for other in records)
            others = [pidfds[other] for other in watched]
            if is_expected:
                reporter.note_expected(records[which], pidfds[which])
            elif reporter.ends_job(records[which], pidfds[which], others):
                plan = plan or [(time.monotonic() + OTHERS_GRACE_S, signal.SIGKILL)]
        if plan and time.monotonic() >= plan[0][0]:
            _, wanted = plan.pop(0)
            reporter.quiet_until = math.inf  # this process has caused all exits from now on
            left = sorted(watched)
            end([records[which][RANK] for which in left], [pidfds[which] for which in left], wanted)
    if reporter.has_exited:
        end_other_hosts(launchers)


class ExitReporter:
    """Reports unexpected exits, except those that the launcher causes after the first.

    Args:
        alone: whether the host has one rank; a signal may then be the launcher's, after an exit on another host.
    """

    def __init__(self, alone: bool):
        self.quiet_until = 0.0
        self.has_exited = False  # whether the one that it has reported exited by itself, not by a signal
        self._alone = alone
        self._suspect = ""

    def ends_job(self, record: memoryview, handle: int, others: list[int]) -> bool:
        """Report a rank that has ended, or is about to; return whether the job ends.

        The launcher should end the other ranks, but MPICH's may overlook an exit with code 0. Where ranks may die, Open
        MPI notifies the others of a death, but not of an exit with a code other than 0.

        Args:
            record: the rank's.
            handle: its pidfd.
            others: the pidfds of the host's ranks that still run.
        """
        is_last = RANKS_MAY_DIE and not others and self.quiet_until < math.inf  # nobody here goes on
        if time.monotonic() <= self.quiet_until and not is_last:
            return False
        select.select([handle], [], [], DYING_S)
        status = exit_status(record[PID], handle)
        line = f"rank {record[RANK]} {ended(status, record[STEP])}{', the last of its host' if is_last else ''}"
        if record[STATE] == FINALIZED and status == 0:
            # Not a failure yet, but MPICH's launcher then ends the other ranks if they still run: this was the cause.
            self._suspect = self._suspect or line
            return False
        if self._alone and (status is None or os.WIFSIGNALED(status)):
            return False
        line = f"clcomm: {self._suspect or line}\n"
        if not RANKS_MAY_DIE and (self._suspect or status == 0 or record[STATE] == FINALIZED):
            write_while_collected(line, others if status == 0 else [handle, *others])
        else:
            os.write(2, line.encode())
        record[REPORTED] = 1
        self.has_exited = status is not None and os.WIFEXITED(status)
        ends_job = not RANKS_MAY_DIE or (status is not None and os.WIFEXITED(status) and status != 0)
        # The others' exits then follow from this one, however late this process learns of them.
        self.quiet_until = math.inf if ends_job else time.monotonic() + ENDED_BY_LAUNCHER_S
        return ends_job

    def note_expected(self, record: memoryview, handle: int) -> None:
        """Note an exit that needs no report; after a signal or an error the launcher ends the others, which need none.

        Args:
            record: the rank's.
            handle: its pidfd.
        """
        if record[STATE] < FAILING and not RANKS_MAY_DIE and time.monotonic() > self.quiet_until:
            select.select([handle], [], [], DYING_S)
            if exit_status(record[PID], handle):
                self.quiet_until = math.inf


def write_while_collected(line: str, others: list[int]) -> None:
    """Report an exit so that the job's exit code is not 0, but that of a rank that failed or that the launcher kills.

    MPICH's launcher (src/pm/hydra/proxy: pmip.c, pmip_cb.c) gives the ranks that it kills, or finds dead when it is to
    kill them, code 0, and replaces it by their own only while a rank's output is open and has events. This process has
    a rank's stderr: once they are dead it writes the line word by word, until the launcher has collected one of them.

    Args:
        line: the report.
        others: the pidfds of the host's ranks that end with another code than 0.
    """
    deadline = time.monotonic() + KILLED_S
    running = list(others)
    while running and (left_s := deadline - time.monotonic()) > 0:
        dead = select.select(running, [], [], left_s)[0]
        running = [other for other in running if other not in dead]
    uncollected = bool(others) and not running
    for word in line.split(" "):
        os.write(2, (word if word.endswith("\n") else word + " ").encode())
        deadline = time.monotonic() + COLLECTED_S
        while uncollected and time.monotonic() < deadline:
            time.sleep(0.001)
            uncollected = not any(map(is_collected, others))


def is_collected(pidfd: int) -> bool:
    """Return whether a process has ended and its parent has collected its status."""
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except ProcessLookupError:
        return True
    return False


def watch_start(
    rank: str, job: str, in_shell: int, launcher: int, above: int, pid: int, handle: int, own: int, pipe: int
) -> None:
    """Watch a rank until it has a Communicator; if it exits unexpectedly before, end the host's other ranks.

    Launchers ignore a rank that exits before MPI has started, and the others would wait for it in MPI_Init. A rank
    whose launcher is gone is ended: it would wait there, too. What MPI has made for the rank in shared memory is
    removed once no process uses it.

    Args:
        rank: the rank's number, "?" if the launcher does not give it.
        job: its job among those of its launcher, "" if there is only one.
        in_shell: whether `pid` is a shell that has started the rank; one that goes on after it has its own reasons.
        launcher: the launcher's process.
        above: its pidfd.
        pid: the launcher's child: the rank's process, or the shell.
        handle: its pidfd.
        own: the rank's pidfd.
        pipe: read end of a pipe to which the rank writes its state, one byte each time.
    """
    ignore_signals()
    made, state, waiting, within_ms = Made(OF_MPI), RUNNING, select.poll(), None
    made.names |= files_of(os.getppid(), OF_MPI)  # this process's parent is the rank, as long as that lives
    sources = [each for each in (handle, pipe, made.descriptor, above) if each >= 0]
    for each in sources:
        waiting.register(each, select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in waiting.poll(within_ms)]
        if made.descriptor in ready:
            made.note([os.getppid()])
        for number, after_s in ((signal.SIGTERM, NOTICE_S), (signal.SIGKILL, ORPHAN_S)) if above in ready else ():
            if not select.select([own], [], [], after_s)[0]:
                end([rank], [own, handle], number)
        written = os.read(pipe, 64) if pipe in ready else b""
        if JOINED in written:
            return
        state = max([state, *written])
        if pipe in ready and not written:
            for each in sources[1:]:
                waiting.unregister(each)
            within_ms = OTHERS_GRACE_S * 1000 if in_shell else None
        if handle in ready or not ready:
            break
    status = exit_status(pid, handle) if ready else 0
    if state < STOPPING and (status or (state < LEAVING and not in_shell)):
        deadline = time.monotonic() + OTHERS_GRACE_S
        while (others := children_of(launcher, job)) and time.monotonic() < deadline:
            time.sleep(0.02)
        if others:
            os.write(2, f"clcomm: rank {rank} {ended(status, 0)} before it had a Communicator\n".encode())
        for other in others:
            kill_if(is_child, other, launcher, job, above)
    remove(made.names, OTHERS_GRACE_S)


def end_other_hosts(launchers: tuple[int, ...]) -> None:
    """End MPICH's launcher on this host, so that its mpiexec ends the ranks of other hosts; no-op without such.

    mpiexec (src/pm/hydra/mpiexec/pmiserv_cb.c) goes on when ranks exit by themselves, whatever their code, and fails
    when it loses the launcher of a host. That waits for the end of all output, so for this process.

    Args:
        launchers: pidfds of the launchers on this host.
    """
    if not OTHER_HOSTS or RANKS_MAY_DIE:
        return
    deadline, unread = time.monotonic() + READ_S, bytes(4)
    with contextlib.suppress(OSError):  # stderr is no pipe or socket
        request = termios.FIONREAD if stat.S_ISFIFO(os.fstat(2).st_mode) else termios.TIOCOUTQ
        while any(fcntl.ioctl(2, request, unread)) and time.monotonic() < deadline:
            time.sleep(0.005)
    time.sleep(PASSED_ON_S)
    for launcher in launchers:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(launcher, signal.SIGKILL)


def ignore_signals() -> None:
    """Ignore the signals that a terminal or a launcher sends to a job: this process ends after the ranks."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def end(ranks: Sequence[int | str], pidfds: list[int], number: int) -> None:
    """Send a signal to ranks, and report it if it is SIGTERM, which only ranks without a launcher get.

    Args:
        ranks: their numbers.
        pidfds: theirs, and of what has started them for the launcher.
        number: the signal.
    """
    for pidfd in pidfds:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(pidfd, number)
    if number == signal.SIGTERM and ranks:
        with contextlib.suppress(OSError):  # the reader may be gone too
            os.write(2, f"clcomm: {name_ranks(ranks)}: the launcher is gone; ended by the exit monitor\n".encode())


def ended(status: int | None, step: int) -> str:
    """Return a description of a process's end.

    Args:
        status: as os.wait returns it; None if unknown.
        step: the last step that was noted; 0: none.
    """
    at = f" at step {step}" if step else ""
    if status is None:
        return f"exited unexpectedly{at}"
    if os.WIFSIGNALED(status):
        return f"died{at} of {signal_name(os.WTERMSIG(status))}"
    return f"exited unexpectedly{at} with exit code {os.WEXITSTATUS(status)}"


def signal_name(number: int) -> str:
    """Return a signal's name; a real-time signal without one is counted from SIGRTMIN: "SIGRTMIN+3"."""
    if signal.SIGRTMIN < number < signal.SIGRTMAX:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def is_gone(pid: int) -> bool:
    """Return whether a process has ended."""
    fields = stat_fields(pid)
    return not fields or fields[0] in ("Z", "X")


def exit_status(pid: int, handle: int) -> int | None:
    """Return the wait status of a process that has ended, None if it is not available; handle: its pidfd."""
    fields = stat_fields(pid)
    return int(fields[-1]) if fields and fields[0] == "Z" else _status_after_wait(handle)


def _status_after_wait(handle: int) -> int | None:
    """Return the wait status of a process that its parent has already reaped; None before Linux 6.15."""
    info = bytearray(struct.pack("=Q56x", _PIDFD_INFO_EXIT))
    try:
        fcntl.ioctl(handle, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    mask, status = struct.unpack("=Q52xi", info)
    return status if mask & _PIDFD_INFO_EXIT else None


def kill_if(is_meant: Callable[..., bool], pid: int, *facts: object) -> None:
    """Kill a process of which `is_meant(pid, *facts)` holds once its pidfd is open, which no later process can get."""
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if is_meant(pid, *facts):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def children_of(parent: int, job: str) -> list[int]:
    """Return the live children of a launcher that belong to a job; an Open MPI daemon can serve several jobs."""
    return sorted(pid for pid in processes() if is_child(pid, parent, job))


def is_child(pid: int, parent: int, job: str, above: int = -1) -> bool:
    """Return whether a process lives, is a launcher's child, and belongs to a job.

    Args:
        pid: the process.
        parent: the launcher.
        job: "": any.
        above: the launcher's pidfd: no later process with its number is meant; -1: it is known to live.
    """
    fields = stat_fields(pid)
    if fields[1:2] != [str(parent)] or fields[0] in ("Z", "X") or (job and not has(f"{JOB_VARIABLE}={job}")(pid)):
        return False
    return above < 0 or not select.select([above], [], [], 0)[0]


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # without a system call that it needs, exits are not reported
        if sys.argv[1] == "host":
            watch_host(*map(int, sys.argv[2:]))
        else:
            numbers = map(int, sys.argv[4:])
            watch_start(sys.argv[2], sys.argv[3], *numbers)
