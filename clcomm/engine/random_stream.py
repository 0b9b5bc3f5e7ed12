"""Counter-based random numbers on a device: each use takes a ticket, which with an element's index decides its number.

The counter of uses lies on the device, so that replayed steps draw fresh numbers too. The numbers do not depend on the
device or its number of cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar
from weakref import WeakSet

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.host.launcher import launched_rank
from clcomm.engine.device import Device
from clcomm.engine.tensor import INT32, Tensor, copy_into, empty

#: Words of a state: the seed's low and high one, the rank, and the low and high one of the number of uses so far.
STATE_WORDS, RANK_WORD = 5, 2


class RandomStream:
    """A device's random numbers; `RandomStream.of(device)` is the one that dropout uses.

    Streams of other seeds, and of other ranks, have other numbers.

    Args:
        rank: distinguishes streams of one seed; None: the launcher's rank, else 0.
    """

    _seed: ClassVar[int] = 0  # of new streams
    _all: ClassVar[WeakSet[RandomStream]] = WeakSet()

    def __init__(self, device: Device, rank: int | None = None):
        self._rank = rank
        self._shard: int | None = None  # whose numbers are drawn, of a rank's logical shards
        self._first: np.ndarray | None = None  # the state before any shard's
        self._of_shards: dict[int, np.ndarray] = {}
        recorder, device.recorder = device.recorder, None  # a replay needs no upload: the state stays
        try:
            self._state = Tensor(np.zeros(STATE_WORDS, np.int32), device)
            self.seed(self._seed)
        finally:
            device.recorder = recorder
        self._all.add(self)

    @staticmethod
    def of(device: Device) -> RandomStream:
        """Return a device's stream, which begins with the seed of the latest `seed_all`."""
        if device.random_stream is None:
            device.random_stream = RandomStream(device)
        stream: RandomStream = device.random_stream
        return stream

    @classmethod
    def seed_all(cls, seed: int) -> None:
        """Seed all streams of this process, those that will be made included."""
        cls._seed = seed
        for stream in tuple(cls._all):
            stream.seed(seed)

    def seed(self, seed: int, rank: int | None = None) -> None:
        """Restart with a seed, a whole number of which the low 64 bits count.

        Args:
            rank: from 0 up; each rank draws other numbers. None: the stream's own.

        Raises ArgumentError for anything else.
        """
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise ArgumentError(f"seed: expected a whole number, got {seed!r}")
        own = (launched_rank() or 0 if self._rank is None else self._rank) if rank is None else rank
        if not isinstance(own, int) or not 0 <= own < 1 << 32:
            raise ArgumentError(f"rank: expected a whole number from 0 up, got {rank!r}")
        self.load(np.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, own, 0, 0], np.uint32))

    def stand_for(self, rank: int) -> None:
        """Draw another rank's numbers from now on, also after further seeds; the number of uses stays."""
        self._rank = rank
        self.load(self.state_of(rank, self.state()))

    def state_of(self, rank: int, state: np.ndarray) -> np.ndarray:
        """Return the state of another rank's stream of the same seed, after as many uses."""
        state = state.copy()
        state[RANK_WORD] = rank
        return state

    def __deepcopy__(self, memo: dict[int, object]) -> RandomStream:
        return self

    def ticket(self) -> Tensor:
        """Queue a copy of the state for one use, and the state's advance; return the copy."""
        device, ticket = self._state.device, empty(self._state.device, (STATE_WORDS,), INT32)
        device.launch(device.kernel("dropout", "draw_ticket"), *device.grid(1), ticket, self._state)
        return ticket

    def state(self) -> np.ndarray:
        """Return the state, uint32 (STATE_WORDS,); waits for the queue."""
        words = np.empty(STATE_WORDS, np.uint32)
        self._state.device.read(self._state.buffer, words)  # numpy() would raise here what a loss of one rank has noted
        return words

    def turn_to(self, shard: int) -> None:
        """Draw a logical shard's numbers, which are those of the rank of this number, and go on where it ended."""
        if shard == self._shard:
            return
        state = self.state()
        if self._shard is None or self._first is None:
            self._first = state
        else:
            self._of_shards[self._shard] = state
        self._write(self._of_shards.get(shard, self.state_of(shard, self._first)))
        self._shard = shard

    def of_shard(self, shard: int) -> np.ndarray | None:
        """Return the state of a logical shard's numbers; None: it has drawn none here."""
        return self.state() if shard == self._shard else self._of_shards.get(shard)

    def load_shard(self, shard: int, state: np.ndarray) -> None:
        """Let a logical shard go on from a state that `of_shard` returned, of the same seed."""
        if shard == self._shard:
            self._write(state)
        else:
            self._of_shards[shard] = state

    @classmethod
    @contextmanager
    def as_at(cls, states: Mapping[RandomStream, Tensor]) -> Iterator[None]:
        """Return a block in which streams draw as from these `copies`; after it their own numbers go on. Queued."""
        now = {stream: stream.copied() for stream in states}
        for stream, state in states.items():
            copy_into(stream._state, state)
        try:
            yield
        finally:
            for stream, state in now.items():
                copy_into(stream._state, state)

    @classmethod
    def copies(cls, device: Device) -> dict[RandomStream, Tensor]:
        """Queue a copy of the state of each of a device's streams."""
        RandomStream.of(device)
        return {stream: stream.copied() for stream in tuple(cls._all) if stream._state.device is device}

    def copied(self) -> Tensor:
        """Queue a copy of the state."""
        copy_into(copy := empty(self._state.device, (STATE_WORDS,), INT32), self._state)
        return copy

    @contextmanager
    def lent(self) -> Iterator[Callable[[np.ndarray], None]]:
        """Return a block with a function that lets a `state` be drawn from; after the block its own numbers go on."""
        own = self.state()
        try:
            yield self._write
        finally:
            self._write(own)

    def load(self, state: np.ndarray) -> None:
        """Restore a `state`, from which all logical shards go on; raises ArgumentError for anything else."""
        if state.shape != (STATE_WORDS,) or state.dtype != np.uint32:
            raise ArgumentError(f"state: expected {STATE_WORDS} uint32, got {state.dtype} of shape {state.shape}")
        self._shard = None
        self._of_shards.clear()
        self._write(state)

    def _write(self, state: np.ndarray) -> None:
        self._state.copy_from(state.view(np.int32))
