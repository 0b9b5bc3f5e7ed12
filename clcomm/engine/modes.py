"""The modes of a thread: whether its operations are recorded, and where its gradients go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from clcomm.engine.tensor import Tensor


#: Makes a context manager that changes what a forward pass finds, such as modules' attributes.
Surrounding = Callable[[], AbstractContextManager[None]]


class _Modes(threading.local):
    """The modes of a thread; a new thread records, as in PyTorch."""

    recording = True
    backward = 0
    recomputing = False
    surroundings: tuple[Surrounding, ...] = ()  # the outermost first
    apart: dict[object, Tensor] | None = None  # by node or leaf's id, gradients that are results and go to no leaf

    def __init__(self) -> None:
        self.pending: dict[int, Tensor] = {}  # what leaves with gradient hooks have got so far, by their ids


modes = _Modes()


def current_backward() -> int:
    """Return the number of the backward() running in this thread, unique per run; 0: none."""
    return modes.backward


class _Recording(ContextDecorator):
    """A `with` block or decorator within which this thread's operations are recorded, or not."""

    records: ClassVar[bool]

    def __enter__(self) -> None:
        self._before = modes.recording
        modes.recording = self.records

    def __exit__(self, *exception: object) -> None:
        modes.recording = self._before

    def _recreate_cm(self) -> _Recording:
        return type(self)()  # a decorated function may call itself


class no_grad(_Recording):
    """A `with` block or decorator within which this thread's operations are not recorded for backward()."""

    records = False


class enable_grad(_Recording):
    """A `with` block or decorator within which this thread's operations are recorded, also within `no_grad`."""

    records = True


class set_grad_enabled(ContextDecorator):
    """Record this thread's operations, or not, from now on; as a `with` block or decorator within it."""

    def __init__(self, mode: bool):
        self._mode, self._before = bool(mode), modes.recording
        modes.recording = self._mode

    def __enter__(self) -> None:
        modes.recording = self._mode

    def __exit__(self, *exception: object) -> None:
        modes.recording = self._before

    def _recreate_cm(self) -> set_grad_enabled:
        return type(self)(self._mode)

    def __call__(self, function: Any) -> Any:
        modes.recording = self._before  # it decorates, and changes nothing here
        return super().__call__(function)


def is_recording() -> bool:
    """Return whether this thread's operations are recorded for backward()."""
    return modes.recording


def is_recomputing() -> bool:
    """Return whether a `checkpoint` computes again what its forward has computed in this thread."""
    return modes.recomputing


@contextmanager
def surrounded(by: tuple[Surrounding, ...]) -> Iterator[None]:
    """Within it this thread is in contexts made anew, as is what a `checkpoint` within it computes again later."""
    before = modes.surroundings
    with ExitStack() as stack:
        stack.callback(setattr, modes, "surroundings", before)
        modes.surroundings = before + by
        for make in by:
            stack.enter_context(make())
        yield


@contextmanager
def apart(recorded: bool, totals: dict[object, Tensor] | None) -> Iterator[None]:
    """Within it this thread's gradients are results: `Context.out` is no leaf's; recorded: they are put on the tape.

    totals: those found so far, by node, or by the id of a leaf; None: gradients go to leaves.
    """
    before = modes.recording, modes.apart
    modes.recording, modes.apart = recorded, totals
    try:
        yield
    finally:
        modes.recording, modes.apart = before


def afresh() -> AbstractContextManager[None]:
    """Within it this thread records operations, and gradients go to leaves, whatever it does otherwise."""
    return apart(True, None)
