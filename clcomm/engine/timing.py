"""Kernel times, and the share of a step in which no kernel runs: Python, launches, waits."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from clcomm.engine.launch_queue import LaunchEvent, LaunchQueue
from clcomm.engine.program import Kernel

if TYPE_CHECKING:
    import pyopencl as cl


class KernelTime(NamedTuple):
    """One launch: kernel name, global size, and run time."""

    name: str
    global_size: tuple[int, ...]
    seconds: float


class Profile:
    """The result of Device.profile(): after the block, its `launches` in order and its `seconds`."""

    def __init__(self) -> None:
        self.launches: list[KernelTime] = []
        self.seconds = 0.0
        self.events: list[LaunchEvent] = []
        self.note = self.events.append

    @property
    def kernel_s(self) -> float:
        return sum(launch.seconds for launch in self.launches)

    def close(self) -> None:
        """Read the launches' times; they must be complete."""
        for kernel, global_size, event in self.events:
            seconds = (event.profile.end - event.profile.start) * 1e-9
            self.launches.append(KernelTime(kernel.function_name, global_size, seconds))
        self.events.clear()


@contextmanager
def profile(device: LaunchQueue) -> Iterator[Profile]:
    """Time the kernels that a device queues in the block; waits at both ends."""
    outer_note, profiled = device.note, Profile()
    with _timed(device, profiled.note):
        begin = time.perf_counter()
        try:
            yield profiled
        finally:
            device.queue.finish()
            profiled.seconds = time.perf_counter() - begin
            if outer_note is not None:
                for launch in profiled.events:
                    outer_note(launch)
            profiled.close()


@contextmanager
def log_kernels(device: LaunchQueue) -> Iterator[KernelLog]:
    """Log when a device's kernels run, until the block ends; waits at both ends only."""
    with _timed(device, None):
        log = KernelLog(device)
        device.note = log.note
        yield log


@contextmanager
def _timed(device: LaunchQueue, note: Callable[[LaunchEvent], None] | None) -> Iterator[None]:
    """Queue all kernels of the block in the timed queue, and call `note` with each launch."""
    device.finish()
    before = device.queue, device.note
    device.queue, device.note = device.timed_queue, note
    try:
        yield
    finally:
        device.queue.finish()
        device.queue, device.note = before


class KernelLog:
    """Launches of a device and when they ran, read from time to time without waiting for a kernel.

    Events have times of the driver's clock. Markers, queued between two readings of `time.perf_counter_ns()`, give its
    offset from the host's clock; of the latest markers the one with the shortest interval between the readings counts.
    """

    _MARKERS = 8
    _MOST_NAMES = 4096  # bounded, as recordings make and release kernels

    def __init__(self, device: LaunchQueue):
        import pyopencl as cl

        self._device, self._queue = device, device.queue
        self._marker, self._times = cl.enqueue_marker, cl.profiling_info
        self._status, self._complete = cl.event_info.COMMAND_EXECUTION_STATUS, cl.command_execution_status.COMPLETE
        self._launches: deque[LaunchEvent] = deque()
        self._names: dict[Kernel, str] = {}
        self._marks: deque[tuple[int, int, Any]] = deque(maxlen=self._MARKERS)
        self._offsets: deque[tuple[int, int]] = deque(maxlen=self._MARKERS)  # (uncertainty, offset)
        self.note = self._launches.append
        for _ in range(self._MARKERS):
            self._mark()
        self._queue.finish()
        self._read_marks()

    def pause(self, paused: bool) -> None:
        self._device.note = None if paused else self.note

    def take(self) -> list[tuple[str, tuple[int, ...], int, int]]:
        """Return the launches completed since the last call: kernel, global size, begin and end (perf_counter_ns)."""
        self._read_marks()
        self._mark()
        launches, offset = self._launches, min(self._offsets)[1]
        start, end = self._times.START, self._times.END
        taken = []
        for _ in range(self._completed()):
            kernel, global_size, event = launches.popleft()
            read: Callable[..., Any] = event.get_profiling_info
            taken.append((self._name(kernel), global_size, read(start) + offset, read(end) + offset))
        return taken

    @property
    def uncertainty_ns(self) -> int:
        """The largest error of the returned times, from the offset between the two clocks."""
        return min(self._offsets)[0]

    def _completed(self) -> int:
        launches = self._launches
        if launches and self._is_complete(launches[-1][2]):
            return len(launches)  # the queue runs in order
        return next((n for n, launch in enumerate(launches) if not self._is_complete(launch[2])), 0)

    def _is_complete(self, event: cl.Event) -> bool:
        return bool(event.get_info(self._status) == self._complete)

    def _name(self, kernel: Kernel) -> str:
        name = self._names.get(kernel)
        if name is None:
            if len(self._names) >= self._MOST_NAMES:
                self._names.clear()
            name = self._names[kernel] = kernel.function_name
        return name

    def _mark(self) -> None:
        begin = time.perf_counter_ns()
        event = self._marker(self._queue)
        self._marks.append((begin, time.perf_counter_ns(), event))

    def _read_marks(self) -> None:
        while self._marks and self._is_complete(self._marks[0][2]):
            begin, end, event = self._marks.popleft()
            queued = event.get_profiling_info(self._times.QUEUED)
            self._offsets.append(((end - begin + 1) // 2, (begin + end) // 2 - queued))


class Overhead(NamedTuple):
    """A step's time and its kernels' time in seconds, both medians."""

    step_s: float
    kernel_s: float

    @property
    def share(self) -> float:
        """The share of the step, 0 to 1, in which no kernel ran."""
        return max(0.0, 1.0 - self.kernel_s / self.step_s)


def measure_overhead(device: LaunchQueue, step: Callable[[], object], repeats: int = 50, warm_up: int = 5) -> Overhead:
    """Return a step's time and its kernels' time.

    Whole steps alternate with steps whose kernels are timed by events. Each launch counts with its median,
    so that disturbed steps on a busy machine do not matter. Where kernels run in the calling thread, a step's time is
    that thread's CPU time, which other processes don't lengthen.

    Args:
        step: runs one step, with the same launches each time.
        repeats: measured steps of each kind.
        warm_up: untimed steps before these.
    """
    clock = time.thread_time if device.runs_in_caller else time.perf_counter
    steps: list[float] = []
    kernels: list[list[float]] = []
    for number in range(-warm_up, repeats):
        device.finish()
        begin = clock()
        step()
        device.finish()
        whole = clock() - begin
        with profile(device) as profiled:
            step()
        if number >= 0:
            steps.append(whole)
            kernels.append([launch.seconds for launch in profiled.launches])
    each = (statistics.median(times) for times in zip(*kernels, strict=True))
    return Overhead(statistics.median(steps), sum(each))
