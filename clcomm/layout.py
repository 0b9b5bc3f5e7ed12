"""The flat space: where each parameter lies, what a bucket is, what a shard is.

All offsets and sizes are bytes. Pure bookkeeping: nothing here knows MPI or OpenCL.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from clcomm.buckets import Bucket, cut
from clcomm.errors import ArgumentError

#: Start of every parameter, in bytes: OpenCL sub-buffers need at most this on the devices known to us.
ALIGNMENT = 512


@dataclass(frozen=True)
class ParameterSpec:
    """A trainable parameter's name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """The parameter's own bytes, without padding."""
        return self.size * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Slot:
    """A parameter's place in the flat space: bytes [start, stop)."""

    spec: ParameterSpec
    start: int

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> str:
        return self.spec.dtype

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes

    @property
    def stop(self) -> int:
        return self.start + self.spec.nbytes


class FlatLayout:
    """Offsets of all parameters in one flat space.

    `specs` come in the model's order; the slots lie in the reverse of it, which is the order in which backward
    finishes gradients (last layer first). Each slot starts at a multiple of `alignment` bytes.

    Raises ArgumentError for a name used twice, an unknown dtype, or an alignment that is not a power of two.
    """

    def __init__(self, specs: Iterable[ParameterSpec], alignment: int = ALIGNMENT):
        if alignment < 16 or alignment & (alignment - 1):
            raise ArgumentError(f"alignment: expected a power of two of at least 16 bytes, got {alignment}")
        self.alignment = alignment
        self.specs = tuple(specs)
        _check_specs(self.specs)
        self.slots = self._place()
        self._by_name = {slot.name: slot for slot in self.slots}

    def _place(self) -> tuple[Slot, ...]:
        slots, offset = [], 0
        for spec in reversed(self.specs):
            slots.append(Slot(spec, offset))
            offset = self._align(offset + spec.nbytes)
        return tuple(slots)

    def _align(self, offset: int) -> int:
        return -(-offset // self.alignment) * self.alignment

    @cached_property
    def nbytes(self) -> int:
        """The parameters' own bytes, without padding."""
        return sum(slot.nbytes for slot in self.slots)

    @cached_property
    def span(self) -> int:
        """Bytes of the whole flat space, padding included; never zero."""
        return self._align(self.slots[-1].stop) if self.nbytes else self.alignment

    def slot(self, name: str) -> Slot:
        """Return the slot of a parameter by name; KeyError when there is none."""
        return self._by_name[name]

    def view(self, flat: np.ndarray, name: str) -> np.ndarray:
        """Return the parameter's array, in its own shape and dtype, as a view of the uint8 array `flat`."""
        slot = self._by_name[name]
        return flat[slot.start : slot.stop].view(slot.dtype).reshape(slot.shape)

    def buckets(
        self,
        bucket_size: int | None,
        *,
        first_bucket_size: int | None = None,
        split_tensors: bool = False,
        order: Sequence[str] = (),
    ) -> tuple[Bucket, ...]:
        """Cut the space into buckets of at most `bucket_size` of the parameters' own bytes; None: one per tensor.

        A larger tensor has a bucket of its own, or several with `split_tensors`; a bucket never mixes dtypes.
        first_bucket_size: that of the first bucket. order: names in the order in which backward completes gradients,
        the layout's unless given.
        """
        grain = self.alignment if split_tensors else None
        return cut(self.slots, bucket_size, first_bucket_size=first_bucket_size, split_grain=grain, order=order)

    def shard_nbytes(self, shards: int) -> int:
        """Return the bytes of each of `shards` equal parts that cover the span, multiples of the alignment."""
        return self._align(-(-self.span // shards))

    def signature(self) -> str:
        """Return a hash that two layouts share only if every name, shape, dtype and offset is the same."""
        text = "\n".join(f"{s.name} {s.shape} {s.dtype} {s.start}" for s in self.slots)
        return hashlib.sha256(text.encode()).hexdigest()


def shard_bounds(count: int, shards: int, multiple: int = 1) -> list[int]:
    """Return `shards + 1` ascending bounds that cut `count` elements evenly, at multiples of `multiple`.

    Shard r is [bounds[r], bounds[r + 1]); sizes differ by at most `multiple`, the last may be smaller.
    """
    blocks = -(-count // multiple)
    return [min(count, (blocks * r // shards) * multiple) for r in range(shards)] + [count]


def _check_specs(specs: Sequence[ParameterSpec]) -> None:
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise ArgumentError(f"parameters: expected different names, got {spec.name!r} twice")
        seen.add(spec.name)
        try:
            np.dtype(spec.dtype)
        except TypeError:
            raise ArgumentError(f"parameter {spec.name!r}: unknown dtype {spec.dtype!r}") from None
