"""The layout of the flat space: the place of each parameter, and how the space is cut into buckets and shards.

All offsets and sizes are bytes; nothing here needs MPI or OpenCL.
"""

from __future__ import annotations

import hashlib
import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

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


# --- Checks that a model's trained parameters remain those laid out in the flat space. ---

_REMEDY = "make a new Synchronizer after freezing or unfreezing"
_REPLACED_REMEDY = "make a new Synchronizer (and optimizer) after load_state_dict(assign=True) or replacing a layer"


def require_same_trainable(now: Iterable[str], before: Iterable[str], remedy: str = _REMEDY) -> None:
    """Raise ArgumentError where the set of names that need gradients has changed."""
    changed = sorted(set(now) ^ set(before))
    if changed:
        raise ArgumentError(
            f"parameter {changed[0]!r}: expected requires_grad to stay as it was at the first synchronisation, "
            f"got it changed; {remedy}"
        )


def require_same_parameters(
    now: Mapping[str, object],
    before: Mapping[str, object],
    expected: str = "the tensor of the first synchronisation",
    remedy: str = _REPLACED_REMEDY,
) -> None:
    """Raise ArgumentError where parameters were added, removed or replaced; expected: describes one of `before`."""
    for name in [*before, *now]:
        if now.get(name) is not before.get(name):
            got = "none" if name not in now else "another" if name in before else "a new one"
            wanted = expected if name in before else "none"
            raise ArgumentError(f"parameter {name!r}: expected {wanted}, got {got} in its place; {remedy}")


# --- Shards: the flat space cut into units, each divided evenly between the ranks. ---
# A unit is reduced or gathered as a whole. Every rank has a part of each, so that all ranks take part in every
# reduction and in every gathering; a rank's parts of all units, one after another, are its shard. All offsets and sizes
# are bytes.


class ShardPart(NamedTuple):
    """Bytes [start, stop) of the flat space, which begin at `offset` in the shard of the rank that has them."""

    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Unit:
    """Neighbouring parameters, with all padding up to the next unit: bytes [start, stop) of the flat space.

    bucket: the same without that padding. part_nbytes: of each rank's part, a multiple of the alignment; the last parts
    may reach beyond the unit. offset: of this unit's part in a shard.
    """

    bucket: Bucket
    stop: int
    part_nbytes: int
    offset: int

    @property
    def index(self) -> int:
        """Its position among the units."""
        return self.bucket.index

    @property
    def ranges(self) -> tuple[ParameterRange, ...]:
        """Its parameters."""
        return self.bucket.ranges

    @property
    def start(self) -> int:
        """Where it begins."""
        return self.bucket.start

    @property
    def nbytes(self) -> int:
        """Bytes of the unit, padding included."""
        return self.stop - self.start

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of the padding within the unit, as offsets in it."""
        starts = [*(place.start for place in self.ranges[1:]), self.stop]
        for place, following in zip(self.ranges, starts, strict=True):
            if place.stop < following:
                yield place.stop - self.start, following - self.start


class ShardPlan:
    """The units of a layout, and each rank's shard.

    Args:
        layout: that of the flat space.
        ranks: between which each unit is divided.
        bucket_size: the most bytes of parameters in a unit; None: a unit for each tensor.
        first_bucket_size: that of the first unit.

    Raises ArgumentError for parameters other than float32.
    """

    def __init__(self, layout: FlatLayout, ranks: int, bucket_size: int | None, first_bucket_size: int | None = None):
        other = next((place for place in layout.ranges if place.dtype != "float32"), None)
        if other is not None:
            raise ArgumentError(f"parameter {other.name!r}: expected float32 to be sharded, got {other.dtype}")
        self.layout, self.ranks = layout, ranks
        buckets = layout.buckets(bucket_size, first_bucket_size=first_bucket_size)
        bounds = [*(bucket.start for bucket in buckets), layout.span]
        units, offset = [], 0
        for bucket, (start, stop) in zip(buckets, itertools.pairwise(bounds), strict=True):
            part = -(-(stop - start) // (ranks * layout.alignment)) * layout.alignment
            units.append(Unit(bucket, stop, part, offset))
            offset += part
        self.units = tuple(units)
        #: Bytes of a shard, the same for every rank.
        self.shard_nbytes = offset

    @property
    def largest(self) -> int:
        """Bytes of the largest unit, padding included."""
        return max(unit.nbytes for unit in self.units)

    @property
    def largest_part(self) -> int:
        """Bytes of the largest part of a unit."""
        return max(unit.part_nbytes for unit in self.units)

    def parts(self, rank: int) -> tuple[ShardPart, ...]:
        """Return a rank's parts of the flat space, those without any byte left out."""
        found = []
        for unit in self.units:
            start = unit.start + rank * unit.part_nbytes
            stop = min(start + unit.part_nbytes, unit.stop)
            if start < stop:
                found.append(ShardPart(start, stop, unit.offset))
        return tuple(found)

    def merged(self, shards: Sequence[np.ndarray]) -> np.ndarray:
        """Return the whole flat space from all ranks' shards, arrays of one dtype, in rank order."""
        itemsize = shards[0].itemsize
        whole = np.zeros(self.layout.span // itemsize, shards[0].dtype)
        for rank, shard in enumerate(shards):
            for part in self.parts(rank):
                start, stop, offset = (value // itemsize for value in part)
                whole[start:stop] = shard[offset : offset + stop - start]
        return whole
