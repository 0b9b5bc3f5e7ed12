"""The forced end of a process whose exit MPI or a thread blocks: by a timer, with the exit code, then by SIGKILL."""

from __future__ import annotations

import contextlib
import os
import threading

from clcomm.job import forced_end
from clcomm.job.endings import shell_code
from clcomm.job.job import this_job
from clcomm.transport import mpi_runtime

#: How long the end of a failed rank may take if MPI blocks.
LAST_RESORT_S = 8.0
#: How long before SIGKILL the timer ends the process with the right exit code.
TIMERS_LEAD_S = 1.0


def end_by_force_later(code: int) -> None:
    """End this process by force after LAST_RESORT_S: MPI may wait for ranks that never started it.

    A timer's thread can keep the exit code, but no longer runs once Python has ended and MPI_Finalize waits; a second
    process then sends SIGKILL.
    """
    timer = threading.Timer(LAST_RESORT_S, _end_by_force, (code,))
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # too late for a thread, or one too many
        timer.start()
    with contextlib.suppress(OSError):
        forced_end.start(os.getpid(), LAST_RESORT_S + TIMERS_LEAD_S)


def _end_by_force(code: int) -> None:
    """End this process and, if MPI has not started, the launcher's other ranks on this host.

    Launchers ignore a rank that exits before MPI has started, so they would leave a stopped rank behind.
    """
    if not mpi_runtime.is_running() and mpi_runtime.launched_ranks() > 1:
        this_job().record.end_siblings()
    os._exit(shell_code(code))
