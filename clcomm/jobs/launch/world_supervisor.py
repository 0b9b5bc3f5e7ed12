"""`clcomm run --min-ranks 2 --max-ranks 8`: ranks that die are replaced, and their number can change, from memory.

One world of ranks trains, the next one is started meanwhile and waits at its gate. When a rank dies, or the world has
ended at a step's end because `clcomm run --resize` asks for another number, the next one goes on from the copy of the
state in the host's memory.
"""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from clcomm.base.errors import ArgumentError
from clcomm.base.storage.scratch import scratch_directory, scratch_file
from clcomm.comm.watch import restarts, worlds
from clcomm.comm.watch.endings import FAILURE
from clcomm.jobs.launch.hosts import STEADY_S, Hosts
from clcomm.jobs.launch.keeper import Keeper
from clcomm.jobs.launch.supervisor import (
    GRACE_S,
    LOOK_S,
    NOT_FOUND,
    End,
    Supervisor,
    at,
    end_of,
    print_notice,
    reason_to_stop,
)

#: Ends of a world at the same step, and starts that come to no step, after which something has to change.
SAME_STEP, NO_STEP = 3, 2
#: How often a next world that ends while it waits is started again.
MOST_WAITING = 3


class Sizes(NamedTuple):
    """The fewest and the most ranks of a job."""

    least: int
    most: int

    def check(self, option: str, ranks: int) -> None:
        """Raise ArgumentError for a number of ranks that is out of bounds."""
        bound = f"up to {self.most}" if ranks > self.most else f"from {self.least} up" if ranks < self.least else ""
        if bound:
            raise ArgumentError(f"{option}: expected a number of ranks {bound}, got {ranks}")


class WorldSupervisor(Supervisor):
    """Starts worlds of ranks, one after another.

    Args:
        hosts: those that the user names, if any.
        job: what is started on each rank.
        ranks: the number to begin with, and to come back to after starts with fewer.
        sizes: its bounds.
        allowed: the most restarts.
        pause_s: before a restart of a world that came to no step.
        keeps_next: whether the next world is started while one trains; not where hosts are named.
    """

    def __init__(
        self, hosts: Hosts, job: list[str], ranks: int, sizes: Sizes, allowed: int, pause_s: float, keeps_next: bool
    ):
        super().__init__([], allowed, pause_s)
        self._hosts, self._job, self._sizes, self._keeps_next = hosts, job, sizes, keeps_next and not hosts.names
        self._wanted = self._ranks = ranks
        self._started = 0
        self._no_step = 0  # starts in a row of this number of ranks that came to no step
        self._world: World | None = None
        self._next: World | None = None
        self._waiting_ended = 0
        self._words = -1

    def run(self, keeper: Keeper) -> int:
        with memory_directory(self._sizes, keeper) as folder:
            self._words = os.open(worlds.pipe(folder), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                self._hosts.open(folder, keeper.environment())
                too_few = self._fit()
                if too_few:
                    print_notice(f"not started: {too_few}")
                    return FAILURE
                return super().run(keeper)
            finally:
                os.close(self._words)
                if self._next is not None:
                    self._next.end()
                self._hosts.close()

    def _fit(self) -> str:
        """Let the next world have no more ranks than the hosts that answer; return in words that it has too few."""
        self._ranks = min(self._ranks, self._hosts.room(self._wanted))
        if self._ranks >= self._sizes.least:
            return ""
        left = ", ".join(self._hosts.left) or "none"
        return f"the hosts that answer ({left}) have room for {self._ranks} of the {self._sizes.least} --min-ranks"

    def _start(self, number: int) -> End:
        while True:
            try:
                world = self._world = self._next or self._new(self._ranks)
            except OSError as error:
                print_notice(f"{self._hosts.launch(self._ranks)[0]}: {error.strerror}")
                return End(NOT_FOUND, 0, 0)
            self._next, self._ranks, self._waiting_ended = None, world.ranks, 0
            world.release()
            self._process = world.process
            if self._signal:
                world.process.send_signal(self._signal)
            code = self._watched(world)
            self._process = self._world = None
            for line in self._hosts.end(world.number, kills=code != 0):
                self._hear(world, line)
            progress = world.progress
            world.end()
            if not (code or world.is_stopped or progress[restarts.COMPLETED] or self._has_its_hosts(world)):
                code = FAILURE  # launchers return 0 where a connection is lost
            if not world.is_stopped or code:
                return end_of(code, progress, self._signal)
            if self._signal:
                return end_of(128 + self._signal, progress)
            self._ranks = self._wanted
            if self._fit():
                return end_of(FAILURE, progress)
            print_notice(f"{world.ranks} ranks have ended at step {progress[restarts.SAVED]}, {self._ranks} go on")

    def _new(self, ranks: int) -> World:
        self._started += 1
        command = [*self._hosts.launch(ranks), *self._job]
        return World(command, ranks, self._started - 1, self._keeper, self._hosts.used(ranks))

    def _watched(self, world: World) -> int:
        """Return the exit code of a world when it has ended; meanwhile listen to ranks and users."""
        while True:
            handles = [world.handle, self._words, *([self._next.handle] if self._next else [])]
            found, _, _ = select.select([*handles, *self._hosts.descriptors], [], [], LOOK_S)
            if self._words in found:
                for line in os.read(self._words, 1 << 16).splitlines():
                    self._hear(world, line)
            for line in self._hosts.attend():
                self._hear(world, line)
            if world.handle in found:
                return self._ended(world.process)
            if not self._has_its_hosts(world):
                self._keeper.end(world.number, 0.0)  # the launcher would wait for a silent host for ever
                return self._ended(world.process)
            if self._next is not None and self._next.handle in found:
                self._waiting_has_ended(world)
            self._take_back(world)
            self._keeper.look()
            if self._signal and time.monotonic() >= self._signalled_s + GRACE_S:
                world.process.kill()

    def _take_back(self, world: World) -> None:
        """Let a world end at a step's end where hosts are back on which there is room for ranks that it lacks."""
        if world.is_asked or world.ranks >= self._wanted or not world.copied:
            return
        back = self._hosts.returned(world.hosts)
        if back and self._hosts.room(self._wanted) > world.ranks:
            print_notice(f"{', '.join(back)} answered for {STEADY_S:g} s; {world.ranks} ranks end at their next copy")
            self._ask_to_stop(world)

    def _has_its_hosts(self, world: World) -> bool:
        return world.hosts <= set(self._hosts.left)

    def _hear(self, world: World, line: bytes) -> None:
        said = worlds.read(line)
        if said is None:
            return  # any process of this user can write to the pipe
        word, number, value = said
        spoken = {each.number: each for each in (world, self._next) if each is not None}.get(number)
        if word == worlds.JOINED and spoken is not None:
            spoken.joined(value)
            if spoken is self._next and spoken.waits and spoken.ranks != world.ranks:
                self._ask_to_stop(world)
        elif word == worlds.COPIED and spoken is world:
            world.copied = max(world.copied, value)
            self._start_next(self._wanted)
        elif word == worlds.STOPPED and spoken is world:
            world.is_stopped = True
        elif word == worlds.RESIZE and self._sizes.least <= value <= self._sizes.most:
            self._resize(world, value)

    def _start_next(self, ranks: int) -> None:
        if self._keeps_next and self._next is None and not self._signal and self._waiting_ended < MOST_WAITING:
            try:
                self._next = self._new(ranks)
            except OSError as error:
                print_notice(f"the next {ranks} ranks cannot be started: {error.strerror}")
                self._waiting_ended = MOST_WAITING

    def _waiting_has_ended(self, world: World) -> None:
        """Start the next world again, which has ended before its turn; give up a resize to its number."""
        assert self._next is not None
        code, ranks = self._next.process.wait(), self._next.ranks
        self._next.end()
        self._next = None
        self._waiting_ended += 1
        if ranks != world.ranks and self._waiting_ended >= MOST_WAITING:
            print_notice(f"{ranks} ranks cannot be started, exit code {code}; going on with {world.ranks}")
            self._wanted, self._waiting_ended = world.ranks, 0
        self._start_next(self._wanted)

    def _resize(self, world: World, ranks: int) -> None:
        self._wanted, self._waiting_ended = ranks, 0
        if self._next is not None and self._next.ranks != ranks:
            self._next.end()
            self._next = None
        if ranks != world.ranks and not self._keeps_next:
            self._ask_to_stop(world)
        self._start_next(ranks)

    def _ask_to_stop(self, world: World) -> None:
        world.ask_to_stop()
        self._hosts.ask_to_stop(world.number)

    def _reason(self, ends: list[End]) -> str:
        """Return the reason to give up; "": none. Choose the number of ranks of the next start."""
        reason = reason_to_stop(ends, self._allowed, SAME_STEP)
        self._no_step = 0 if ends[-1].step else self._no_step + 1
        if self._no_step < NO_STEP:
            self._ranks = self._ranks if self._no_step else self._wanted
        elif not reason:
            self._no_step, self._ranks = 0, self._ranks - 1
            if self._ranks < self._sizes.least:
                return f"{self._sizes.least} ranks, the fewest of --min-ranks, came to no step"
        reason = reason or self._fit()
        if self._next is not None and (reason or self._next.ranks != self._ranks):
            self._next.end()
            self._next = None
        return reason

    def _pause(self, ends: list[End]) -> None:
        last = ends[-1]
        source = f"step {last.saved}" if last.saved else "the start or the newest checkpoint"
        are_ready = self._next is not None and self._next.waits
        print_notice(
            f"exit code {last.code}{at(last)}; going on from {source} with {self._ranks} ranks"
            f"{', which are ready' if are_ready else ''} (restart {len(ends)})"
        )
        self._was_signalled.wait(0.0 if last.step else self._pause_s)


@contextmanager
def memory_directory(sizes: Sizes, keeper: Keeper) -> Iterator[Path]:
    """Make the directory of a job in /dev/shm, and remove it at the end."""
    with scratch_directory("memory", keeper.memory) as folder:
        os.mkfifo(worlds.pipe(folder), 0o600)
        worlds.describe(folder, *sizes)
        yield folder


# --- A world: the ranks of one start of a job that `clcomm run --min-ranks` keeps going. ---


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
        """End what is left of it: a launcher that is killed alone leaves ranks, and what they were about to remove."""
        if self.process.poll() != 0:
            self._keeper.end(self.number, 0.0)
        self.process.kill()  # in case the keeper could not
        self.process.wait()
        worlds.stop_sign(self._folder, self.number).unlink(missing_ok=True)
        self._resources.close()
