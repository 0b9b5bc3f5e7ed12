"""A world: the ranks of one start of a job that `clcomm run --min-ranks` keeps going."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from pathlib import Path

from clcomm.base.storage.scratch import scratch_file
from clcomm.comm.watch import restarts, worlds
from clcomm.jobs.launch.keeper import Keeper


class World:
    """Ranks that are started, and wait at their gate until `release`.

    Attributes:
        ranks: their number.
        number: that of the start, from 0.
        process: the launcher's.
        handle: a descriptor that is readable when the launcher has ended.
        is_asked, is_stopped: whether the ranks were asked to end, and whether they have therefore.
        hosts: the names of those on which it has ranks, where they are named.
        copied: the step of the newest copy that a rank told of.

    Raises OSError where the launcher cannot be started.
    """

    def __init__(self, command: list[str], ranks: int, number: int, keeper: Keeper, hosts: set[str]):
        self.ranks, self.number, self._folder, self._keeper = ranks, number, keeper.memory, keeper
        self.hosts, self.is_asked, self.is_stopped, self.copied = hosts, False, False, 0
        self._at_gate: set[int] = set()
        with ExitStack() as stack:
            self._progress = scratch_file(keeper.folder / f"progress-{number}", bytes(restarts.FILE_BYTES))
            stack.callback(Path(self._progress).unlink, missing_ok=True)
            os.mkfifo(self._gate, 0o600)
            stack.callback(self._gate.unlink, missing_ok=True)
            self._opened = os.open(self._gate, os.O_RDWR | os.O_CLOEXEC)  # both ends: opening it never blocks
            stack.callback(os.close, self._opened)
            environment = {restarts.PROGRESS: self._progress, worlds.MEMORY: str(self._folder)}
            spare = os.dup(self._opened)  # for the process's: without it nobody would end what is started
            try:
                self.process = subprocess.Popen(command, env={**keeper.environment(number), **environment})
            finally:
                os.close(spare)
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
        """The words of its progress file, to which ranks of other hosts cannot write."""
        words = restarts.read_progress(self._progress)
        for word in (restarts.STEP, restarts.SAVED):
            words[word] = max(words[word], self.copied)
        return words

    def joined(self, process: int) -> None:
        """Note a rank that has come to the gate."""
        self._at_gate.add(process)

    def release(self) -> None:
        """Open the gate, also to ranks that come to it later."""
        os.write(self._opened, bytes(self.ranks))
        self._gate.unlink(missing_ok=True)

    def ask_to_stop(self) -> None:
        """Let the ranks end at the end of the next step whose state is copied."""
        self.is_asked = True
        worlds.stop_sign(self._folder, self.number).touch()

    def end(self) -> None:
        """End what is left of it: a launcher that was killed leaves ranks for some seconds."""
        if self.process.poll() is None:
            self.process.kill()
        if self.process.wait():
            self._keeper.end(self.number, 0.0)
        worlds.stop_sign(self._folder, self.number).unlink(missing_ok=True)
        self._resources.close()
