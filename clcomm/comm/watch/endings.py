"""The end of a job: one clear message, the right exit code, and no rank left waiting for another.

`run(main)` is for programs; clcomm/comm/watch/exits.py handles all other exits of a job of several ranks.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import io
import os
import signal
import stat
import struct
import sys
import termios
import time
import traceback
from collections.abc import Callable
from hashlib import sha256
from typing import NoReturn, TextIO

from clcomm.base.errors import ClcommError, escaped
from clcomm.base.host import variables
from clcomm.comm.transport import mpi_failures, mpi_runtime
from clcomm.comm.watch.exit_monitor_process import FAILING, STOPPING
from clcomm.comm.watch.job import this_job
from clcomm.comm.watch.restarts import SAVED, SIGNAL, STEP

#: Exit codes: a user's mistake, a failure, SIGINT and SIGTERM (128 + the signal), a hang (as timeout(1) uses it).
USER_ERROR, FAILURE, INTERRUPTED, TERMINATED, TIMED_OUT = 2, 1, 130, 143, 124
#: How long a failing rank waits for the others to fail with the same message before it ends them.
AGREEMENT_S = 2.0
#: How long a failing rank waits for collectives in the background; shorter, as the others wait for its agreement.
BACKGROUND_S = 1.0
#: How long a rank waits for the exit monitor to report another rank's death.
REPORT_S = 1.5
#: How long the end of a job waits for the launcher to read the output.
READ_S = 1.0


class Exit(SystemExit):
    """A SystemExit with a reason, for the message to the user."""

    def __init__(self, code: object = None, reason: str = ""):
        super().__init__(code)
        self.reason = reason


def shell_code(code: int) -> int:
    """Return the 8 bits of an exit code that a shell gets; 1 for a failure whose 8 bits are all 0."""
    return code & 0xFF or int(code != 0)


def run(main: Callable[[], int | None], tidy: Callable[[BaseException], None] | None = None) -> NoReturn:
    """Call `main` and end the process with its return value, or its exception's code, as exit code.

    A ClcommError is printed as one line, once for all ranks that raise the same one; CLCOMM_TRACEBACK=1 prints the
    traceback too. Any other exception is printed with its rank, its step where known, and its traceback, once for all
    ranks that raise the same one. In both cases the other ranks are ended.

    tidy: changes an exception before it is reported, such as by cutting a launcher's frames.
    """
    gc.freeze()  # what is imported stays: from now on the garbage collector searches what the program makes
    process = os.getpid()
    try:
        sys.exit(main() or 0)
    except BaseException as error:
        if os.getpid() != process and mpi_runtime.is_running():
            raise  # a forked child is not a rank
        if tidy is not None:
            tidy(error)
        code = fail(error)
    _flush(sys.stdout)
    sys.exit(code)


def note_step(step: int) -> None:
    """Note this rank's step of the training, for messages about its end, for `clcomm run` and `clcomm top`."""
    from clcomm.comm.stats import events  # here, as it needs NumPy, and the end of a job does not

    events.note_step(step)
    job = this_job()
    job.record.note_step(step)
    if job.record.rank == 0:
        job.progress.note(STEP, step)


def note_saved(step: int) -> None:
    """Note that the state after `step` steps is saved, for `clcomm run`."""
    job = this_job()
    if job.record.rank == 0:
        job.progress.note(SAVED, step)


def note_signal(number: int) -> None:
    """Note a signal that ends this process's program, for its end and for `clcomm run`."""
    job = this_job()
    job.is_signalled = True
    if not job.record.another_failed():  # some launchers end the other ranks by SIGTERM
        job.progress.note(SIGNAL, number)


def is_reported() -> bool:
    """Return whether `fail` or `abort` has handled this process's end."""
    return this_job().is_reported


def note_wrapped(error: BaseException, text: str = "") -> None:
    """Note an error that passes through another library, which may raise its own with this one's text in it.

    text: what that holds of an exception that is none of clcomm's, such as a signal's.
    """
    if isinstance(error, ClcommError):
        noted = ClcommError(str(error))  # the error itself would keep its frames alive
        noted.exit_code, noted.end_job = error.exit_code, error.end_job
        this_job().wrapped = str(error), noted
    else:
        this_job().wrapped = text, error.with_traceback(None)


def fail(error: BaseException) -> int:
    """Report an exception and return the exit code; end the other ranks unless all fail with the same message.

    sys.exit(0) is not a failure: exits.py ends the job if ranks wait for this one, as at a program's normal end.
    """
    if isinstance(error, SystemExit) and (error.code is None or error.code == 0):
        return 0
    job = this_job()
    job.is_reported = True
    if job.wrapped is not None and not isinstance(error, ClcommError) and job.wrapped[0] in str(error):
        error = job.wrapped[1]
    is_caused = (isinstance(error, Exit) and error.reason) or mpi_failures.is_lost_peer(error)
    job.record.note(STOPPING if is_caused else FAILING)
    try:
        return _report(error)
    except BaseException as another:  # the other ranks must end all the same
        names = type(error).__name__, type(another).__name__
        print_line(f"clcomm: rank {job.record.rank} failed: {names[0]}, and {names[1]} while it was reported")
        abort(FAILURE)
        return FAILURE


def _report(error: BaseException) -> int:
    job = this_job()
    if isinstance(error, ClcommError) and error.end_job is not None:
        error.end_job()
        return error.exit_code
    if isinstance(error, SystemExit):
        return _report_exit(error)
    if mpi_failures.is_lost_peer(error):
        return _follow_lost_peer()
    if isinstance(error, ClcommError) and not variables.seems_on("CLCOMM_TRACEBACK"):
        return _report_together(f"clcomm: {{where}}{error}", error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        note_signal(signal.SIGINT)
        text = "clcomm: {where}interrupted"
        return _report_together(text, INTERRUPTED, alone=text + job.record.at_step())
    trace = "".join(traceback.format_exception(error)).rstrip()
    code = error.exit_code if isinstance(error, ClcommError) else FAILURE
    return _report_together(f"clcomm: {{who}} failed{job.record.at_step()}:\n{trace}", code)


def _follow_lost_peer() -> int:
    """End the job after another rank's death, and report it if no exit monitor of this host does."""
    record = this_job().record
    if record.another_failed():
        record.wait_for_report(REPORT_S)
    else:
        rank, size = mpi_failures.place_in_world()
        print_line(_placed(f"clcomm: {{where}}ended{record.at_step()}, as another rank has died", [rank], size))
    abort(FAILURE)
    return FAILURE


def end(code: int, reason: str, rank: int | None = None) -> None:
    """Print why a rank ends the job, and end it without waiting for the other ranks' agreement.

    Args:
        code: the exit code.
        reason: the message after the rank.
        rank: the rank that the message names; None: this one, with its step.
    """
    own, size = mpi_failures.place_in_world()
    step = this_job().record.at_step() if rank is None else ""
    print_line(_placed(f"clcomm: {{where}}{reason}{step}", [own if rank is None else rank], size))
    abort(code)


def _report_exit(error: SystemExit) -> int:
    """Return the exit code of a SystemExit that is a failure; end the job unless all ranks exit in the same way."""
    if isinstance(error.code, str):
        return _report_together(error.code, FAILURE)
    code = error.code if isinstance(error.code, int) else FAILURE
    reason = error.reason if isinstance(error, Exit) else ""
    record = this_job().record
    if reason and record.another_failed():
        return shell_code(code)  # some launchers end the other ranks by SIGTERM
    # The caller of sys.exit(code), argparse for one, has printed a message; only a rank that exits alone needs one.
    alone = f"clcomm: {{where}}{reason or f'left with exit code {code}'}{record.at_step()}"
    return _report_together(f"clcomm: {reason}" if reason else "", shell_code(code), alone)


def _report_together(message: str, code: int, alone: str | None = None) -> int:
    """Print `message` once for all ranks that fail with it, and return `code`.

    Unless all ranks fail within AGREEMENT_S, whatever their messages, this rank prints `alone`, by default `message`,
    and aborts the job.
    """
    rank, size = mpi_failures.place_in_world()
    alike = [0] if size == 1 else mpi_failures.ranks_in_agreement(_digest(message), AGREEMENT_S)
    if alike is None:
        print_line(_placed(alone or message, [rank], size))
        abort(code)
        return code
    if rank == min(alike):
        print_line(_placed(message, alike, size))
        _wait_for_reader()
    is_idle = this_job().finish_queues(BACKGROUND_S)
    if size > 1:
        # Launchers may end the others once one exits.
        idle = mpi_failures.ranks_in_agreement(_digest("idle" if is_idle else "busy"), AGREEMENT_S)
        is_idle = is_idle and (idle is None or len(idle) == size)
    if not is_idle:
        abort(code)  # MPI can't be finalized
    return code


def _digest(message: str) -> bytes:
    return sha256(message.encode(errors="backslashreplace")).digest()  # file names may not be encodable


def _placed(message: str, ranks: list[int], size: int) -> str:
    """Fill in {where} and {who} of a message: the lowest of `ranks`; for all ranks, nothing and their number."""
    everywhere = len(ranks) == size
    who = f"rank {ranks[0]}" if size == 1 or not everywhere else f"every rank of {size}"
    where = "" if everywhere else f"rank {ranks[0]}: "
    return message.replace("{where}", where, 1).replace("{who}", who, 1)


def print_line(line: str) -> None:
    """Write a line, unless it is empty, to stderr in one piece, so that ranks' lines do not mix; it is `escaped`.

    Errors of a stream that is closed, full or None are ignored, so that the job can end.
    """
    if line:
        _flush(sys.stdout)
        stream = _error_stream()
        with contextlib.suppress(Exception):
            stream.write(escaped(line).encode(errors="backslashreplace").decode() + "\n")  # type: ignore[union-attr]
        _flush(stream)


def _error_stream() -> TextIO | None:
    """Return sys.stderr, or the process's own in its place while a text collects what is written.

    So does the excepthook of torch.distributed, which would print it after this process's end.
    """
    return sys.__stderr__ if type(sys.stderr) is io.StringIO else sys.stderr


def _flush(stream: TextIO | None) -> None:
    with contextlib.suppress(Exception):
        stream.flush()  # type: ignore[union-attr]


def abort(code: int) -> None:
    """End every rank now, without MPI's own messages about it."""
    job = this_job()
    job.is_reported = True
    job.record.note(FAILING)
    try:
        _flush(sys.stdout)
        _flush(sys.stderr)
        _wait_for_reader()
        with contextlib.suppress(OSError):  # no descriptor is free
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    finally:
        if mpi_failures.tolerates_failures() or mpi_runtime.process_mpi().stand_in is not None:
            # MPI_Abort would end this rank alone, and MPI would let the other ranks continue; or there is no MPI.
            mpi_failures.prepare_abort()
            job.record.end_siblings()
            os._exit(shell_code(code))
        mpi_failures.abort(shell_code(code))


def _wait_for_reader() -> None:
    """Wait up to READ_S until the launcher has read the output: on a busy machine MPICH's may end before that."""
    deadline = time.monotonic() + READ_S
    while any(_unread(descriptor) for descriptor in (1, 2)) and time.monotonic() < deadline:
        time.sleep(0.001)


def _unread(descriptor: int) -> int:
    """Return the number of bytes of a pipe or socket that its other end has not read; 0 if unknown."""
    unread = bytes(4)
    with contextlib.suppress(OSError):  # a file, or closed
        of_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        unread = fcntl.ioctl(descriptor, termios.FIONREAD if of_pipe else termios.TIOCOUTQ, unread)
    return int(struct.unpack("i", unread)[0])
