"""Buckets: ranges of the flat space that are reduced together, and how a space is cut into them.

All offsets and sizes are bytes. Backward completes gradients roughly in the layout's order; where it does not, the cut
follows the order that was observed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from clcomm.base.flat_space.parameters import Beginnings, ParameterRange

#: A bucket may be complete this many positions later than in the layout; beyond that the cut follows the observed
#: order. A layer's backward may complete its weight before its bias, and the same kernels compute both.
_TOLERATED_DELAY = 1


@dataclass(frozen=True)
class Bucket:
    """Neighbouring parameters, or a part of one, that are reduced together: bytes [start, stop) of the flat space.

    It may also contain padding, which is zero on every rank. `ranges` are those of whole parameters, even if one is
    split over several buckets.
    """

    index: int
    ranges: tuple[ParameterRange, ...]
    start: int
    stop: int

    @cached_property
    def nbytes(self) -> int:
        """The parameters' own bytes in the range, without padding."""
        return sum(min(self.stop, place.stop) - max(self.start, place.start) for place in self.ranges)

    @property
    def dtype(self) -> str:
        """The dtype of all of its parameters."""
        return self.ranges[0].dtype

    @cached_property
    def opening(self) -> tuple[ParameterRange, ...]:
        """Ranges that begin in this bucket; their whole gradients are copied to the flat space before it is reduced."""
        return tuple(place for place in self.ranges if place.start >= self.start)

    @cached_property
    def closing(self) -> tuple[ParameterRange, ...]:
        """Ranges that end in this bucket; their whole gradients are averaged once it is reduced."""
        return tuple(place for place in self.ranges if place.stop <= self.stop)

    @cached_property
    def beginnings(self) -> tuple[Beginnings, Beginnings]:
        """Where the gradients of `opening` begin, and those of `closing`."""
        return Beginnings(self.opening), Beginnings(self.closing)


class _Piece(NamedTuple):
    """The part of a parameter's range that goes into one bucket; `position`: the parameter's in the layout."""

    whole: ParameterRange
    position: int
    start: int
    stop: int


def cut(
    ranges: Sequence[ParameterRange],
    bucket_size: int | None,
    *,
    first_bucket_size: int | None = None,
    split_grain: int | None = None,
    order: Sequence[str] = (),
) -> tuple[Bucket, ...]:
    """Cut ranges, in the layout's order, into buckets, which come in the order in which they are complete.

    A bucket never mixes dtypes.

    Args:
        ranges: of all parameters.
        bucket_size: the most bytes of parameters in a bucket; None: a bucket for each parameter.
        first_bucket_size: that of the first bucket, so that communication begins early.
        split_grain: cut tensors larger than `bucket_size` at multiples of this many bytes; None: such a tensor has a
            bucket of its own.
        order: names in the order in which backward completes gradients, by default the layout's; parameters that are
            not in it come last.
    """
    pieces = [list(_pieces(place, at, bucket_size, split_grain)) for at, place in enumerate(ranges)]
    buckets = list(_groups(itertools.chain(*pieces), bucket_size, first_bucket_size))
    if order:
        positions = {name: position for position, name in enumerate(order)}
        completed = [positions.get(place.name, len(positions) + at) for at, place in enumerate(ranges)]

        def complete(run: list[_Piece]) -> int:
            return max(completed[piece.position] for piece in run)

        if any(complete(run) > run[-1].position + _TOLERATED_DELAY for run in buckets):
            sequence = sorted(range(len(ranges)), key=completed.__getitem__)
            groups = _groups(itertools.chain(*(pieces[at] for at in sequence)), bucket_size, first_bucket_size)
            buckets = [run for group in groups for run in sorted(_neighbours(group), key=complete)]
    return tuple(
        Bucket(index, tuple(dict.fromkeys(piece.whole for piece in run)), run[0].start, run[-1].stop)
        for index, run in enumerate(buckets)
    )


def _pieces(place: ParameterRange, position: int, bucket_size: int | None, grain: int | None) -> Iterator[_Piece]:
    if bucket_size is None or grain is None or place.nbytes <= bucket_size:
        yield _Piece(place, position, place.start, place.stop)
        return
    step = max(1, bucket_size // grain) * grain
    for start in range(place.start, place.stop, step):
        yield _Piece(place, position, start, min(start + step, place.stop))


def _groups(pieces: Iterable[_Piece], bucket_size: int | None, first_size: int | None) -> Iterator[list[_Piece]]:
    """Yield groups of consecutive pieces that fit into a bucket together; a piece that is too large is alone."""
    group: list[_Piece] = []
    filled, limit = 0, (first_size or bucket_size or 0)
    for piece in pieces:
        nbytes = piece.stop - piece.start
        fits = bucket_size is not None and filled + nbytes <= limit
        if group and not (fits and group[0].whole.dtype == piece.whole.dtype):
            yield group
            group, filled, limit = [], 0, bucket_size or 0
        group.append(piece)
        filled += nbytes
    if group:
        yield group


def _neighbours(group: list[_Piece]) -> Iterator[list[_Piece]]:
    """Yield the contiguous ranges of the flat space that a group's pieces make up."""
    run: list[_Piece] = []
    for piece in sorted(group, key=lambda piece: (piece.position, piece.start)):
        if run and not _adjoins(run[-1], piece):
            yield run
            run = []
        run.append(piece)
    yield run


def _adjoins(one: _Piece, other: _Piece) -> bool:
    """Return whether there is nothing but padding between two pieces."""
    if one.position == other.position:
        return one.stop == other.start
    return one.position + 1 == other.position and one.stop == one.whole.stop and other.start == other.whole.start
