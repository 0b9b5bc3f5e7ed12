"""A prepared all-reduce in one kernel of each rank: rendezvous and sum.

An all-reduce of a few KiB costs as much as the Python code around its sum. The kernel does what HostRendezvous does, on
the same counters and boards: so other ranks may be in any other operation, or do the same in Python, and all detect the
mismatch. If the others have not arrived soon, this rank goes on in Python, where waiting ranks yield, advance MPI, and
notice that a rank has failed.

Where each rank has a core, it polls for some 10 us, folds its own part, and meets the others again (`OwnPart`). Ranks
that share cores yield them between polls, and do not wait for the part of one that has no core just then
(`work_queue.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np

from clcomm.base.host.arrays import aligned_empty
from clcomm.comm.transport.rendezvous import DifferentOperations, HostRendezvous

#: Words (int64) of a call, as kernels/fold.cl has them. The caller sets tag, time of arrival and how often to poll, and
#: once this rank's number and the words of a cell. The kernel sets how far it came, how long this rank waited for the
#: last one, which that was, and how late it was.
TAG, ARRIVED_NS, POLLS, STATE, WAITED_NS, LAST_RANK, LATE_NS, _, RANK, STRIDE = range(10)
#: The words of a sum that ranks share, see `work_queue.py`, of which all have the sleepers' MARKS. The kernel sets the
#: last: how often it polled in vain.
CLAIMS, MARKS, PART, RESUMES, POLLED = range(24, 29)
#: How far it came: to the end; the others had not arrived; they are in other operations; they have not summed yet, or
#: sleep until all have; ranks sleep that this one has to wake before the sum.
COMPLETE, NOT_MET, DIFFERENT, NOT_LEFT, SLEEPERS = range(5)
_WORDS = 32
#: Polls of a kernel, which take about 10 us.
MOST_POLLS = 1 << 13


class RendezvousFold(Protocol):
    """Prepares whole all-reduces."""

    def with_rendezvous(
        self, rows: Sequence[np.ndarray], out: np.ndarray, divisor: int, part: slice, cells: np.ndarray,
        call: np.ndarray, shares: bool = False,
    ) -> Callable[[], object] | None:  # fmt: skip
        """Return a function that meets the other ranks, folds a part of the rows, and meets them again; or None.

        Args:
            rows: each rank's array, in rank order.
            out: receives ((rows[0] + rows[1]) + ...) / divisor; rows[0], or memory apart from all rows.
            divisor: see there.
            part: the elements that this rank folds.
            cells: of the ranks' HostRendezvous.
            call: the words of a call; this sets those after STRIDE and before CLAIMS.
            shares: fold parts of PART elements that no other rank has taken, in place of `part` and the second
                rendezvous.
        """


class FusedReduction(ABC):
    """A prepared all-reduce: `launch` runs the kernel on `words`, then `complete` does what the kernel has left.

    Where the kernel works on copies, `arrays` are operand and result.

    Args:
        rendezvous: the ranks' rendezvous.
        kind: see `length_and_dtype`.
        words: of the kernel's calls, the data of `words_of`.
        launch: the kernel's function for these words; None: the arrays are not of its kind.
    """

    def __init__(self, rendezvous: HostRendezvous, kind: int, words: memoryview, launch: Callable[[], object] | None):
        self._rendezvous, self.kind, self.words, self.launch = rendezvous, kind, words, launch
        self.arrays: tuple[np.ndarray, ...] = ()

    def __call__(self) -> None:
        """Run it as part of the operation that was announced last."""
        words = self.words
        words[TAG], words[ARRIVED_NS] = self._rendezvous.tag + self.kind, perf_counter_ns()
        self.launch()  # type: ignore[misc]
        self.complete()

    @abstractmethod
    def complete(self) -> None:
        """Do in Python what the kernel has left. Raises DifferentOperations as a rendezvous does."""

    def _note_rendezvous(self) -> None:
        """Note what the kernel found at the rendezvous. Raises DifferentOperations."""
        rendezvous, words = self._rendezvous, self.words
        rendezvous.waited_ns, rendezvous.last = words[WAITED_NS], (words[LAST_RANK], words[LATE_NS] * 1e-9)
        if words[STATE] == DIFFERENT:
            raise DifferentOperations


def words_of(rendezvous: HostRendezvous, polls: int) -> np.ndarray:
    """Return the words of a kernel that polls so often for the other ranks."""
    words = aligned_empty((_WORDS,), np.int64)
    words[:] = 0
    words[POLLS], words[RANK], words[STRIDE] = polls, rendezvous.rank, rendezvous.cells.shape[1]
    words[MARKS] = rendezvous.sleepers.ctypes.data
    return words


class OwnPart(FusedReduction):
    """Each rank folds its own part, between two rendezvous.

    fold: does so where the ranks met too late for the kernel.
    """

    def __init__(self, *args: Any, fold: Callable[[], None]):
        super().__init__(*args)
        self._fold = fold

    def complete(self) -> None:
        rendezvous, words = self._rendezvous, self.words
        if words[STATE] == NOT_MET:
            rendezvous.wait(words[ARRIVED_NS])
            rendezvous.compare(words[TAG])
        else:
            self._note_rendezvous()
        if words[STATE] == SLEEPERS:
            rendezvous.wake()
        if words[STATE] in (NOT_MET, SLEEPERS):
            self._fold()
            rendezvous.leave()
        elif words[STATE] == NOT_LEFT:
            rendezvous.wait(perf_counter_ns())
