"""Parts of a Communicator: which ranks each has, and how its events count for the whole."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from numbers import Integral
from typing import NamedTuple

from clcomm.collectives.notifier import Notifier
from clcomm.errors import ArgumentError, RankNames
from clcomm.stats.events import Collective, Phase


class Wanted(NamedTuple):
    """What a rank asks of a split: its part's number (None: it is in none), its place in it, and the part's name."""

    color: int | None
    key: int
    name: str

    @classmethod
    def of(cls, color: object, key: object, name: object) -> Wanted | ArgumentError:
        """Return the checked arguments of `Communicator.split`, or the error, for the ranks to compare."""
        if color is not None and not (isinstance(color, Integral) and 0 <= int(color) < 1 << 31):
            return ArgumentError(f"color: expected a number from 0 up, or None for no part, got {color!r}")
        if not isinstance(key, Integral):
            return ArgumentError(f"key: expected a number, got {key!r}")
        if not isinstance(name, str):
            return ArgumentError(f"name: expected text, got {name!r}")
        return cls(None if color is None else int(color), int(key), name)


def members_of(everyone: Sequence[Wanted | ArgumentError], rank: int, name_of: RankNames) -> list[int]:
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
