"""How long kernels take, and how much of a step is anything else: Python, launches, waits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from clcomm.engine.device import Device


class KernelTime(NamedTuple):
    """One launch: the kernel's name, its global size, and how long it ran."""

    name: str
    global_size: tuple[int, ...]
    seconds: float


class Profile:
    """What Device.profile() saw: `launches` in order, once the block is over, and the `seconds` the block took."""

    def __init__(self) -> None:
        self.launches: list[KernelTime] = []
        self.seconds = 0.0
        self._events: list[tuple[Any, tuple[int, ...], Any]] = []

    @property
    def kernel_s(self) -> float:
        """Seconds during which kernels ran."""
        return sum(launch.seconds for launch in self.launches)

    def note(self, kernel: Any, global_size: tuple[int, ...], event: Any) -> None:
        """Remember a launch until it can be asked how long it took."""
        self._events.append((kernel, global_size, event))

    def close(self) -> None:
        """Ask the launches, which must be complete."""
        for kernel, global_size, event in self._events:
            seconds = (event.profile.end - event.profile.start) * 1e-9
            self.launches.append(KernelTime(kernel.function_name, global_size, seconds))
        self._events.clear()


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
