"""Buckets: ranges of the flat space that are reduced together, and how a space is cut into them.

Pure bookkeeping, in bytes. Backward completes gradients about in the layout's order; where it does otherwise, the cut
follows the order that was seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from clcomm.layout import Slot


#: How much later than in the layout a bucket may be complete before the cut follows the order that was seen: a layer's
#: backward may complete its weight before its bias, and both come with the same kernels.
_SWAPPED = 1


@dataclass(frozen=True)
class Bucket:
    """Neighbouring slots, or a part of one, that are reduced together: bytes [start, stop) of the flat space.

    The range may also hold padding, which is zero on every rank. Of a tensor that is split over several buckets each
    one names the slot.
    """

    index: int
    slots: tuple[Slot, ...]
    start: int
    stop: int

    @cached_property
    def nbytes(self) -> int:
        """The parameters' own bytes in the range, without padding."""
        return sum(min(self.stop, slot.stop) - max(self.start, slot.start) for slot in self.slots)

    @property
    def dtype(self) -> str:
        return self.slots[0].dtype

    @cached_property
    def opening(self) -> tuple[Slot, ...]:
        """Slots that begin here: with this bucket their whole gradient is brought to the flat space."""
        return tuple(slot for slot in self.slots if slot.start >= self.start)

    @cached_property
    def closing(self) -> tuple[Slot, ...]:
        """Slots that end here: after this bucket their whole gradient is averaged."""
        return tuple(slot for slot in self.slots if slot.stop <= self.stop)


class _Piece(NamedTuple):
    """A slot, or the part of it that goes into one bucket; `position`: of the slot in the layout."""

    slot: Slot
    position: int
    start: int
    stop: int


def cut(
    slots: Sequence[Slot],
    bucket_size: int | None,
    *,
    first_bucket_size: int | None = None,
    split_grain: int | None = None,
    order: Sequence[str] = (),
) -> tuple[Bucket, ...]:
    """Cut slots, in the layout's order, into buckets of at most `bucket_size` of their own bytes; None: one for each.

    first_bucket_size: that of the first bucket, so that communication begins early. split_grain: cut tensors larger
    than `bucket_size`, at multiples of so many bytes; None: such a tensor has a bucket of its own. order: names in the
    order in which backward completes gradients; slots without a name there come last. A bucket never mixes dtypes, and
    buckets come in the order in which they are complete.
    """
    pieces = [list(_pieces(slot, at, bucket_size, split_grain)) for at, slot in enumerate(slots)]
    buckets = list(_groups(itertools.chain(*pieces), bucket_size, first_bucket_size))
    if order:
        places = {name: place for place, name in enumerate(order)}
        seen = [places.get(slot.name, len(places) + at) for at, slot in enumerate(slots)]

        def complete(run: list[_Piece]) -> int:
            return max(seen[piece.position] for piece in run)

        if any(complete(run) > run[-1].position + _SWAPPED for run in buckets):
            sequence = sorted(range(len(slots)), key=seen.__getitem__)
            groups = _groups(itertools.chain(*(pieces[at] for at in sequence)), bucket_size, first_bucket_size)
            buckets = [run for group in groups for run in sorted(_neighbours(group), key=complete)]
    return tuple(
        Bucket(index, tuple(dict.fromkeys(piece.slot for piece in run)), run[0].start, run[-1].stop)
        for index, run in enumerate(buckets)
    )


def _pieces(slot: Slot, position: int, bucket_size: int | None, grain: int | None) -> Iterator[_Piece]:
    if bucket_size is None or grain is None or slot.nbytes <= bucket_size:
        yield _Piece(slot, position, slot.start, slot.stop)
        return
    step = max(1, bucket_size // grain) * grain
    for start in range(slot.start, slot.stop, step):
        yield _Piece(slot, position, start, min(start + step, slot.stop))


def _groups(pieces: Iterable[_Piece], bucket_size: int | None, first_size: int | None) -> Iterator[list[_Piece]]:
    """Yield pieces that come one after the other and fit into a bucket together; a larger one is alone."""
    group: list[_Piece] = []
    filled, limit = 0, (first_size or bucket_size or 0)
    for piece in pieces:
        nbytes = piece.stop - piece.start
        fits = bucket_size is not None and filled + nbytes <= limit
        if group and not (fits and group[0].slot.dtype == piece.slot.dtype):
            yield group
            group, filled, limit = [], 0, bucket_size or 0
        group.append(piece)
        filled += nbytes
    if group:
        yield group


def _neighbours(group: list[_Piece]) -> Iterator[list[_Piece]]:
    """Yield the unbroken stretches of the flat space that a group's pieces make up."""
    run: list[_Piece] = []
    for piece in sorted(group, key=lambda piece: (piece.position, piece.start)):
        if run and not _adjoins(run[-1], piece):
            yield run
            run = []
        run.append(piece)
    yield run


def _adjoins(one: _Piece, other: _Piece) -> bool:
    """Whether nothing but padding lies between them."""
    if one.position == other.position:
        return one.stop == other.start
    return one.position + 1 == other.position and one.stop == one.slot.stop and other.start == other.slot.start
