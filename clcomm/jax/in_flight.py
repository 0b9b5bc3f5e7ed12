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
from clcomm.base.flat_space.buckets import Bucket
from clcomm.base.flat_space.layout import FlatLayout
from clcomm.base.host.arrays import BFLOAT16
from clcomm.comm.collectives.in_flight import Handle
from clcomm.comm.communicator import Communicator
from clcomm.jax.collectives import Collective, require_linear
from clcomm.jax.ffi import Kind
from clcomm.sync.adapters.adapter import CopyingAdapter, FlatArrays
from clcomm.sync.adapters.jax import narrow, spec_of, widen
from clcomm.sync.agreement import require_agreement
from clcomm.sync.bucket_plan import BucketPlan, PlanSettings

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
class _Half:
    """One of the two collectives of an all-reduce in flight."""

    of: AllReduced

    @property
    def op(self) -> str:
        """The reduction."""
        return self.of.op


@dataclass(frozen=True)
class Start(_Half):
    """Starts an all-reduce."""

    name = "all_reduce_async"

    def results(self, operands: Sequence[Any]) -> list[Kind]:
        return [_TICKET]

    def run(self, operands: list[np.ndarray], results: list[np.ndarray]) -> None:
        results[0][...] = _memory_of(self.of).start(operands[0]), 1

    def transposed(self) -> Collective:
        require_linear(self)
        return Wait(self.of)


@dataclass(frozen=True)
class Wait(_Half):
    """Waits for one."""

    name = "wait"

    def results(self, operands: Sequence[Any]) -> list[Kind]:
        return [(self.of.shape, self.of.dtype)]

    def run(self, operands: list[np.ndarray], results: list[np.ndarray]) -> None:
        number, one = operands[0].tolist()
        if number == one == 0:
            results[0].fill(0)
        else:
            _memory_of(self.of).finish(int(number) if one == 1 else -1, results[0])

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


# --- The mean of gradients in buckets, as the Synchronizer computes it, from JAX's arrays to new ones. ---


class GradientMean(CopyingAdapter):
    """The mean of arrays of these names, shapes and dtypes; its memory is allocated by the first call.

    Equal ones are one, so that programs share it. MismatchError on every rank where the ranks' differ.
    """

    name = "sync"

    def __init__(self, comm: Communicator, bucket_size: int, arrays: Sequence[tuple[str, Any]]):
        self._comm, self._bucket_size = comm, bucket_size
        self.layout = FlatLayout([spec_of(name, array, "gradient") for name, array in arrays])
        self._names = [name for name, _ in arrays]
        self._key = comm, bucket_size, tuple((name, each.shape, str(each.dtype)) for name, each in arrays)
        self._plan: BucketPlan | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GradientMean) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def results(self, operands: Sequence[Any]) -> list[Kind]:
        return [(each.shape, each.dtype) for each in operands]

    def transposed(self) -> Collective:
        return self

    def run(self, operands: list[np.ndarray], results: list[np.ndarray]) -> None:
        if self._plan is None:
            self._plan = self._planned()
        self._operands, self._results = (dict(zip(self._names, each, strict=True)) for each in (operands, results))
        self._plan.run()
        self._operands = self._results = {}

    def _planned(self) -> BucketPlan:
        comm, span = self._comm, self.layout.span
        lines = [f"{place.name} of shape {place.shape} and {place.dtype}" for place in self.layout.ranges]
        require_agreement(
            comm, "gradients", [*lines, f"buckets of {self._bucket_size} bytes"], "give all the same tree"
        )
        comm.fold_on_cpu()
        grads = comm.allocate(span)
        self.arrays = FlatArrays(np.empty(0, np.uint8), grads, grads if comm.size == 1 else comm.allocate_common(span))
        views = (self.arrays.grads, self.arrays.reduced)
        self._own, self._mean = ({n: self.layout.view(each, n) for n in self._names} for each in views)
        return BucketPlan.agreed(comm, self, PlanSettings(self._bucket_size), None)

    # --- what a BucketPlan needs ---

    @property
    def adapter(self) -> GradientMean:
        """The copies between arrays and flat memory."""
        return self

    def pull_gradients(self, bucket: Bucket) -> None:
        for place in bucket.opening:
            np.copyto(self._own[place.name], widen(self._operands[place.name]))

    def push_gradients(self, bucket: Bucket) -> None:
        for place in bucket.closing:
            result = self._results[place.name]
            np.copyto(result, narrow(self._mean[place.name], result.dtype))
