"""Four all-reduces as schedules, for any number of ranks.

ring      reduce-scatter and all-gather around a ring (P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce
          algorithms for clusters of workstations", JPDC 69, 2009)
halving   recursive halving, then doubling (R. Rabenseifner, "Optimization of collective reduction operations",
          ICCS 2004); ranks beyond a power of two first add their arrays to neighbours' (R. Thakur, R. Rabenseifner
          and W. Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19, 2005)
tree      a binomial tree to rank 0, and back (Thakur et al., 2005, as reduce and broadcast)
direct    each rank sends its array to every other
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from clcomm.base.errors import ArgumentError

# --- A schedule: the messages of a collective, round by round, and a drawing of them. ---


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


# --- Four all-reduces as schedules, for any number of ranks ---

Rounds = list[tuple[Transfer, ...]]


@lru_cache(maxsize=64)
def schedule_of(algorithm: str, ranks: int) -> Schedule:
    """Return an algorithm's schedule; ArgumentError for an unknown name, and for less than one rank."""
    if algorithm not in ALGORITHMS:
        raise ArgumentError(f"algorithm: expected one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    if ranks < 1:
        raise ArgumentError(f"ranks: expected a number from 1 up, got {ranks}")
    blocks, rounds = ALGORITHMS[algorithm](ranks)
    return Schedule(algorithm, ranks, blocks, tuple(rounds))


def _ring(ranks: int) -> tuple[int, Rounds]:
    """Each block goes around once, growing by each rank's values, and around once more, complete."""

    def turn(step: int, offset: int, adds: bool) -> tuple[Transfer, ...]:
        blocks = ((rank, (rank + offset - step) % ranks) for rank in range(ranks))
        return tuple(Transfer(rank, (rank + 1) % ranks, block, block + 1, adds) for rank, block in blocks)

    scatter = [turn(step, 0, True) for step in range(ranks - 1)]
    return ranks, scatter + [turn(step, 1, False) for step in range(ranks - 1)]


def _halving(ranks: int) -> tuple[int, Rounds]:
    """Pairs exchange halves of their unreduced blocks; then pairs exchange complete blocks, in reverse."""
    whole = 1 << (ranks.bit_length() - 1)
    surplus = ranks - whole  # of the first 2 x surplus ranks each even one takes part through the odd one after it
    place = [2 * number + 1 if number < surplus else number + surplus for number in range(whole)]

    def exchange(distance: int, adds: bool) -> tuple[Transfer, ...]:
        def message(number: int) -> Transfer:
            other = number ^ distance
            first = (other if adds else number) // distance * distance
            return Transfer(place[number], place[other], first, first + distance, adds)

        return tuple(message(number) for number in range(whole))

    distances = [1 << bit for bit in range(whole.bit_length() - 1)]
    rounds = [exchange(each, True) for each in reversed(distances)] + [exchange(each, False) for each in distances]
    if surplus:
        rounds.insert(0, tuple(Transfer(2 * n, 2 * n + 1, 0, whole, True) for n in range(surplus)))
        rounds.append(tuple(Transfer(2 * n + 1, 2 * n, 0, whole, False) for n in range(surplus)))
    return whole, rounds


def _tree(ranks: int) -> tuple[int, Rounds]:
    """Sums flow to rank 0 through a binomial tree, and the result flows back."""

    def edges(distance: int) -> Iterator[tuple[int, int]]:
        return ((upper, upper - distance) for upper in range(distance, ranks, 2 * distance))

    distances = [1 << bit for bit in range((ranks - 1).bit_length())]
    up = [tuple(Transfer(upper, lower, 0, 1, True) for upper, lower in edges(each)) for each in distances]
    down = [tuple(Transfer(lower, upper, 0, 1, False) for upper, lower in edges(each)) for each in reversed(distances)]
    return 1, up + down


def _direct(ranks: int) -> tuple[int, Rounds]:
    """Every rank sends its array to every other, and adds all arrays in rank order."""
    pairs = ((one, other) for one in range(ranks) for other in range(ranks) if one != other)
    return 1, [tuple(Transfer(one, other, 0, 1, True) for one, other in pairs)] if ranks > 1 else []


#: Functions that return the number of blocks and the rounds, by the number of ranks.
ALGORITHMS: dict[str, Callable[[int], tuple[int, Rounds]]] = {
    "ring": _ring, "halving": _halving, "tree": _tree, "direct": _direct,
}  # fmt: skip
