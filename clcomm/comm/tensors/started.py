"""Started operations on tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from clcomm.comm.collectives.in_flight import Handle

_Result = TypeVar("_Result")
_Changed = TypeVar("_Changed")


class Started(Generic[_Result]):
    """A started operation: the Communicator's handles, and the function that makes its result of theirs.

    Args:
        finish: called once all handles are complete; returns the result.
    """

    def __init__(self, handles: Sequence[Handle], finish: Callable[[], _Result]):
        self.handles, self._finish = handles, finish

    @classmethod
    def together(cls, started: Sequence[Started[_Result]]) -> Started[list[_Result]]:
        """Return several as one; its result is the list of theirs."""
        handles = [handle for each in started for handle in each.handles]
        return Started(handles, lambda: [each._finish() for each in started])

    def then(self, change: Callable[[_Result], _Changed]) -> Started[_Changed]:
        """Return the same with a changed result."""
        return Started(self.handles, lambda: change(self._finish()))

    def done(self) -> bool:
        """Advance it without blocking, and return whether it is complete."""
        return all(handle.done() for handle in self.handles)

    @property
    def failed(self) -> bool:
        """Whether it is complete with an error, which `wait` raises."""
        return any(handle.failed for handle in self.handles)

    def wait(self) -> _Result:
        """Wait for it and return its result; called once."""
        for handle in self.handles:
            handle.wait()
        return self._finish()
