"""How a job ends: one clear message, the right exit code, and no rank left waiting for another.

`run(main)` is for programs. A Communicator of several ranks also hooks uncaught exceptions, so that a plain script
ends the whole job when one of its ranks fails.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from hashlib import sha256
from types import TracebackType
from typing import NoReturn

from clcomm.errors import ClcommError
from clcomm.transport import mpi

#: Exit codes: a user's mistake, a program's, an interrupt (128 + SIGINT).
USER_ERROR, FAILURE, INTERRUPTED = 2, 1, 130
#: How long a failing rank waits for the others to fail alike before it ends them.
AGREEMENT_S = 2.0


def run(main: Callable[[], int | None]) -> NoReturn:
    """Call `main` and end the process with its return value as exit code, or as its exception asks.

    A ClcommError is printed as one line, once for all ranks that failed with the same one; CLCOMM_TRACEBACK=1 shows
    the traceback too. Any other exception is printed with its rank. Either way the other ranks are ended.
    """
    try:
        code = main() or 0
    except BaseException as error:
        code = fail(error)
    sys.stdout.flush()
    sys.exit(code)


def install_excepthook() -> None:
    """Make an uncaught exception on this rank end the whole job."""
    if sys.excepthook is not _excepthook:
        sys.excepthook = _excepthook


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # Python then leaves with exit code 1 through the ordinary exit handlers, MPI's among them. (os._exit here would
    # skip those: mpiexec takes such ranks for crashed, kills the others, and MPICH's files stay in /dev/shm.)
    fail(error)


def fail(error: BaseException) -> int:
    """Report an exception and return the exit code, after every rank failed alike; else end the other ranks."""
    if isinstance(error, SystemExit):
        return _leave(error)
    if isinstance(error, ClcommError) and not os.environ.get("CLCOMM_TRACEBACK"):
        return _report_together(f"clcomm: {{where}}{error}", USER_ERROR)
    if isinstance(error, KeyboardInterrupt):
        return _report_together("clcomm: interrupted", INTERRUPTED)
    rank, size = mpi.place_in_world()
    _print_line(f"clcomm: rank {rank} failed:\n{''.join(traceback.format_exception(error))}".rstrip())
    code = USER_ERROR if isinstance(error, ClcommError) else FAILURE
    if size > 1:
        _abort(code)
    return code


def _leave(error: SystemExit) -> int:
    """Honour sys.exit(): a clean exit is this rank's own affair, any other ends the ranks that don't exit too."""
    if error.code is None or error.code == 0:
        return 0
    if isinstance(error.code, str):
        return _report_together(error.code, FAILURE)
    code = error.code if isinstance(error.code, int) else FAILURE
    # Whoever called sys.exit(code), argparse for one, has said why; only a rank that leaves alone is worth a line.
    return _report_together("", code, alone=f"clcomm: {{where}}left with exit code {code}")


def _report_together(message: str, code: int, alone: str | None = None) -> int:
    """Print `message` once for all ranks that fail with it; when not all fail soon, print it and abort the job."""
    rank, size = mpi.place_in_world()
    alike = [0] if size == 1 else mpi.ranks_in_agreement(sha256(message.encode()).digest(), AGREEMENT_S)
    if alike is None:
        _print_line((alone or message).replace("{where}", f"rank {rank}: ", 1))
        _abort(code)
    elif rank == min(alike):
        where = "" if len(alike) == size else f"rank {rank}: "
        _print_line(message.replace("{where}", where, 1))
    return code


def _print_line(line: str) -> None:
    if line:
        sys.stdout.flush()
        sys.stderr.write(line + "\n")  # in one piece, so that ranks' lines don't mix
        sys.stderr.flush()


def _abort(code: int) -> None:
    """End every rank now; MPI's own remarks about that are not for the user."""
    sys.stdout.flush()
    sys.stderr.flush()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    mpi.abort(code)
