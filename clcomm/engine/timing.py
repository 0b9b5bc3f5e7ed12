"""How long kernels take, and how much of a step is anything else: Python, launches, waits."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from clcomm.engine.device import Device


class KernelTime(NamedTuple):
    """One launch: the kernel's name, its global size, and how long it ran."""

    name: str
    global_size: tuple[int, ...]
    seconds: float


#: What a device tells about a launch: the kernel, its global size and the event.
Launch = tuple[Any, tuple[int, ...], Any]


class Profile:
    """What Device.profile() saw: `launches` in order, once the block is over, and the `seconds` the block took."""

    def __init__(self) -> None:
        self.launches: list[KernelTime] = []
        self.seconds = 0.0
        self.events: list[Launch] = []
        self.note = self.events.append

    @property
    def kernel_s(self) -> float:
        """Seconds during which kernels ran."""
        return sum(launch.seconds for launch in self.launches)

    def close(self) -> None:
        """Ask the launches, which must be complete."""
        for kernel, global_size, event in self.events:
            seconds = (event.profile.end - event.profile.start) * 1e-9
            self.launches.append(KernelTime(kernel.function_name, global_size, seconds))
        self.events.clear()


@contextmanager
def profile(device: Device) -> Iterator[Profile]:
    """Time the kernels that a device queues within the block; waits at both ends."""
    outer, seen = device.note, Profile()
    with _timed(device, seen.note):
        begin = time.perf_counter()
        try:
            yield seen
        finally:
            device.queue.finish()
            seen.seconds = time.perf_counter() - begin
            if outer is not None:
                for launch in seen.events:
                    outer(launch)
            seen.close()


@contextmanager
def log_kernels(device: Device) -> Iterator[KernelLog]:
    """Note when a device's kernels run, until the block ends; waits there only."""
    with _timed(device, None):
        log = KernelLog(device)
        device.note = log.note
        yield log


@contextmanager
def _timed(device: Device, note: Callable[[Launch], None] | None) -> Iterator[None]:
    """Queue kernels where they are timed, and tell `note` about them; queues do not mix within a step."""
    device.finish()
    before = device.queue, device.note
    device.queue, device.note = device.timed_queue, note
    try:
        yield
    finally:
        device.queue.finish()
        device.queue, device.note = before


class KernelLog:
    """Launches of a device and when they ran, for someone who asks from time to time: nothing waits for a kernel.

    Events tell the time by a clock of the device's driver. Markers, queued between two looks at the host's clock, tell
    how far that is from `time.perf_counter_ns()`; of the latest ones the quickest counts.
    """

    _MARKERS = 8
    _MOST_NAMES = 4096  # kernels of recordings come and go

    def __init__(self, device: Device):
        import pyopencl as cl

        self._device, self._queue = device, device.queue
        self._marker, self._times = cl.enqueue_marker, cl.profiling_info
        self._status, self._complete = cl.event_info.COMMAND_EXECUTION_STATUS, cl.command_execution_status.COMPLETE
        self._launches: deque[Launch] = deque()
        self._names: dict[Any, str] = {}
        self._marks: deque[tuple[int, int, Any]] = deque(maxlen=self._MARKERS)
        self._offsets: deque[tuple[int, int]] = deque(maxlen=self._MARKERS)  # (uncertainty, offset)
        self.note = self._launches.append
        for _ in range(self._MARKERS):
            self._mark()
        self._queue.finish()
        self._read_marks()

    def pause(self, paused: bool) -> None:
        """Leave launches out from now on, or note them again."""
        self._device.note = None if paused else self.note

    def take(self) -> list[tuple[str, tuple[int, ...], int, int]]:
        """Return what has run since the last time: kernel, global size, begin and end by perf_counter_ns()."""
        self._read_marks()
        self._mark()
        launches, offset = self._launches, min(self._offsets)[1]
        start, end = self._times.START, self._times.END
        taken = []
        for _ in range(self._completed()):
            kernel, global_size, event = launches.popleft()
            tell = event.get_profiling_info
            taken.append((self._name(kernel), global_size, tell(start) + offset, tell(end) + offset))
        return taken

    @property
    def uncertainty_ns(self) -> int:
        """By how much the device's times may be off on the host's clock."""
        return min(self._offsets)[0]

    def _completed(self) -> int:
        launches = self._launches
        if launches and self._is_complete(launches[-1][2]):
            return len(launches)  # the queue runs in order
        return next((n for n, launch in enumerate(launches) if not self._is_complete(launch[2])), 0)

    def _is_complete(self, event: Any) -> bool:
        return event.get_info(self._status) == self._complete

    def _name(self, kernel: Any) -> str:
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
    """A step's seconds, and those of them in which its kernels ran; medians."""

    step_s: float
    kernel_s: float

    @property
    def share(self) -> float:
        """The part of the step, 0 to 1, in which the device was not at work."""
        return max(0.0, 1.0 - self.kernel_s / self.step_s)


def measure_overhead(device: Device, step: Callable[[], object], repeats: int = 50, warm_up: int = 5) -> Overhead:
    """Return what a step takes, end to end, and what its kernels take of it.

    Steps timed as a whole and steps whose kernels are timed by events take turns. Each launch counts with its median:
    what disturbs single steps on a busy machine does not show. Where kernels run in the calling thread, a step's time
    is that thread's CPU time, which other processes don't lengthen. `step` must queue the same launches each time.
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
        with device.profile() as profile:
            step()
        if number >= 0:
            steps.append(whole)
            kernels.append([launch.seconds for launch in profile.launches])
    each = (statistics.median(times) for times in zip(*kernels, strict=True))
    return Overhead(statistics.median(steps), sum(each))
