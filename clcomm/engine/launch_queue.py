"""A device's in-order queue of kernels: launched, timed, recorded and waited for."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from functools import cached_property
from operator import is_not
from sys import is_finalizing
from threading import RLock, get_ident
from typing import TYPE_CHECKING, Any

import numpy as np

from clcomm.base.errors import DeviceError, ShortageError
from clcomm.engine import host_addresses, pocl, program
from clcomm.engine.memory import Transfers
from clcomm.engine.program import Kernel, Size
from clcomm.engine.recorder import Recorder

if TYPE_CHECKING:
    import numpy as np
    import pyopencl as cl

#: A launch as observers get it: the kernel, its global size and the event.
LaunchEvent = tuple[Kernel, Size, "cl.Event"]

#: Numbers operations on the tape and writes to tensors in the order in which the program makes them.
orders = itertools.count()
_MOST_KEPT_ARRAYS = 64


class LaunchQueue:
    """The in-order queue of a device, and the launches in it.

    Args:
        name: the device's name in messages.
        is_cpu: whether the device computes on the host's cores.
        runs_in_caller: whether kernels run in the thread that queues or awaits them, as on PoCL's `basic` device.
        takes_addresses: whether kernels take the address of a buffer in its place, see host_addresses.py.
        queue_properties: OpenCL's properties of each queue of the device.
    """

    #: Where kernels note targets that are no classes, once one does, and whether gradients may be of such ones, see
    #: tensor_methods.py.
    outside: Any = None
    in_doubt = False

    def __init__(
        self, context: cl.Context, name: str, *, is_cpu: bool, runs_in_caller: bool, takes_addresses: bool = False,
        queue_properties: int = 0,
    ):  # fmt: skip
        import pyopencl as cl

        self.context, self.name = context, name
        self.is_cpu, self.runs_in_caller, self.takes_addresses = is_cpu, runs_in_caller, takes_addresses
        self._queue_properties = queue_properties
        self.queue = self.new_queue()
        self.launching = RLock()  # held while a kernel's arguments are set and it is queued, as threads share kernels
        # Where kernels run in the calling thread, PoCL lets a thread run kernels that others have queued, and two
        # threads may then wait for each other's events. So one thread at a time uses such a device.
        self.in_turn = self.launching if runs_in_caller else nullcontext()
        self.revision = 0  # grows when memory, hooks or requires_grad of tensors change, which voids recordings
        self.written_at = -1  # the number of the last write that a tensor on it has noted
        self.note: Callable[[LaunchEvent], None] | None = None  # called with each launch
        #: Called with its number at the end of each backward, like planned hooks: what they return runs next, also
        #: in replays.
        self.backward_ends: list[Callable[[int], Callable[[], object] | None]] = []
        self._kept_arrays: deque[tuple[cl.Event, np.ndarray]] = deque()  # see keep_while_queued
        self._recorders: dict[int, Recorder] = {}  # by the thread whose run they record
        self._enqueue, self._enqueue_marker = cl.enqueue_nd_range_kernel, cl.enqueue_marker
        self._enqueue_copy = cl.enqueue_copy
        self._complete = cl.command_execution_status.COMPLETE
        self._error = cl.Error

    def note_write(self, place: Any) -> None:
        """Note a write to a buffer, or to what stands for one: operations before it that kept it have no backward."""
        self.written_at = place.written_at = next(orders)

    def launch(self, kernel: Kernel, global_size: Size, local_size: Size | None, *args: object) -> None:
        """Queue a kernel; `args` are buffers, tensors and plain or NumPy numbers."""
        values = [getattr(arg, "buffer", arg) for arg in args]
        try:
            with self.launching:
                event = kernel(self.queue, global_size, local_size, *values)
        except self._error as error:
            raise self._failed(kernel, error) from None
        if self._recorders and self.recorder is not None:
            self.recorder.launch(kernel, (global_size, local_size), values)
        if self.note is not None:
            self.note((kernel, global_size, event))

    def repeated_launch(self) -> RepeatedLaunch:
        """Return a function like `launch`, for a kernel launched repeatedly with few changes."""
        return RepeatedLaunch(self)

    def launch_all(self, launches: Iterable[tuple[Any, Size, Size | None]]) -> None:
        """Queue kernels with their arguments set: (kernel, global size, local size) of each."""
        enqueue, queue, note = self._enqueue, self.queue, self.note
        try:
            with self.launching:
                if note is None:
                    for kernel, global_size, local_size in launches:
                        enqueue(queue, kernel, global_size, local_size)
                else:
                    for kernel, global_size, local_size in launches:
                        note((kernel, global_size, enqueue(queue, kernel, global_size, local_size)))
        except self._error as error:
            raise self._failed(kernel, error) from None

    def _failed(self, kernel: Kernel, error: BaseException) -> DeviceError:
        text = " | ".join(line.strip() for line in str(error).splitlines() if line.strip())
        shortage = pocl.shortage()  # PoCL compiles a kernel for its sizes when it is first queued
        if shortage:
            return ShortageError(f"kernel {kernel.function_name} on {self.name}, {shortage}: {text}")
        return DeviceError(f"kernel {kernel.function_name} on {self.name}: {text}")

    @cached_property
    def transfers(self) -> Transfers:
        """Copies in queues of their own, which do not wait for everything in this one."""
        return Transfers(self.context, lambda: self.queue, self.in_turn)

    @cached_property
    def timed_queue(self) -> cl.CommandQueue:
        """A queue whose events record when kernels ran."""
        import pyopencl as cl

        return self.new_queue(cl.command_queue_properties.PROFILING_ENABLE)

    def new_queue(self, properties: int = 0) -> cl.CommandQueue:
        """Return another in-order queue of the device, with further properties of OpenCL's."""
        import pyopencl as cl

        flags = self._queue_properties | int(properties)
        return cl.CommandQueue(self.context, properties=flags)  # type: ignore[arg-type]

    def finish(self) -> None:
        """Wait until everything queued is done."""
        self.not_replayable("waits for the device")
        with self.in_turn:
            self.queue.finish()
        with self.launching:
            self._drop_kept_arrays()

    def finish_at_exit(self) -> None:
        """Wait until everything queued is done, whatever this process's other threads hold; never raises."""
        with suppress(self._error):
            self.queue.finish()

    def keep_while_queued(self, array: np.ndarray) -> None:
        """Keep a released buffer's array until the kernels queued so far are done, as drivers do not.

        Garbage collection calls this in any thread, so it waits for nothing.
        """
        if not self.runs_in_caller and not is_finalizing():  # at the interpreter's end nothing can be queued
            with suppress(self._error):
                self._kept_arrays.append((self._enqueue_marker(self.queue), array))
                self.queue.flush()
            if self.launching.acquire(blocking=False):
                self._drop_kept_arrays()
                self.launching.release()

    def _drop_kept_arrays(self) -> None:
        while self._kept_arrays and self._kept_arrays[0][0].command_execution_status == self._complete:
            self._kept_arrays.popleft()

    def limit_kept_arrays(self) -> None:
        """Wait for the queue if it keeps many arrays of released buffers."""
        if len(self._kept_arrays) >= _MOST_KEPT_ARRAYS:
            self.finish()

    # -- recording, see replay.py

    @property
    def recorder(self) -> Recorder | None:
        """The Recorder of the run in this thread; None: no run is recorded."""
        recorders = self._recorders
        return recorders.get(get_ident()) if recorders else None

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        if recorder is None:
            self._recorders.pop(get_ident(), None)
        else:
            self._recorders[get_ident()] = recorder

    def on_host(self, function: Callable[..., object], *args: object) -> None:
        """Run `function`; while a step is recorded, add it to each replay at this point.

        Kernels that `function` queues are not recorded.
        """
        recorder = self.recorder
        if recorder is None:
            function(*args)
            return
        recorder.end_segment(function, args)
        self.recorder = None
        try:
            function(*args)
        finally:
            self.recorder = recorder
        recorder.begin_segment()

    @property
    def is_observed(self) -> bool:
        """Whether launches are recorded, or noted one by one."""
        return self.note is not None or bool(self._recorders and self.recorder is not None)

    def not_replayable(self, what: str) -> None:
        """Notify a recording under way, if any, of something that a replay cannot do."""
        if self.recorder is not None:
            self.recorder.refuse(f"it {what}")


class RepeatedLaunch:
    """Launches one kernel repeatedly; its arguments are set only when one is another object than last time.

    They are set together: PyOpenCL takes up to 30 us to set a single number, which may be anything, and one to set all
    arguments of a kernel whose types it knows.
    """

    def __init__(self, device: LaunchQueue):
        import pyopencl as cl

        self._device, self._kernel_class = device, cl.Kernel
        self._kernel: Kernel | None = None  # the one of which `_bound` is a copy
        self._bound: Any = None
        self._args: tuple[object, ...] = ()

    def __call__(self, kernel: Kernel, global_size: Size, local_size: Size | None, *args: object) -> None:
        """Queue the kernel; `args` are buffers and numbers."""
        device = self._device
        if device.is_observed or not isinstance(kernel, self._kernel_class):
            device.launch(kernel, global_size, local_size, *args)
            return
        with device.launching:
            known, self._kernel = self._kernel, None  # bound anew if an argument is refused
            if kernel is not known or any(map(is_not, args, self._args)):
                given = [host_addresses.kept_argument(device, arg) for arg in args]
                if kernel is known:
                    self._bound.set_args(*given)
                else:
                    self._bound = program.bound_copy(kernel, given)
                    self._bound.set_arg_types(program.argument_types(kernel))
            self._kernel, self._args = kernel, args  # a kernel does not keep its arguments alive
            device.launch_all(((self._bound, global_size, local_size),))


# --- Marks in a device's queue, for which the host can wait while the device continues. ---


class QueueMark:
    """A position in a queue, after everything queued so far.

    Attributes:
        leaves_cores: whether the device computes without the host's cores.
    """

    def __init__(self, device: LaunchQueue):
        import pyopencl as cl

        self.leaves_cores = not device.is_cpu
        self._device = device
        self._event: cl.Event = cl.enqueue_marker(device.queue)
        self._complete = cl.command_execution_status.COMPLETE
        device.queue.flush()

    @property
    def is_reached(self) -> bool:
        return bool(self._event.command_execution_status == self._complete)

    def wait(self) -> None:
        self._event.wait()

    def read(self, buffer: cl.Buffer, array: np.ndarray, offset: int) -> None:
        """Fill a C-contiguous host array from a buffer, from byte `offset` on, once the mark is reached; waits.

        The copy is in another queue: kernels queued after the mark continue, and must not write to that range.
        """
        self._device.transfers.read(buffer, array, offset, [self._event])
