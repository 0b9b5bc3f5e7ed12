"""The processes of a job's ranks on this host, and of their launcher, and their end."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from clcomm.job import restarts, worlds
from clcomm.job.exit_monitor_process import children_of

#: How long killed ranks may take to end.
KILLED_S = 5.0
#: A word of the ranks' command lines, and MPICH's files in /dev/shm in their maps.
_RANK, _WINDOW = b"clcomm.launch.rank", re.compile(r" (/dev/shm/mpich_shm_\w+)$", re.MULTILINE)


def kill_launcher(process: subprocess.Popen[bytes]) -> None:
    """Kill a launcher, and its children, which connect it with other hosts and would wait for a silent one for ever."""
    connections = children_of(process.pid, "") if process.poll() is None else []
    process.kill()
    for each in connections:
        with contextlib.suppress(OSError):
            os.kill(each, signal.SIGKILL)
    process.wait()


def kill_ranks(folder: Path, world: int | None = None) -> None:
    """Kill what lives of a world, None: of all worlds of a job, and wait until it has ended.

    It takes the memory with it that MPI leaves where a rank is killed within MPI_Init.

    Args:
        folder: the job's, CLCOMM_MEMORY.
    """
    windows: set[str] = set()
    with ExitStack() as opened:
        killed = []
        for process, handle in _processes(folder, world):
            opened.callback(os.close, handle)
            with contextlib.suppress(OSError):
                windows.update(_WINDOW.findall(Path(f"/proc/{process}/maps").read_text()))
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                killed.append(handle)
        until = time.monotonic() + KILLED_S
        for handle in killed:
            select.select([handle], [], [], max(0.0, until - time.monotonic()))
    for path in windows:
        Path(path).unlink(missing_ok=True)


def _processes(folder: Path, world: int | None) -> Iterator[tuple[int, int]]:
    """Yield the ranks that live, and what they have forked: process and descriptor."""
    own = {f"{worlds.MEMORY}={folder}".encode()}
    if world is not None:
        own.add(f"{restarts.RESTART}={world}".encode())
    for process in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            place = Path(f"/proc/{process}")
            is_rank = _RANK in (place / "cmdline").read_bytes().split(b"\0")
            if is_rank and own <= set((place / "environ").read_bytes().split(b"\0")):
                yield process, os.pidfd_open(process)
