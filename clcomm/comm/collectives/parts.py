"""Parts of a Communicator: which ranks each has, how it begins and ends, and how its events count for the whole."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, NamedTuple, Protocol, TypeVar

from clcomm.base.errors import ArgumentError, RankNames
from clcomm.comm.collectives.in_flight import Notifier
from clcomm.comm.collectives.runner import CollectiveRunner
from clcomm.comm.stats.events import Collective, Phase
from clcomm.comm.transport import mpi_communicators
from clcomm.comm.transport.mpi_runtime import Intracomm


class SplitRequest(NamedTuple):
    """What a rank asks of a split: its part's number (None: it is in none), its place in it, and the part's name."""

    color: int | None
    key: int
    name: str

    @classmethod
    def of(cls, color: object, key: object, name: object) -> SplitRequest | ArgumentError:
        """Return the checked arguments of `Communicator.split`, or the error, for the ranks to compare."""
        if color is not None and not (isinstance(color, Integral) and 0 <= int(color) < 1 << 31):
            return ArgumentError(f"color: expected a number from 0 up, or None for no part, got {color!r}")
        if not isinstance(key, Integral):
            return ArgumentError(f"key: expected a number, got {key!r}")
        if not isinstance(name, str):
            return ArgumentError(f"name: expected text, got {name!r}")
        return cls(None if color is None else int(color), int(key), name)


def members_of(everyone: Sequence[SplitRequest | ArgumentError], rank: int, name_of: RankNames) -> list[int]:
    """Return the ranks of `rank`'s part in their order there; empty for none.

    Raises the same ArgumentError on every rank where one asks for something invalid.
    """
    found = []
    for other, wanted in enumerate(everyone):
        if isinstance(wanted, ArgumentError):
            raise ArgumentError(f"{wanted} (on {name_of([other])})")
        found.append(wanted)
    own = found[rank].color
    return [] if own is None else sorted((r for r, each in enumerate(found) if each.color == own),
                                         key=lambda r: (found[r].key, r))  # fmt: skip


class PartLifetime(Protocol):
    """The Lifetime of a part."""

    @property
    def collectives_begun(self) -> int:
        """The number of collectives that this rank has begun in it and its parts."""


class Part(Protocol):
    """A Communicator that `split` has made, as this file uses it."""

    runner: CollectiveRunner

    @property
    def lifetime(self) -> PartLifetime:
        """Its life in the job."""

    def finalize(self) -> None:
        """Close it; collective."""

    def abandon(self) -> None:
        """Close it without the other ranks."""


P = TypeVar("P")


def part_of(
    make: Callable[..., P], comm: Intracomm | None, members: Sequence[int], rank: int, settings: dict[str, Any]
) -> P | None:
    """Return the Communicator of a part, None for a rank in no part; collective over all ranks of the whole.

    Args:
        make: the class.
        comm: the whole's mpi4py communicator; None without MPI.
        members: the part's ranks, of which this one has the number `rank`.
        settings: arguments for the class.

    Raises ResourceError if MPI has no communicators left.
    """
    if comm is None:
        return make(**settings) if members else None
    with mpi_communicators.taking_communicators():
        place = members.index(rank) if members else 0
        lane = mpi_communicators.lane_of(comm, min(members, default=None), place)
    if lane is None:
        return None
    try:
        return make(lane, **settings) if len(members) > 1 else make(**settings | {"transport": "solo"})
    finally:
        lane.Free()


class Parts:
    """The parts that a Communicator was split into; they end with it."""

    def __init__(self) -> None:
        self._open: list[Part] = []

    def add(self, part: Part) -> None:
        """Add a new part, and forget those that are closed."""
        self._open = [*(each for each in self._open if not each.runner.closed_by), part]

    @property
    def collectives_begun(self) -> int:
        """The number of collectives that this rank has begun in them."""
        return sum(part.lifetime.collectives_begun for part in self._open)

    def finalize(self) -> None:
        """Close them; collective."""
        for part in self._open:
            part.finalize()

    def abandon(self) -> None:
        """Close them without the other ranks."""
        for part in self._open:
            part.abandon()


class PartEvents:
    """An observer of a part: passes its events on to the whole, with the part's name and the whole's ranks.

    Args:
        whole: notifies the observers of the whole; it is not kept alive.
        name: the part's.
        members: its ranks' numbers in the whole.
    """

    def __init__(self, whole: Notifier, name: str, members: Sequence[int]):
        self._whole, self._name, self._members = weakref.ref(whole), name, tuple(members)

    def collective_finished(self, event: Collective) -> None:
        """Notify the whole's observers."""
        whole = self._whole()
        if whole is not None:
            last = self._members[event.last_rank] if event.last_rank >= 0 else -1
            blocked_s = event.seconds if event.exposed_s is None else event.exposed_s
            part = f"{self._name}/{event.part}" if event.part else self._name  # of a part's part
            size = event.part_size or len(self._members)
            event = event._replace(last_rank=last, part=part, part_size=size)
            whole.notify_collective(event, blocked_s=blocked_s)

    def phase_finished(self, phase: Phase) -> None:
        """Notify the whole's observers of a phase."""
        whole = self._whole()
        if whole is not None:
            whole.notify_phase(phase)
