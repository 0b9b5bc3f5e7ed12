"""How a job ends: one clear message, the right exit code, and no rank left waiting for another.

`run(main)` is for programs; clcomm/exits.py sees to all other ways out of a process of several ranks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
import sys
import termios
import time
import traceback
from collections.abc import Callable
from hashlib import sha256
from typing import NoReturn, TextIO

from clcomm import lookout, restarts
from clcomm.errors import ClcommError
from clcomm.exit_code import shell_code
from clcomm.transport import mpi

#: Exit codes: a user's mistake, a program's, an interrupt (128 + SIGINT), a hang (as timeout(1) has it).
USER_ERROR, FAILURE, INTERRUPTED, TIMED_OUT = 2, 1, 130, 124
#: How long a failing rank waits for the others to fail alike before it ends them.
AGREEMENT_S = 2.0
#: How long the end of a job waits for the launcher to read what was written.
READ_S = 1.0


class Exit(SystemExit):
    """A SystemExit that can tell why; nobody else needs to end the ranks that don't leave too."""

    def __init__(self, code: object = None, reason: str = ""):
        super().__init__(code)
        self.reason = reason


class _Ending:
    """Whether this process is on its way out, so that nobody reports the same end twice."""

    is_reported = False


def run(main: Callable[[], int | None]) -> NoReturn:
    """Call `main` and end the process with its return value as exit code, or as its exception asks.

    A ClcommError is printed as one line, once for all ranks that failed with the same one; CLCOMM_TRACEBACK=1 shows
    the traceback too. Any other exception is printed with its rank, its step where known, and its traceback, once for
    all ranks that failed alike. Either way the other ranks are ended.
    """
    process = os.getpid()
    try:
        code = shell_code(main() or 0)
    except BaseException as error:
        if os.getpid() != process and mpi.is_running():
            raise  # a forked child is no rank
        code = fail(error)
    _flush(sys.stdout)
    sys.exit(code)


def note_step(step: int) -> None:
    """Say which step of its training this rank is at, for messages about its end and for `clcomm run`."""
    lookout.note_step(step)
    restarts.note(restarts.STEP, step, lookout.rank())


def note_saved(step: int) -> None:
    """Say that the state after so many steps is saved, for `clcomm run`."""
    restarts.note(restarts.SAVED, step, lookout.rank())


def is_reported() -> bool:
    """Say whether `fail` or `abort` has dealt with this process's end."""
    return _Ending.is_reported


def fail(error: BaseException) -> int:
    """Report an exception and return the exit code, after every rank failed alike; else end the other ranks.

    sys.exit(0) is no failure: `exits` sees to ranks that wait for this one, as it does when a program just ends.
    """
    if isinstance(error, SystemExit) and (error.code is None or error.code == 0):
        return 0
    _Ending.is_reported = True
    if (isinstance(error, Exit) and error.reason) or mpi.is_lost_peer(error):
        lookout.note_stopping()
    else:
        lookout.note_failing()
    try:
        return _report(error)
    except BaseException as another:  # nobody is left to report it, and the other ranks must end all the same
        names = type(error).__name__, type(another).__name__
        print_line(f"clcomm: rank {lookout.rank()} failed: {names[0]}, and {names[1]} while it was reported")
        abort(FAILURE)
        return FAILURE


def _report(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return _leave(error)
    if mpi.is_lost_peer(error):
        return _follow_lost_peer()
    if isinstance(error, ClcommError) and not os.environ.get("CLCOMM_TRACEBACK"):
        return _report_together(f"clcomm: {{where}}{error}", error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        said = "clcomm: {where}interrupted"
        return _report_together(said, INTERRUPTED, alone=said + lookout.at_step())
    trace = "".join(traceback.format_exception(error)).rstrip()
    code = error.exit_code if isinstance(error, ClcommError) else FAILURE
    return _report_together(f"clcomm: {{who}} failed{lookout.at_step()}:\n{trace}", code)


def _follow_lost_peer() -> int:
    """End the job after another rank's death; its host's lookout reports it, one on another host is reported here."""
    if not lookout.another_failed():
        rank, size = mpi.place_in_world()
        print_line(_placed(f"clcomm: {{where}}ended{lookout.at_step()}, as another rank has died", [rank], size))
    abort(FAILURE)
    return FAILURE


def end(code: int, reason: str) -> None:
    """Say why this rank ends the job, which others wait for already, and end it."""
    rank, size = mpi.place_in_world()
    print_line(_placed(f"clcomm: {{where}}{reason}{lookout.at_step()}", [rank], size))
    abort(code)


def _leave(error: SystemExit) -> int:
    """Honour sys.exit() with a failure: it ends the ranks that don't exit too."""
    if isinstance(error.code, str):
        return _report_together(error.code, FAILURE)
    code = error.code if isinstance(error.code, int) else FAILURE
    reason = error.reason if isinstance(error, Exit) else ""
    if reason and lookout.another_failed():
        return shell_code(code)  # some launchers end the others by SIGTERM
    # Whoever called sys.exit(code), argparse for one, has said why; only a rank that leaves alone is worth a line.
    alone = f"clcomm: {{where}}{reason or f'left with exit code {code}'}{lookout.at_step()}"
    return _report_together(f"clcomm: {reason}" if reason else "", shell_code(code), alone)


def _report_together(message: str, code: int, alone: str | None = None) -> int:
    """Print `message` once for all ranks that fail with it; when not all fail soon, print it and abort the job."""
    rank, size = mpi.place_in_world()
    alike = [0] if size == 1 else mpi.ranks_in_agreement(_digest(message), AGREEMENT_S)
    if alike is None:
        print_line(_placed(alone or message, [rank], size))
        abort(code)
        return code
    if rank == min(alike):
        print_line(_placed(message, alike, size))
        _wait_for_reader()
    if size > 1:
        mpi.ranks_in_agreement(_digest("said"), AGREEMENT_S)  # a launcher may end the others once one has left
    return code


def _digest(message: str) -> bytes:
    return sha256(message.encode(errors="backslashreplace")).digest()  # file names may hold what no encoding has


def _placed(message: str, ranks: list[int], size: int) -> str:
    """Return a message that says where: nothing for all ranks, else the lowest that prints it for its like."""
    everywhere = len(ranks) == size
    who = f"rank {ranks[0]}" if size == 1 or not everywhere else f"every rank of {size}"
    where = "" if everywhere else f"rank {ranks[0]}: "
    return message.replace("{where}", where, 1).replace("{who}", who, 1)


def print_line(line: str) -> None:
    """Write a line to stderr in one piece, so that ranks' lines don't mix; nothing for an empty one.

    Like abort, it goes on where a stream is closed, full or None: whoever ends a job has no use for another error.
    """
    if line:
        _flush(sys.stdout)
        with contextlib.suppress(Exception):
            sys.stderr.write(line.encode(errors="backslashreplace").decode() + "\n")
        _flush(sys.stderr)


def _flush(stream: TextIO | None) -> None:
    with contextlib.suppress(Exception):
        stream.flush()  # type: ignore[union-attr]


def abort(code: int) -> None:
    """End every rank now; MPI's own remarks about that are not for the user."""
    _Ending.is_reported = True
    lookout.note_failing()
    try:
        _flush(sys.stdout)
        _flush(sys.stderr)
        _wait_for_reader()
        with contextlib.suppress(OSError):  # no descriptor is free
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    finally:
        if mpi.tolerates_failures():
            # MPI would take this for a death that the others survive.
            mpi.prepare_abort()
            lookout.end_siblings()
            os._exit(shell_code(code))
        mpi.abort(shell_code(code))


def _wait_for_reader() -> None:
    """Wait until the launcher has read the output: MPICH's may end on a busy machine without what it had not read."""
    deadline = time.monotonic() + READ_S
    while any(_unread(descriptor) for descriptor in (1, 2)) and time.monotonic() < deadline:
        time.sleep(0.001)


def _unread(descriptor: int) -> int:
    """Return how many bytes wait in a pipe or a socket to be read at its other end; 0 where nobody can tell."""
    told = bytes(4)
    with contextlib.suppress(OSError):  # a file, or closed
        of_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        told = fcntl.ioctl(descriptor, termios.FIONREAD if of_pipe else termios.TIOCOUTQ, told)
    return int(struct.unpack("i", told)[0])
