"""All-reduces in the background: one collective starts each, another waits for it, and backward does so in turn.

XLA lends its memory for the time of a call only, so that a started all-reduce has memory of its own, which it is copied
to and from. What runs between the two has only two numbers of it. They stand for an array, linearly: the gradient of a
wait is started where backward comes by it, and waited for where the forward start was. Zeros stand for zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.host.bfloat16 import BFLOAT16
from clcomm.comm.collectives.in_flight import Handle
from clcomm.comm.communicator import Communicator
from clcomm.jax.collectives import require_linear
from clcomm.jax.ffi import Kind
from clcomm.jax.primitive import Collective

#: float32 has so many whole numbers.
_NUMBERS = 1 << 24
#: The number of an all-reduce, and a one: what was added up or scaled has another number there.
_TICKET: Kind = ((2,), np.dtype(np.float32))


@dataclass(frozen=True)
class AllReduced:
    """Arrays of which one kind of all-reduce is in flight."""

    comm: Communicator
    op: str
    shape: tuple[int, ...]
    dtype: np.dtype


@dataclass(frozen=True)
class Start:
    """Starts an all-reduce."""

    of: AllReduced
    name = "all_reduce_async"

    def results(self, operands: Sequence[Any]) -> list[Kind]:
        return [_TICKET]

    def run(self, operands: list[np.ndarray], results: list[np.ndarray]) -> None:
        results[0][...] = _memory_of(self.of).start(operands[0]), 1

    @property
    def op(self) -> str:
        """The reduction."""
        return self.of.op

    def transposed(self) -> Collective:
        require_linear(self)
        return Wait(self.of)


@dataclass(frozen=True)
class Wait:
    """Waits for one."""

    of: AllReduced
    name = "wait"

    def results(self, operands: Sequence[Any]) -> list[Kind]:
        return [(self.of.shape, self.of.dtype)]

    def run(self, operands: list[np.ndarray], results: list[np.ndarray]) -> None:
        number, one = operands[0].tolist()
        if number == one == 0:
            results[0].fill(0)
        else:
            _memory_of(self.of).finish(int(number) if one == 1 else -1, results[0])

    @property
    def op(self) -> str:
        """The reduction."""
        return self.of.op

    def transposed(self) -> Collective:
        require_linear(self)
        return Start(self.of)


class _Slot(NamedTuple):
    """Memory of one all-reduce, which starts in it again and again."""

    own: np.ndarray
    reduced: np.ndarray
    start: Callable[..., Handle]


@dataclass
class _Memory:
    """The slots of a kind of all-reduce, as many as were ever in flight at a time; the same on every rank."""

    of: AllReduced
    _free: list[_Slot] = field(default_factory=list)
    _flying: dict[int, tuple[_Slot, Handle]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=count)

    def start(self, values: np.ndarray) -> int:
        """Start an all-reduce, and return its number."""
        slot = self._free.pop() if self._free else self._made()
        np.copyto(slot.own, values)
        number = next(self._numbers) % _NUMBERS
        self._flying[number] = slot, slot.start()
        return number

    def finish(self, number: int, out: np.ndarray) -> None:
        """Wait for an all-reduce, and copy its result."""
        if number not in self._flying:
            raise ArgumentError(
                "wait: expected a handle of all_reduce_async that is in flight, got one that was waited for; call "
                "wait() once, in the program or a later one"
            )
        slot, handle = self._flying.pop(number)
        handle.wait()
        np.copyto(out, slot.reduced)
        self._free.append(slot)

    def _made(self) -> _Slot:
        comm, shape = self.of.comm, self.of.shape
        dtype = BFLOAT16 if self.of.dtype.name == "bfloat16" else self.of.dtype
        nbytes = math.prod(shape) * dtype.itemsize
        own, reduced = (
            memory(max(nbytes, 1))[:nbytes].view(dtype).reshape(shape)
            for memory in (comm.allocate, comm.allocate_common if comm.size > 1 else comm.allocate)
        )
        return _Slot(own, reduced, comm.all_reduce_async_init(own, self.of.op, out=reduced))


_memory_of = cache(_Memory)
