"""The forced end of a process whose exit MPI or a thread blocks: by a timer, with the exit code, then by SIGKILL.

Open MPI's MPI_Finalize waits for all ranks, and occasionally its launcher misses a rank's death. Python's threads no
longer run at that point, so SIGKILL comes from a separate process: this file, run as a program with the standard
library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

#: How long the end of a failed rank may take if MPI blocks.
LAST_RESORT_S = 8.0
#: How long before SIGKILL the timer ends the process with the right exit code.
TIMERS_LEAD_S = 1.0


def end_by_force_later(code: int) -> None:
    """End this process by force after LAST_RESORT_S: MPI may wait for ranks that never started it."""
    timer = threading.Timer(LAST_RESORT_S, _end_by_force, (code,))
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # too late for a thread, or one too many
        timer.start()
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: a system without pidfds
        handle = os.pidfd_open(os.getpid())
        try:
            start_killer(handle, LAST_RESORT_S + TIMERS_LEAD_S)
        finally:
            os.close(handle)


def _end_by_force(code: int) -> None:
    """End this process and, if MPI has not started, the launcher's other ranks on this host.

    Launchers ignore a rank that exits before MPI has started, so they would leave a stopped rank behind.
    """
    from clcomm.comm.transport import mpi_runtime
    from clcomm.comm.watch.endings import shell_code  # here, as the program imports nothing
    from clcomm.comm.watch.job import this_job

    if not mpi_runtime.is_running() and mpi_runtime.launched_ranks() > 1:
        this_job().record.end_siblings()
    os._exit(shell_code(code))


def start_killer(handle: int, within_s: float) -> None:
    """Start a process that kills the process with this pidfd unless it ends within `within_s` seconds."""
    start_helper(__file__, handle, within_s, descriptors=[handle], stderr=subprocess.DEVNULL)


def start_helper(script: str, *arguments: object, descriptors: Sequence[int], stderr: int | None = None) -> None:
    """Start a program of the standard library alone that outlives this process, with these descriptors."""
    subprocess.Popen(
        [sys.executable, "-I", "-S", script, *map(str, arguments)], pass_fds=descriptors, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True, cwd="/",
    ).returncode = 0  # it outlives this process; without a code Popen would warn that it still runs  # fmt: skip


def main(handle: int, within_s: float) -> None:
    """Wait for the process to end; kill it after `within_s` seconds."""
    if not select.select([handle], [], [], within_s)[0]:
        signal.pidfd_send_signal(handle, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
