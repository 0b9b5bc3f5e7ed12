"""Shards: the flat space cut into units, each divided evenly between the ranks.

A unit is reduced or gathered as a whole. Every rank has a part of each, so that all ranks take part in every reduction
and in every gathering; a rank's parts of all units, one after another, are its shard. All offsets and sizes are bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.buckets import Bucket
from clcomm.base.flat_space.layout import FlatLayout
from clcomm.base.flat_space.parameters import ParameterRange


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
