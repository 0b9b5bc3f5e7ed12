"""A process that kills another one if it does not end in time: `start(pid, within_s)`, called when that one exits.

Open MPI's MPI_Finalize waits for all ranks, and occasionally its launcher misses a rank's death. Python's threads no
longer run at that point, so a separate process is needed: this file, run as a program with the standard library only.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys


def start(pid: int, within_s: float) -> None:
    """Start a process that kills `pid` unless it ends within `within_s` seconds; no-op without pidfds."""
    if not hasattr(os, "pidfd_open"):
        return
    subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(pid), str(within_s)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        cwd="/",
    ).returncode = 0  # it outlives this process; without a code Popen would warn that it still runs  # fmt: skip


def main(pid: int, within_s: float) -> None:
    """Wait for the process to end; kill it after `within_s` seconds."""
    handle = os.pidfd_open(pid)
    if not select.select([handle], [], [], within_s)[0]:
        signal.pidfd_send_signal(handle, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
