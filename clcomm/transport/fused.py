"""A prepared all-reduce in one kernel of each rank: meeting, sum and second meeting, for ranks that have a core each.

Where no rank waits for a core, an all-reduce of a few KiB costs as much as the Python code around its sum. The kernel
does what MeetingPoint does, on the same counters and boards: so other ranks may be in any other operation, or do the
same in Python, and all detect the mismatch. It polls for some 10 us at most. If the others have not arrived by then,
this rank goes on in Python, where waiting ranks yield, advance MPI, and notice that a rank has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Protocol

import numpy as np

from clcomm.host_arrays import aligned_empty
from clcomm.transport.meeting import DifferentOperations, MeetingPoint

#: Words (int64) of a call, as kernels/fold.cl has them. The caller sets tag, time of arrival and how often to poll, and
#: once this rank's number and the words of a cell. The kernel sets how far it came, how long this rank waited for the
#: last one, which that was, and how late it was.
TAG, ARRIVED_NS, POLLS, STATE, WAITED_NS, LAST_RANK, LATE_NS, _, RANK, STRIDE = range(10)
#: How far it came: to the end; the others had not arrived; they are in other operations; they have not summed yet.
COMPLETE, NOT_MET, DIFFERENT, NOT_LEFT = range(4)
_WORDS = 32
#: Polls of a kernel, which take about 10 us.
MOST_POLLS = 1 << 13


class MeetingFold(Protocol):
    """Prepares whole all-reduces."""

    def with_meetings(
        self, rows: Sequence[np.ndarray], out: np.ndarray, divisor: int, part: slice, cells: np.ndarray,
        call: np.ndarray,
    ) -> Callable[[], None] | None:  # fmt: skip
        """Return a function that meets the other ranks, folds a part of the rows, and meets them again; or None.

        Args:
            rows: each rank's array, in rank order.
            out: receives ((rows[0] + rows[1]) + ...) / divisor; rows[0], or memory apart from all rows.
            divisor: see there.
            part: the elements that this rank folds.
            cells: of the ranks' MeetingPoint.
            call: the words of a call; this sets those after STRIDE.
        """


class FusedReduction:
    """A prepared all-reduce: `launch` runs the kernel on `words`, then `complete` does what the kernel has left.

    Args:
        point: the ranks' meeting point.
        kind: see `length_and_dtype`.
        prepare: returns the kernel's function for the words of a call; None: the arrays are not of its kind.
        fold: folds this rank's part, where the ranks met too late for the kernel.
    """

    def __init__(
        self,
        point: MeetingPoint,
        kind: int,
        prepare: Callable[[np.ndarray], Callable[[], None] | None],
        fold: Callable[[], None],
    ):
        words = aligned_empty((_WORDS,), np.int64)
        words[:] = 0
        words[POLLS], words[RANK], words[STRIDE] = MOST_POLLS, point.rank, point.cells.shape[1]
        self.words = words.data
        self._point, self._kind, self._fold = point, kind, fold
        self.launch = prepare(words)

    def __call__(self) -> None:
        """Run it as part of the operation that was announced last."""
        words = self.words
        words[TAG], words[ARRIVED_NS] = self._point.tag + self._kind, perf_counter_ns()
        self.launch()  # type: ignore[misc]
        self.complete()

    def complete(self) -> None:
        """Do in Python what the kernel has left. Raises DifferentOperations as a meeting does."""
        point, words = self._point, self.words
        if words[STATE] == NOT_MET:
            point.wait(words[ARRIVED_NS])
            point.compare(words[TAG])
            self._fold()
            point.leave()
            return
        point.waited_ns, point.last = words[WAITED_NS], (words[LAST_RANK], words[LATE_NS] * 1e-9)
        if words[STATE] == DIFFERENT:
            raise DifferentOperations
        if words[STATE] == NOT_LEFT:
            point.wait(perf_counter_ns())
