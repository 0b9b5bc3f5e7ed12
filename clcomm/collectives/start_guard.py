"""What watches an operation in the background until all ranks have started it."""

from __future__ import annotations

from collections.abc import Callable

from clcomm.transport.meeting import Meeting
from clcomm.transport.start_order import StartOrder

#: What ranks that come to a meeting from such an operation add to its tag: no array has this length and dtype.
_IN_BACKGROUND = 63


class StartGuard:
    """Finds ranks that came to another operation: `clcomm.transport.pending.Guard`.

    Args:
        meeting: at which ranks compare their blocking calls.
        order: what the ranks of the host have started; None: the transport compares that itself.
        number: of this operation.
        tag: of this operation, which ranks compare.
        settle: as Guard's.
    """

    def __init__(
        self, meeting: Meeting, order: StartOrder | None, number: int, tag: int, settle: Callable[[], Exception]
    ):
        self._meeting, self._order = meeting, order
        self._number, self._tag, self.settle = number, tag, settle

    def look(self) -> None:
        """Raise DifferentOperations if ranks wait in different operations.

        All then come to a meeting: those in blocking calls are there, and the others find out in the same way.
        """
        if self._order is not None and self._order.differs(self._number, self._tag):
            self._meeting.announce(self._tag)
            self._meeting.barrier(_IN_BACKGROUND)
