"""A schedule: the messages of a collective, round by round, and a drawing of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Transfer(NamedTuple):
    """A message: blocks [first, last) of the sender's array, which the receiver adds to its own or copies."""

    sender: int
    receiver: int
    first: int
    last: int
    adds: bool


@dataclass(frozen=True)
class Schedule:
    """The messages of an all-reduce; those of a round are sent at once, with the values from before the round.

    Attributes:
        blocks: number of parts of the array, of equal size to within an element.
    """

    name: str
    ranks: int
    blocks: int
    rounds: tuple[tuple[Transfer, ...], ...]

    @property
    def messages(self) -> int:
        """Number of messages of all ranks."""
        return sum(map(len, self.rounds))

    def bounds(self, size: int) -> list[int]:
        """Return where the blocks of an array of `size` elements begin, and its end."""
        return [size * block // self.blocks for block in range(self.blocks + 1)]

    def elements(self, size: int) -> int:
        """Return the number of elements in all messages for an array of `size` elements."""
        bounds = self.bounds(size)
        return sum(bounds[each.last] - bounds[each.first] for messages in self.rounds for each in messages)

    def drawing(self) -> str:
        """Return the schedule as text: a row for each round, a column with each rank's messages.

        "b0 > 1 +" is block 0 to rank 1, which adds it; without "+" rank 1 copies it. "all" is the whole array.
        """
        cells = [[_cell(messages, rank, self.blocks) for rank in range(self.ranks)] for messages in self.rounds]
        heads = [f"rank {rank}" for rank in range(self.ranks)]
        widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
        lines = [("round", heads), *((str(number), row) for number, row in enumerate(cells, 1))]
        return "\n".join(_rows(lines, widths))


def _rows(lines: list[tuple[str, list[str]]], widths: list[int]) -> Iterator[str]:
    for head, row in lines:
        yield f"{head:>5}  {'  '.join(f'{cell:<{width}}' for cell, width in zip(row, widths, strict=True))}".rstrip()


def _cell(messages: tuple[Transfer, ...], rank: int, blocks: int) -> str:
    """Return a rank's messages in a round; "." for none."""
    sent = [each for each in messages if each.sender == rank]
    if not sent:
        return "."
    first, last, adds = sent[0][2:]
    part = "all" if (first, last) == (0, blocks) else f"b{first}" if last == first + 1 else f"b{first}-{last - 1}"
    return f"{part} > {','.join(str(each.receiver) for each in sent)}{' +' if adds else ''}"
