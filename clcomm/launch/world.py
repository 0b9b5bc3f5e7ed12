"""A world: the ranks of one start of a job that `clcomm run --min-ranks` keeps going."""

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
from clcomm.storage.scratch import scratch_file

#: How long killed ranks may take to end.
KILLED_S = 5.0
#: A word of the ranks' command lines, and MPICH's files in /dev/shm in their maps.
_RANK, _WINDOW = b"clcomm.launch.rank", re.compile(r" (/dev/shm/mpich_shm_\w+)$", re.MULTILINE)


class World:
    """Ranks that are started, and wait at their gate until `release`.

    Attributes:
        ranks: their number.
        number: that of the start, from 0.
        process: the launcher's.
        handle: a descriptor that is readable when the launcher has ended.
        is_stopped: whether the ranks have ended because they were asked to.

    Raises OSError where the launcher cannot be started.
    """

    def __init__(self, command: list[str], ranks: int, number: int, folder: Path):
        self.ranks, self.number, self._folder = ranks, number, folder
        self.is_stopped = False
        self._at_gate: set[int] = set()
        with ExitStack() as stack:
            self._progress = stack.enter_context(scratch_file("run", bytes(restarts.FILE_BYTES))).name
            os.mkfifo(self._gate, 0o600)
            stack.callback(self._gate.unlink, missing_ok=True)
            self._opened = os.open(self._gate, os.O_RDWR | os.O_CLOEXEC)  # both ends: opening it never blocks
            stack.callback(os.close, self._opened)
            environment = {restarts.RESTART: str(number), restarts.PROGRESS: self._progress}
            self.process = subprocess.Popen(command, env={**os.environ, **environment, worlds.MEMORY: str(folder)})
            self.handle = os.pidfd_open(self.process.pid)
            stack.callback(os.close, self.handle)
            self._resources = stack.pop_all()

    @property
    def _gate(self) -> Path:
        return worlds.gate(self._folder, self.number)

    @property
    def waits(self) -> bool:
        """Whether all ranks have come to the gate."""
        return len(self._at_gate) >= self.ranks

    @property
    def progress(self) -> list[int]:
        """The words of its progress file."""
        return restarts.read_progress(self._progress)

    def joined(self, process: int) -> None:
        """Note a rank that has come to the gate."""
        self._at_gate.add(process)

    def release(self) -> None:
        """Open the gate, also to ranks that come to it later."""
        os.write(self._opened, bytes(self.ranks))
        self._gate.unlink(missing_ok=True)

    def ask_to_stop(self) -> None:
        """Let the ranks end at the end of the next step whose state is copied."""
        worlds.stop_sign(self._folder, self.number).touch()

    def end(self) -> None:
        """End what is left of it, with the memory that MPI leaves where a rank is killed within MPI_Init."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.returncode:
            self._kill_ranks()  # a launcher that was killed leaves them for some seconds
        worlds.stop_sign(self._folder, self.number).unlink(missing_ok=True)
        self._resources.close()

    def _kill_ranks(self) -> None:
        windows: set[str] = set()
        with ExitStack() as opened:
            killed = []
            for process, handle in self._processes():
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

    def _processes(self) -> Iterator[tuple[int, int]]:
        """Yield this world's ranks that live, and what they have forked: process and descriptor."""
        own = {f"{worlds.MEMORY}={self._folder}".encode(), f"{restarts.RESTART}={self.number}".encode()}
        for process in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                place = Path(f"/proc/{process}")
                is_rank = _RANK in (place / "cmdline").read_bytes().split(b"\0")
                if is_rank and own <= set((place / "environ").read_bytes().split(b"\0")):
                    yield process, os.pidfd_open(process)
