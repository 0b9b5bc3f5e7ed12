"""What a Communicator reports to its observers: finished collectives, and finished phases around them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from clcomm.comm.stats.now import NOW

Row = dict[str, Any]  # what tables and files tell of a kind of collectives, by name


class Collective(NamedTuple):
    """One finished collective, as observers get it.

    The time of a collective in the background counts from its turn, when all that were started before it are finished.
    So the times of collectives that were in flight together can be added.
    """

    #: "all_reduce", "broadcast", "all_gather", ...: the Communicator's method.
    operation: str
    #: What the caller uses it for, such as "gradients"; "": unlabelled.
    label: str
    #: Its size in nccl-tests' sense: the array for all-reduce, broadcast and reduce-scatter (its input), the gathered
    #: whole for all-gather, gather and scatter.
    nbytes: int
    #: How long the caller was in it; in the background, from its turn until this rank observed its end.
    seconds: float
    #: The name of the transport that moved the data: "shared", "mpi", ...
    transport: str
    #: Its number among this Communicator's collectives, the same on every rank.
    sequence: int
    #: Whether it raised an error.
    failed: bool = False
    #: What this rank sent instead of `nbytes` where the data travelled compressed; None: not compressed.
    wire_nbytes: int | None = None
    #: Index of the bucket that it reduces; -1: none.
    bucket: int = -1
    #: time.perf_counter() at its begin: the same clock for all processes of a host.
    began_s: float = 0.0
    #: The part of the exposed time spent waiting for other ranks to arrive; None: not measured apart from moving data.
    wait_s: float | None = 0.0
    #: The part of `seconds` in which the caller could do nothing else; None: all of it.
    exposed_s: float | None = None
    #: The rank that arrived last; -1: not known.
    last_rank: int = -1
    #: How much later `last_rank` arrived than the rank before it.
    late_s: float = 0.0
    #: How long it was queued in the background before its turn came.
    queued_s: float = 0.0
    #: When it was exposed: (begin, end) of each of the caller's calls into collectives in flight, by `began_s`'s clock.
    exposed: tuple[tuple[float, float], ...] = ()
    #: When it waited for other ranks: (begin, end), by the same clock.
    waits: tuple[tuple[float, float], ...] = ()
    #: The name of the part of the Communicator in which it ran (`Communicator.split`), such as a mesh's axis; "": all.
    part: str = ""
    #: The number of that part's ranks; 0: all of the Communicator's.
    part_size: int = 0
    #: How many messages this rank sent to others, and their bytes, in an all-reduce by a schedule; 0 in others.
    messages: int = 0
    message_nbytes: int = 0
    #: The shape and dtype of this rank's array; None and "" where there is none, or ranks may differ in it.
    shape: tuple[int, ...] | None = None
    dtype: str = ""


#: Phases that copy gradients to the memory in which they are reduced, and back.
PACKING = ("pack", "unpack")


class Phase(NamedTuple):
    """One finished part of a program that is not a collective."""

    #: "pack", "forward_backward", "optimizer", "step", or any name.
    name: str
    #: time.perf_counter() at its begin.
    began_s: float
    seconds: float
    label: str = ""
    #: Index of the bucket that it belongs to; -1: none.
    bucket: int = -1
    #: The part of `seconds` spent in blocking or exposed collectives, and in packing for them.
    communication_s: float = 0.0
    #: Figures that describe it, by name: a step's number, its loss, its speed.
    figures: tuple[tuple[str, float], ...] = ()


class TimedPhase:
    """A `with` block that is a phase.

    Args:
        notify: called with the Phase at the block's end, also when that is an exception.
        communicated: returns the seconds that this rank has spent communicating so far.
        name, label, bucket, figures: those of the Phase.
    """

    __slots__ = (
        "_began_s", "_bucket", "_communicated", "_communicated_s", "_figures", "_label", "_name", "_notify",
        "_outer",
    )  # fmt: skip

    def __init__(
        self,
        notify: Callable[[Phase], None],
        communicated: Callable[[], float],
        name: str,
        label: str = "",
        bucket: int = -1,
        figures: tuple[tuple[str, float], ...] = (),
    ):
        self._notify, self._communicated = notify, communicated
        self._name, self._label, self._bucket, self._figures = name, label, bucket, figures

    def __enter__(self) -> None:
        self._outer, NOW.phase = NOW.phase, self._name
        self._communicated_s = self._communicated()
        self._began_s = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        began_s, NOW.phase = self._began_s, self._outer
        seconds = time.perf_counter() - began_s
        within_s = self._communicated() - self._communicated_s
        within_s = within_s if within_s < seconds else seconds
        # tuple.__new__ takes half the time of Phase(...)
        fields = self._name, began_s, seconds, self._label, self._bucket, within_s, self._figures
        self._notify(tuple.__new__(Phase, fields))


class Observer(Protocol):
    """An object that a Communicator notifies of each finished collective; it must not communicate itself.

    With a method `phase_finished(phase: Phase)` it is notified of phases too.
    """

    def collective_finished(self, event: Collective) -> None: ...
