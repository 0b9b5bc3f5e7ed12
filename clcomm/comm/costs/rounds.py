"""Rounds of all-reduces among ranks that share their hosts' links: what passes the busiest link in each.

A message of n bytes takes alpha + beta n seconds. Messages of one round that leave a host share its link, so that they
take alpha + beta x (their bytes together), as do those that arrive; links carry both directions at once, and nothing
but the hosts' links limits the network (a switch that does not block). Ranks are placed host by host.

ring and halving are those of `clcomm.base.schedules`, but for halving's distances, which grow as MPICH's do (R. Thakur,
R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19, 2005), so that
most of its bytes stay on a host. doubling is recursive doubling of the whole array (the same paper).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.comm.costs.model import Cost

_Pairs = tuple[np.ndarray, np.ndarray]


class Round(NamedTuple):
    """Rounds that are alike.

    Attributes:
        times: how many there are.
        within: of the array, the part in a message between two ranks of a host; 0: there is none.
        between: of the array, the multiple that passes the busiest link of a host.
    """

    times: int
    within: float
    between: float

    def seconds(self, nbytes: float, within: Cost, link: Cost) -> float:
        """Return the time of all of them; ranks go on when the slowest message has arrived."""
        local_s = within.seconds(self.within * nbytes) if self.within else 0.0
        return self.times * max(local_s, link.seconds(self.between * nbytes) if self.between else 0.0)


def flat_s(algorithm: str, nbytes: float, ranks: int, ranks_per_host: int, within: Cost, link: Cost) -> float:
    """Return the seconds of an all-reduce whose ranks send to each other whatever their hosts are.

    Args:
        algorithm: "ring", "doubling" or "halving".
        within: a message between two ranks of a host while the others send too.
        link: a message between two hosts that have their links to themselves.
    """
    return sum(each.seconds(nbytes, within, link) for each in rounds_of(algorithm, ranks, ranks_per_host))


@lru_cache(maxsize=256)
def rounds_of(algorithm: str, ranks: int, ranks_per_host: int) -> tuple[Round, ...]:
    """Return an all-reduce's rounds; ArgumentError for an unknown algorithm, and for less than one rank."""
    if algorithm not in _MESSAGES:
        raise ArgumentError(f"algorithm: expected one of {', '.join(_MESSAGES)}, got {algorithm!r}")
    if ranks < 1 or ranks_per_host < 1:
        raise ArgumentError(f"ranks, ranks_per_host: expected numbers from 1 up, got {ranks} and {ranks_per_host}")
    if ranks == 1:
        return ()
    return tuple(
        Round(times, *_busiest(pairs, share, ranks_per_host)) for times, pairs, share in _MESSAGES[algorithm](ranks)
    )


def _busiest(pairs: _Pairs, share: float, ranks_per_host: int) -> tuple[float, float]:
    home, target = (ranks // ranks_per_host for ranks in pairs)
    leaves = home != target
    most = max((int(np.bincount(hosts[leaves]).max()) for hosts in (home, target)), default=0) if leaves.any() else 0
    return (0.0 if leaves.all() else share), most * share


def _ring(ranks: int) -> Iterator[tuple[int, _Pairs, float]]:
    senders = np.arange(ranks)
    yield 2 * (ranks - 1), (senders, (senders + 1) % ranks), 1 / ranks


def _doubling(ranks: int) -> Iterator[tuple[int, _Pairs, float]]:
    yield from _folded(ranks, [(distance, 1.0) for distance in _distances(ranks)])


def _halving(ranks: int) -> Iterator[tuple[int, _Pairs, float]]:
    halves = [(distance, 0.5 / distance) for distance in _distances(ranks)]
    yield from _folded(ranks, halves + halves[::-1])


def _distances(ranks: int) -> list[int]:
    """Return the distances of the pairs among the largest power of two up to `ranks`, growing."""
    return [1 << bit for bit in range(ranks.bit_length() - 1)]


def _folded(ranks: int, exchanges: list[tuple[int, float]]) -> Iterator[tuple[int, _Pairs, float]]:
    """Yield exchanges between pairs; of the first ranks, as many as exceed a power of two, each acts for two."""
    whole = 1 << (ranks.bit_length() - 1)
    surplus = ranks - whole
    places = np.arange(whole)
    places = np.where(places < surplus, 2 * places + 1, places + surplus)
    added = np.arange(surplus) * 2
    if surplus:
        yield 1, (added, added + 1), 1.0
    for distance, share in exchanges:
        yield 1, (places, places[np.arange(whole) ^ distance]), share
    if surplus:
        yield 1, (added + 1, added), 1.0


_MESSAGES = {"ring": _ring, "doubling": _doubling, "halving": _halving}
