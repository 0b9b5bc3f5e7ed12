"""The layout of the flat space: the place of each parameter, and how the space is cut into buckets and shards.

All offsets and sizes are bytes; nothing here needs MPI or OpenCL.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.buckets import Bucket, cut
from clcomm.base.flat_space.parameters import ParameterRange, ParameterSpec

#: Every parameter starts at a multiple of this many bytes: no known device requires more of an OpenCL sub-buffer.
ALIGNMENT = 512


class FlatLayout:
    """Offsets of all parameters in one flat space.

    The ranges are in the reverse of the model's order, which is the order in which backward completes gradients (last
    layer first).

    Args:
        specs: the parameters, in the model's order.
        alignment: each range starts at a multiple of this many bytes.

    Raises:
        ArgumentError: a name occurs twice, a dtype is unknown, or the alignment is below 16 or not a power of two.
    """

    def __init__(self, specs: Iterable[ParameterSpec], alignment: int = ALIGNMENT):
        if alignment < 16 or alignment & (alignment - 1):
            raise ArgumentError(f"alignment: expected a power of two of at least 16 bytes, got {alignment}")
        self.alignment = alignment
        self.specs = tuple(specs)
        _check_specs(self.specs)
        self.ranges = self._place()
        self._by_name = {place.name: place for place in self.ranges}

    def _place(self) -> tuple[ParameterRange, ...]:
        ranges, offset = [], 0
        for spec in reversed(self.specs):
            ranges.append(ParameterRange(spec, offset))
            offset = self._align(offset + spec.nbytes)
        return tuple(ranges)

    def _align(self, offset: int) -> int:
        return -(-offset // self.alignment) * self.alignment

    @cached_property
    def nbytes(self) -> int:
        """The parameters' own bytes, without padding."""
        return sum(place.nbytes for place in self.ranges)

    @cached_property
    def span(self) -> int:
        """Bytes of the whole flat space, padding included; never zero."""
        return self._align(self.ranges[-1].stop) if self.nbytes else self.alignment

    def view(self, flat: np.ndarray, name: str) -> np.ndarray:
        """Return the parameter's array, in its own shape and dtype, as a view of the uint8 array `flat`."""
        place = self._by_name[name]
        return flat[place.start : place.stop].view(place.dtype).reshape(place.shape)

    def checksums(self, flat: np.ndarray) -> dict[str, int]:
        """Return the CRC-32 of each parameter's part of the uint8 array `flat`, last layer first."""
        return {place.name: zlib.crc32(flat[place.start : place.stop].data) for place in self.ranges}

    def buckets(
        self,
        bucket_size: int | None,
        *,
        first_bucket_size: int | None = None,
        split_tensors: bool = False,
        order: Sequence[str] = (),
    ) -> tuple[Bucket, ...]:
        """Cut the space into buckets; see `clcomm.base.flat_space.buckets.cut`.

        Args:
            bucket_size: the most bytes of parameters in a bucket; None: a bucket for each tensor.
            first_bucket_size: that of the first bucket.
            split_tensors: whether a larger tensor is split into several buckets, or has one of its own.
            order: names in the order in which backward completes gradients, by default the layout's; parameters that
                are not in it come last.
        """
        grain = self.alignment if split_tensors else None
        return cut(self.ranges, bucket_size, first_bucket_size=first_bucket_size, split_grain=grain, order=order)

    def shard_nbytes(self, shards: int) -> int:
        """Return the bytes of each of `shards` equal parts that cover the span, multiples of the alignment."""
        return self._align(-(-self.span // shards))

    def signature(self) -> str:
        """Return a hash of every name, shape, dtype and offset."""
        text = "\n".join(f"{s.name} {s.shape} {s.dtype} {s.start}" for s in self.ranges)
        return hashlib.sha256(text.encode()).hexdigest()


def shard_bounds(count: int, shards: int, multiple: int = 1) -> list[int]:
    """Return `shards + 1` ascending bounds that cut `count` elements evenly, at multiples of `multiple`.

    Shard r is [bounds[r], bounds[r + 1]). Sizes differ by at most `multiple`; the last one may be smaller still.
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
