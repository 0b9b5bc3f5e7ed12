"""Works, the results of collectives, and the work queue that runs a group's collectives in order.

Classes that PyTorch calls are `untraced`: torch.compile would take a collective's Python code for a model's. While a
compiled model runs, Dynamo looks at every Python frame, those that PyTorch's C++ calls included. Marked methods run
unchanged, with all that they call.
"""

from __future__ import annotations

import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
from torch.distributed import Work

from clcomm.base.errors import ClcommError
from clcomm.comm.communicator import Communicator
from clcomm.comm.tensors.private_torch import (
    FrameAction,
    FrameStrategy,
    compare_shapes,
    completed_future,
    notify_join,
    run_joined,
    set_frame_strategy,
)
from clcomm.comm.watch import endings
from clcomm.comm.watch.job import this_job
from clcomm.sync.agreement import require_agreement
from clcomm.torch.interruptions import Interruptions

_Class = TypeVar("_Class", bound=type)
Outcome = tuple[list[torch.Tensor], BaseException | None]  # of a collective: outputs, and the error


def untraced(kind: _Class) -> _Class:
    """Mark all methods of a class, except those inherited from another marked one."""
    skipped = FrameStrategy(FrameAction.SKIP, FrameAction.SKIP)  # this frame, and those below it
    for value in vars(kind).values():
        method = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(method, types.FunctionType):
            set_frame_strategy(method.__code__, skipped)
    return kind


def in_stream_of(tensors: Sequence[torch.Tensor], move: Callable[[], object]) -> Callable[[], object]:
    """Return `move` in the caller's stream of the tensors' device, if it has streams: copies then keep their order.

    The thread that runs a collective has a stream of its own, which does not wait for the kernels of the caller's.
    """
    for device in {each.device for each in tensors if each.device.type != "cpu"}:
        module = getattr(torch, device.type, None)
        if module is not None and hasattr(module, "current_stream") and hasattr(module, "stream"):
            return partial(_in_stream, module, module.current_stream(device), move)
    return move


def _in_stream(module: Any, stream: object, move: Callable[[], object]) -> None:
    with module.stream(stream):
        move()


@untraced
class OwnWork(Work):
    """The work of a group's call; subclasses complete it."""

    def __init__(self, outputs: list[torch.Tensor], name: str):
        super().__init__()
        self._outputs, self._name = outputs, name
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def _late(self, seconds: float) -> ClcommError:
        return ClcommError(f"{self._name}: not complete after {seconds:g} s, which wait() allows")


@untraced
class CollectiveWork(OwnWork):
    """A collective in the queue, or done; `outputs` are the tensors that it writes."""

    def __init__(self, outputs: list[torch.Tensor], name: str):
        super().__init__(outputs, name)
        self._is_done = False
        self._ended: threading.Event | None = None  # made for those that have to wait
        self._future: torch.futures.Future[Outcome] | None = None

    def run(self, move: Callable[[], object]) -> None:
        """Run the collective in this thread; `wait` raises its error."""
        try:
            move()
        except BaseException as error:
            self._error = error
            if isinstance(error, ClcommError):
                endings.note_wrapped(error)  # a backward raises a RuntimeError in its place
        with self._lock:
            self._is_done = True
            ended, future = self._ended, self._future
        if ended is not None:
            ended.set()
        if future is not None:
            future.set_result((self._outputs, self._error))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until it is done, and raise its error; a timeout above 0 raises one too."""
        seconds = timeout.total_seconds()
        if not self.ends_within(seconds if seconds > 0 else None):
            raise self._late(seconds)
        if self._error is not None:
            raise self._error
        return True

    def ends_within(self, seconds: float | None) -> bool:
        """Block until it is done or the time is over, and return whether it is done; None: no limit."""
        with self._lock:
            if not self._is_done and self._ended is None:
                self._ended = threading.Event()
        return self._is_done or self._ended is None or self._ended.wait(seconds)

    def is_completed(self) -> bool:
        return self._is_done

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the list of outputs; if the collective fails, it has the error.

        PyTorch's hooks in C++ ask for C++'s own list of tensors, which the future of a complete collective has. They
        are called within a backward, or by a rank that has joined, where collectives are complete when they return.
        """
        if self._is_done and self._error is None and self._outputs:
            return completed_future(lambda: self._outputs)
        with self._lock:
            made, is_new = self._future, self._future is None
            if made is None:
                made = self._future = torch.futures.Future()
            is_done = self._is_done
        chained = made.then(_outputs_or_error)
        if is_new and is_done:
            made.set_result((self._outputs, self._error))
        return chained

    def __repr__(self) -> str:
        return f"<{self._name}: {'done' if self._is_done else 'in its turn'}>"


def _outputs_or_error(future: torch.futures.Future[Outcome]) -> list[torch.Tensor]:
    outputs, error = future.value()
    if error is not None:
        raise error
    return outputs


class WorkQueue:
    """Runs a group's collectives one after another, in the order of the calls.

    A blocking one runs in the caller's thread if nothing is before it, and is done when `take` returns; others run in
    the group's own thread, so that ranks may start those of several groups in different orders.
    """

    def __init__(self, name: str, interruptions: Interruptions):
        self._name, self._interruptions = name, interruptions
        self._state = threading.Condition()
        self._runs = threading.Lock()
        self._waiting: deque[tuple[CollectiveWork, Callable[[], object]]] = deque()
        self._unfinished = 0
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def take(self, work: CollectiveWork, move: Callable[[], object], blocking: bool) -> CollectiveWork:
        """Run a collective, or queue it."""
        move = partial(self._interruptions.run, move)
        if threading.current_thread() is self._thread or self._is_closed:
            work.run(move)  # called by a callback of the one that has just ended, or at the end of the program
            return work
        with self._state:
            in_turn = bool(self._unfinished) or not blocking
            if in_turn:
                self._queue(work, move)
            else:
                self._runs.acquire()
        if in_turn:
            if blocking:
                work.ends_within(None)
            return work
        try:
            work.run(move)
        finally:
            self._runs.release()
        return work

    def _queue(self, work: CollectiveWork, move: Callable[[], object]) -> None:
        self._waiting.append((work, move))
        self._unfinished += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"clcomm-{self._name}", daemon=True)
            self._thread.start()
            this_job().queues.add(self)
        self._state.notify()

    def _run(self) -> None:
        while True:
            with self._state:
                while not self._waiting and not self._is_closed:
                    self._state.wait()
                if not self._waiting:
                    return
                work, move = self._waiting.popleft()
            with self._runs:
                work.run(move)
            del work, move
            with self._state:
                self._unfinished -= 1

    def close(self, within_s: float | None = None) -> bool:
        """Complete all calls, and end the thread; return whether it ended within the time; None: no limit.

        Later calls run in the caller's thread.
        """
        with self._state:
            self._is_closed = True
            self._state.notify()
        if self._thread is None:
            return True
        if self._thread is threading.current_thread():
            return False
        self._thread.join(within_s)
        return not self._thread.is_alive()


# --- The PyTorch function behind a collective, where PyTorch gives the group no other sign of it. ---
# DistributedDataParallel and Join have no hooks for this package's work there; where a function changes its name, the
# import of `clcomm.comm.tensors.private_torch` says so.

#: The functions that are looked for: DistributedDataParallel's comparison of parameters, the all-reduce by which Join
#: notices ranks without inputs, and the all-reduces of such a rank in place of its backward's.
COMPARES, NOTIFIES, HAS_JOINED = (each.__name__ for each in (compare_shapes, notify_join, run_joined))
#: The constructor that calls the first.
MAKES = torch.nn.parallel.DistributedDataParallel.__init__.__name__
#: Frames between a group's method and such a function: torch.distributed's own, and its logger's.
_MOST_FRAMES = 4


def locals_of_caller(*names: str) -> tuple[str, dict[str, Any]]:
    """Return name and variables of the nearest calling function with one of these names; "", {}."""
    frame = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame.f_code.co_name in names:
            return frame.f_code.co_name, frame.f_locals
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "", {}


def require_same_parameters(comm: Communicator, parameters: Sequence[torch.Tensor]) -> None:
    """Raise the same MismatchError on every rank unless shapes and dtypes are equal; collective.

    DistributedDataParallel compares each rank with rank 0 in C++: ranks without a difference go on, and the others
    raise a RuntimeError whose traceback hides it. It has no hook, but calls the group's all-gather first.
    """
    lines = [f"{list(each.shape)} {each.dtype}" for each in parameters]
    require_agreement(comm, "DistributedDataParallel's parameters", lines, "build the same model on every rank")
