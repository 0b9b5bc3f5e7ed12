"""Calls, collectives and phases, as a Communicator reports them to its observers, and the step that a rank is at."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol

import numpy as np

from clcomm.base.errors import MismatchError, name_ranks
from clcomm.base.host.arrays import dtype_name

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


# --- One rank's call of a collective: how it is counted, and what has to be equal on every rank. ---

#: How many arrays' shapes messages list.
_MOST_SHAPES = 4


@dataclass(frozen=True)
class Call:
    """One rank's call of a collective; the same object is used for all calls with equal arguments."""

    operation: str
    label: str
    #: Name of the transport that moves the data.
    transport: str
    #: Its size for the stats, in bytes, without padding; ranks compare it where they compare `count`.
    nbytes: int = 0
    #: Whether MPI moves the data, which compares nothing; the ranks then meet before the call.
    through_mpi: bool = False
    #: The reduction, such as "sum".
    op: str = ""
    #: Number of the array's elements, -1 where ranks may differ in it, and their dtype.
    count: int = -1
    dtype: np.dtype | None = None
    #: The array's shape, unless it has one dimension or ranks may differ in it.
    shape: tuple[int, ...] | None = None
    bucket: int = -1
    #: -1: no root.
    root: int = -1
    #: Number of a prepared operation; 0: not prepared.
    prepared: int = 0
    #: Whether it has a sequence number of its own; ranks compare arguments in collectives that have none.
    is_counted: bool = True
    #: The rank without whose message it does not end; -1: of all, which have to come to it.
    peer: int = -1
    #: Whether it ends by a message of any rank.
    takes_any: bool = False
    #: What ranks compare, in place of label and bucket, which may then differ; None: these.
    compared: str | None = None
    #: Whether its arrays are aligned to their dtype.
    is_aligned: bool = True

    @cached_property
    def extent(self) -> tuple[int, ...] | None:
        """The array's shape; None where ranks may differ in it, or there is none."""
        return self.shape if self.shape is not None or self.count < 0 else (self.count,)

    @cached_property
    def dtype_name(self) -> str:
        """The dtype's name; "": none."""
        return "" if self.dtype is None else dtype_name(self.dtype)

    @cached_property
    def tag(self) -> int:
        """A 62-bit hash, equal on two ranks whose calls match."""
        alike: tuple[object, ...]
        if self.compared is None:
            alike = self.operation, self.label, self.transport, self.op, self.count, str(self.dtype), self.bucket
        else:
            alike = self.operation, self.compared, self.transport, self.op, self.count, str(self.dtype)
        nbytes = self.nbytes if self.count >= 0 else 0
        text = repr((*alike, nbytes, self.shape, self.root, self.prepared, self.is_aligned))
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 2

    def misses(self, left: Mapping[int, int], ranks: int, sequence: int) -> int | None:
        """Return the rank for which this call waits in vain, None if it may end.

        Args:
            left: the ranks that have left the program, and after how many collectives each.
            ranks: the number of all ranks, the caller included.
            sequence: of this call; for one without a number that of the collective before it.
        """
        if self.takes_any:
            return min(left) if 0 < len(left) == ranks - 1 else None
        if self.peer >= 0:
            return self.peer if self.peer in left else None
        before = sequence + (not self.is_counted)
        return min((rank for rank, done in left.items() if done < before), default=None)

    def describe(self, sequence: int) -> str:
        """Return the call in words, e.g. "all_reduce 'gradients' #12 (sum of 1,000 float32, bucket 3)"."""
        name = f"{self.operation} {self.label!r}" if self.label else self.operation
        details = []
        if self.dtype is not None:
            misaligned = "" if self.is_aligned else "misaligned "
            count = "" if self.count < 0 else f"{self.count:,} "  # that of an all-to-all may differ between ranks
            details.append(f"{self.op + ' of ' if self.op else ''}{count}{misaligned}{dtype_name(self.dtype)}")
        if self.shape is not None:
            details.append(f"shape {list(self.shape)}")
        if self.compared and self.dtype is not None and self.compared != dtype_name(self.dtype):
            details.append(f"from {self.compared}")
        if self.compared and self.dtype is not None and self.nbytes > self.count * self.dtype.itemsize:
            details.append(f"a piece of {self.nbytes:,} bytes")
        if self.dtype is not None and 0 < self.nbytes < self.count * self.dtype.itemsize:
            details.append(f"{self.nbytes:,} bytes without padding")
        if self.bucket >= 0:
            details.append(f"bucket {self.bucket}")
        if self.root >= 0:
            details.append(f"root {self.root}")
        if self.prepared:
            details.append(f"prepared as number {self.prepared}")
        if self.through_mpi and self.dtype is not None:
            details.append("through MPI")
        if self.transport == "staged":
            details.append("in other memory")
        return f"{name}{'' if self.is_counted else ' after'} #{sequence}" + (
            f" ({', '.join(details)})" if details else ""
        )


def describe_shapes(shapes: Sequence[tuple[int, ...]]) -> str:
    """Return the shapes of arrays that are reduced together, those beyond a few as a checksum."""
    text = ", ".join(str(list(shape)) for shape in shapes[:_MOST_SHAPES])
    if len(shapes) > _MOST_SHAPES:
        text += f" and {len(shapes) - _MOST_SHAPES} more with checksum {zlib.crc32(repr(shapes).encode()):08x}"
    return text


def disagreement(descriptions: Sequence[str], name_of: Callable[[Sequence[int]], str] = name_ranks) -> MismatchError:
    """Return the error for ranks that are in different collectives; descriptions: by rank."""
    sides: dict[str, list[int]] = {}
    for rank, text in enumerate(descriptions):
        sides.setdefault(text, []).append(rank)
    found = "; ".join(f"{name_of(ranks)} in {text}" for text, ranks in sides.items())
    return MismatchError(
        f"collective: expected the same one with equal arrays on every rank, got {found}; "
        f"call the same collectives in the same order"
    )


# --- What this rank is at: its step, its samples so far, its phase. One assignment each, read about once a second. ---
# `clcomm top` shows them (`clcomm/comm/watch/figures.py`).


class Now:
    """What this process is at.

    Attributes:
        step_ns: when the step began.
        numbered: whether the program numbers its steps.
        step_begins: called with the number of each step; None: nothing follows them.
    """

    def __init__(self) -> None:
        self.step = self.step_ns = self.samples = 0
        self.phase = ""
        self.numbered = False
        self.stepped = set[int]()  # what was counted since the step began
        self.step_begins: Callable[[int], None] | None = None


NOW = Now()


def note_step(step: int) -> None:
    """Note that a step begins, by the program's number for it."""
    NOW.numbered, NOW.step, NOW.step_ns = True, step, perf_counter_ns()
    if NOW.step_begins is not None:
        NOW.step_begins(step)


def count_step(by: int) -> bool:
    """Count a synchronisation of something, by its id, as a step; return whether a step has begun.

    Of several models or optimizers that take turns, all together count once. Steps that the program numbers stay so.
    """
    begins = not NOW.stepped or by in NOW.stepped
    NOW.stepped = {by} if begins else {*NOW.stepped, by}
    if begins and not NOW.numbered:
        NOW.step += 1
        NOW.step_ns = perf_counter_ns()
        if NOW.step_begins is not None:
            NOW.step_begins(NOW.step)
    return begins


def note_samples(samples: int) -> None:
    """Add to the samples that this rank has trained on."""
    NOW.samples += samples
