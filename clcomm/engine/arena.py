"""The arena: one block of memory for a recorded step's buffers; buffers that are never in use together share places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Lifetime(NamedTuple):
    """A buffer's size in bytes, and the first and last launch that use it, by number."""

    nbytes: int
    first: int
    last: int


def plan(lifetimes: Sequence[Lifetime], alignment: int) -> tuple[list[int], int]:
    """Return (offset of each buffer, bytes in all); buffers in use at the same launch never overlap.

    The largest are placed first, each at the lowest offset that is free for its whole lifetime (greedy by size:
    Pisarchyk and Lee, 2020, "Efficient Memory Management for Deep Neural Net Inference").
    """
    offsets = [0] * len(lifetimes)
    placed: list[int] = []
    total = 0
    for index in sorted(range(len(lifetimes)), key=lambda i: (-lifetimes[i].nbytes, lifetimes[i].first)):
        nbytes, first, last = lifetimes[index]
        taken = sorted(
            (offsets[other], offsets[other] + lifetimes[other].nbytes)
            for other in placed
            if lifetimes[other].first <= last and first <= lifetimes[other].last
        )
        offset = 0
        for start, stop in taken:
            if offset + nbytes <= start:
                break
            offset = max(offset, -(-stop // alignment) * alignment)
        offsets[index] = offset
        placed.append(index)
        total = max(total, offset + nbytes)
    return offsets, total
