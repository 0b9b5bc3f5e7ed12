"""What observers of a Communicator are told: finished collectives, and finished parts of the program around them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol


class Collective(NamedTuple):
    """One finished collective, as an observer sees it.

    `nbytes` is the operation's size in nccl-tests' sense: the array for all-reduce, broadcast and reduce-scatter
    (its input), the gathered whole for all-gather, gather and scatter. `seconds` is what the caller spent in it.
    `wire_nbytes` is what a rank put in instead of `nbytes` where a compressed form travelled; None: no other form.
    `bucket` is the index of the bucket it reduces, -1: none. `began_s` is time.perf_counter() when the caller entered
    it: one clock for all processes of a host. `exposed_s` is the part of `seconds` in which the caller could do nothing
    else, None: all of it; `wait_s` the part of that spent waiting for other ranks to come, None: not told from moving
    data. `last_rank` is the rank that came last, -1: not known, and `late_s` by how much it came after the one before
    it. One that is started in the background begins, here, when its turn comes: when all that were started before it
    are done; `queued_s` is how long before that it was started. So the times of those that are in flight together add
    up. `exposed` says when its `exposed_s` were: (begin, end) of each of the caller's stays in those that are in
    flight, by the clock of `began_s`; `waits` likewise when its `wait_s` were.
    """

    operation: str
    label: str
    nbytes: int
    seconds: float
    transport: str
    sequence: int
    failed: bool = False
    wire_nbytes: int | None = None
    bucket: int = -1
    began_s: float = 0.0
    wait_s: float | None = 0.0
    exposed_s: float | None = None
    last_rank: int = -1
    late_s: float = 0.0
    queued_s: float = 0.0
    exposed: tuple[tuple[float, float], ...] = ()
    waits: tuple[tuple[float, float], ...] = ()


def last_of(arrivals: list[int]) -> tuple[int, float]:
    """Return which rank came last, and by how many seconds after the one before it, from each one's nanoseconds."""
    *_, next_ns, last_ns = sorted(arrivals)
    return arrivals.index(last_ns), (last_ns - next_ns) * 1e-9


#: Phases that bring arrays to where they are reduced, and back.
PACKING = ("pack", "unpack")


class Phase(NamedTuple):
    """One finished part of a program that is no collective: "pack", "forward_backward", "optimizer", "step", ...

    `began_s` is time.perf_counter() at its begin, `seconds` how long it took, `bucket` whose part it is, -1: of none.
    `communication_s` is what of `seconds` went into collectives that kept the rank from anything else, and into packing
    for them. `figures` are what is known about it by then, by name: a step's number, its loss, its speed.
    """

    name: str
    began_s: float
    seconds: float
    label: str = ""
    bucket: int = -1
    communication_s: float = 0.0
    figures: tuple[tuple[str, float], ...] = ()


class TimedPhase:
    """A `with` block that is a phase: `tell` is told about it at its end, also when it ends with an exception.

    communicated: returns the seconds that this rank has spent communicating so far.
    """

    __slots__ = ("_began_s", "_bucket", "_communicated", "_communicated_s", "_figures", "_label", "_name", "_tell")

    def __init__(
        self,
        tell: Callable[[Phase], None],
        communicated: Callable[[], float],
        name: str,
        label: str = "",
        bucket: int = -1,
        figures: tuple[tuple[str, float], ...] = (),
    ):
        self._tell, self._communicated = tell, communicated
        self._name, self._label, self._bucket, self._figures = name, label, bucket, figures

    def __enter__(self) -> None:
        self._communicated_s = self._communicated()
        self._began_s = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        seconds = time.perf_counter() - self._began_s
        within_s = min(seconds, self._communicated() - self._communicated_s)
        self._tell(Phase(self._name, self._began_s, seconds, self._label, self._bucket, within_s, self._figures))


class Observer(Protocol):
    """Anything that wants to see a Communicator's collectives; it must not communicate itself.

    One that has a method `phase_finished(phase: Phase)` is told about phases too.
    """

    def collective_finished(self, event: Collective) -> None: ...
