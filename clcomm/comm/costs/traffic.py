"""Traffic of the all-reduces of `clcomm.base.schedules`: rounds, messages and bytes as formulas.

The sources are those named there. With p ranks, an array of n bytes, w the largest power of two up to p and s = p - w:

    algorithm  rounds                      messages of all ranks      bytes of all ranks
    ring       2 (p - 1)                   2 p (p - 1)                2 (p - 1) n
    halving    2 log2 w, and 2 if s > 0    2 w log2 w + 2 s           2 (w - 1) n + 2 s n
    tree       2 ceil(log2 p)              2 (p - 1)                  2 (p - 1) n
    direct     1                           p (p - 1)                  p (p - 1) n

`clcomm.comm.costs.model.terms` has the time: that of the busiest rank, one message after another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from clcomm.base.errors import ArgumentError


class Traffic(NamedTuple):
    """Traffic of all ranks together.

    Attributes:
        rounds: of consecutive messages.
        volume: bytes of all messages, in multiples of the array's.
    """

    rounds: int
    messages: int
    volume: int


def traffic(algorithm: str, ranks: int) -> Traffic:
    """Return the traffic of an all-reduce; ArgumentError for an unknown algorithm, and for less than one rank."""
    if algorithm not in _FORMULAS:
        raise ArgumentError(f"algorithm: expected one of {', '.join(_FORMULAS)}, got {algorithm!r}")
    if ranks < 1:
        raise ArgumentError(f"ranks: expected a number from 1 up, got {ranks}")
    return _FORMULAS[algorithm](ranks)


def _halving(p: int) -> Traffic:
    levels = p.bit_length() - 1
    w = 1 << levels
    s = p - w
    return Traffic(2 * levels + 2 * (s > 0), 2 * w * levels + 2 * s, 2 * (w - 1) + 2 * s)


_FORMULAS: dict[str, Callable[[int], Traffic]] = {
    "ring": lambda p: Traffic(2 * (p - 1), 2 * p * (p - 1), 2 * (p - 1)),
    "halving": _halving,
    "tree": lambda p: Traffic(2 * (p - 1).bit_length(), 2 * (p - 1), 2 * (p - 1)),
    "direct": lambda p: Traffic(int(p > 1), p * (p - 1), p * (p - 1)),
}
