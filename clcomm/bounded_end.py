"""Ends a process that does not end by itself: `start(pid, within_s)`, when that is on its last way out.

Open MPI's MPI_Finalize waits for all ranks, and now and then its launcher forgets that one has died. Python's threads
cannot help then, so it takes a process: this file, run as a program with the standard library only.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys


def start(pid: int, within_s: float) -> None:
    """Let the process be killed unless it has ended after so many seconds; where Linux cannot, nothing happens."""
    if not hasattr(os, "pidfd_open"):
        return
    subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(pid), str(within_s)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        cwd="/",
    ).returncode = 0  # not ours to wait for: it ends with us, or us  # fmt: skip


def main(pid: int, within_s: float) -> None:
    """Wait for the process's end, and no longer than that."""
    handle = os.pidfd_open(pid)
    if not select.select([handle], [], [], within_s)[0]:
        signal.pidfd_send_signal(handle, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
