"""A prepared all-reduce in one kernel of each rank: meeting and sum.

An all-reduce of a few KiB costs as much as the Python code around its sum. The kernel does what MeetingPoint does, on
the same counters and boards: so other ranks may be in any other operation, or do the same in Python, and all detect the
mismatch. If the others have not arrived soon, this rank goes on in Python, where waiting ranks yield, advance MPI, and
notice that a rank has failed.

Where each rank has a core, it polls for some 10 us, folds its own part, and meets the others again (`OwnPart`). Ranks
that share cores yield them between polls, and do not wait for the part of one that has no core just then
(`shared_work.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np

from clcomm.host.arrays import aligned_empty
from clcomm.transport.base import PreparedAllReduce
from clcomm.transport.meeting import DifferentOperations, MeetingPoint

#: Words (int64) of a call, as kernels/fold.cl has them. The caller sets tag, time of arrival and how often to poll, and
#: once this rank's number and the words of a cell. The kernel sets how far it came, how long this rank waited for the
#: last one, which that was, and how late it was.
TAG, ARRIVED_NS, POLLS, STATE, WAITED_NS, LAST_RANK, LATE_NS, _, RANK, STRIDE = range(10)
#: The words of a sum that ranks share; see `shared_work.py`. The kernel sets the last: how often it polled in vain.
CLAIMS, MARKS, PART, RESUMES, POLLED = range(24, 29)
#: How far it came: to the end; the others had not arrived; they are in other operations; they have not summed yet;
#: ranks sleep that this one has to wake.
COMPLETE, NOT_MET, DIFFERENT, NOT_LEFT, SLEEPERS = range(5)
_WORDS = 32
#: Polls of a kernel, which take about 10 us.
MOST_POLLS = 1 << 13


class MeetingFold(Protocol):
    """Prepares whole all-reduces."""

    def with_meetings(
        self, rows: Sequence[np.ndarray], out: np.ndarray, divisor: int, part: slice, cells: np.ndarray,
        call: np.ndarray, shares: bool = False,
    ) -> Callable[[], object] | None:  # fmt: skip
        """Return a function that meets the other ranks, folds a part of the rows, and meets them again; or None.

        Args:
            rows: each rank's array, in rank order.
            out: receives ((rows[0] + rows[1]) + ...) / divisor; rows[0], or memory apart from all rows.
            divisor: see there.
            part: the elements that this rank folds.
            cells: of the ranks' MeetingPoint.
            call: the words of a call; this sets those after STRIDE and before CLAIMS.
            shares: fold parts of PART elements that no other rank has taken, in place of `part` and the second meeting.
        """


class FusedReduction(PreparedAllReduce):
    """A prepared all-reduce: `launch` runs the kernel on `words`, then `complete` does what the kernel has left.

    Args:
        point: the ranks' meeting point.
        kind: see `length_and_dtype`.
        words: of the kernel's calls, as `words_of` returns them.
        launch: the kernel's function for these words; None: the arrays are not of its kind.
    """

    def __init__(self, point: MeetingPoint, kind: int, words: np.ndarray, launch: Callable[[], object] | None):
        self.words, self.launch = words.data, launch
        self._point, self._kind = point, kind

    def run(self) -> None:
        """Run it as part of the operation that was announced last."""
        words = self.words
        words[TAG], words[ARRIVED_NS] = self._point.tag + self._kind, perf_counter_ns()
        self.launch()  # type: ignore[misc]
        self.complete()

    def complete(self) -> None:
        """Do in Python what the kernel has left. Raises DifferentOperations as a meeting does."""
        raise NotImplementedError

    def _note_meeting(self) -> None:
        """Note what the kernel found at the meeting. Raises DifferentOperations."""
        point, words = self._point, self.words
        point.waited_ns, point.last = words[WAITED_NS], (words[LAST_RANK], words[LATE_NS] * 1e-9)
        if words[STATE] == DIFFERENT:
            raise DifferentOperations


def words_of(point: MeetingPoint, polls: int) -> np.ndarray:
    """Return the words of a kernel that polls so often for the other ranks."""
    words = aligned_empty((_WORDS,), np.int64)
    words[:] = 0
    words[POLLS], words[RANK], words[STRIDE] = polls, point.rank, point.cells.shape[1]
    return words


class OwnPart(FusedReduction):
    """Each rank folds its own part, between two meetings; fold: does so where the ranks met too late for the kernel."""

    def __init__(self, *args: Any, fold: Callable[[], None]):
        super().__init__(*args)
        self._fold = fold

    def complete(self) -> None:
        point, words = self._point, self.words
        if words[STATE] == NOT_MET:
            point.wait(words[ARRIVED_NS])
            point.compare(words[TAG])
            self._fold()
            point.leave()
            return
        self._note_meeting()
        if words[STATE] == NOT_LEFT:
            point.wait(perf_counter_ns())
