"""Rehearsal: the kernels of a run, listed without building or running any.

PoCL compiles a kernel when it is first queued, so a first step takes seconds. Processes that share PoCL's cache can
divide that work: each rehearses the step and builds a part of its programs.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from clcomm.engine import program
from clcomm.engine.device import Device
from clcomm.engine.recorder import Allocation, InputIndex, RecordedLaunch, Segment
from clcomm.engine.recording import LaunchRecording

Program = tuple[object, ...]


@dataclass(frozen=True)
class _UnbuiltKernel:
    file: str
    name: str
    fast_math: bool
    defines: tuple[tuple[str, object], ...]

    @property
    def function_name(self) -> str:
        return self.name

    @property
    def program(self) -> Program:
        """The key of the program that contains the kernel."""
        return self.file, self.fast_math, tuple(sorted(self.defines))


@dataclass
class _FirstLaunch:
    """The first launch of a kernel with a given local size."""

    wanted: _UnbuiltKernel
    global_size: tuple[int, ...]
    local_size: tuple[int, ...] | None
    args: list[object] = field(repr=False)


class Rehearsal(Device):
    """A device that notes launches instead of queueing them; its memory is allocated but never written by kernels.

    Build a model on it and run a step; then `programs` lists the step's programs, and `build` builds some of them on
    the device that this one imitates.
    """

    def __init__(self, device: Device):
        self.__dict__.update(vars(device))
        self.device = device
        self._peak_bytes = device.memory.peak_bytes
        self.kept, self.outside = {}, None
        self.random_stream = None
        self._wanted: dict[object, _UnbuiltKernel] = {}
        self._launches: dict[object, _FirstLaunch] = {}

    def kernel(self, file: str, name: str, *, fast_math: bool = False, **defines: object) -> Any:
        wanted = _UnbuiltKernel(file, name, fast_math, tuple(defines.items()))
        return self._wanted.setdefault(wanted, wanted)

    def launch(
        self, kernel: Any, global_size: tuple[int, ...], local_size: tuple[int, ...] | None, *args: object
    ) -> None:
        values = [getattr(arg, "buffer", arg) for arg in args]
        self._launches.setdefault((kernel, local_size), _FirstLaunch(kernel, global_size, local_size, values))

    @property
    def programs(self) -> list[Program]:
        """The programs of the launched kernels, in the same order in every process that rehearsed the same step.

        The longest source is first: processes that share the work then end at about the same time.
        """
        found = {launch.wanted.program for launch in self._launches.values()}
        return sorted(found, key=lambda each: (-len(program.source_of(str(each[0]))), repr(each)))

    def build(self, programs: Iterable[Program]) -> None:
        """Build programs, and make the driver compile their kernels for the sizes at which they were launched.

        Each kernel runs once, on buffers of zeros; constants, such as sizes by which it divides, stay. Raises
        DeviceError if a program does not build.
        """
        chosen = set(programs)
        for launch in self._launches.values():
            if launch.wanted.program in chosen:
                self._run(launch)
        self.device.finish()

    def close(self) -> None:
        """Release unreferenced memory, and subtract the rehearsal from the device's peak."""
        self._launches.clear()
        self.kept, self.outside = {}, None
        gc.collect()  # models hold reference cycles, which keep memory
        memory = self.device.memory
        memory.release_unused()
        memory.peak_bytes = max(self._peak_bytes, memory.held_bytes)

    def _run(self, launch: _FirstLaunch) -> None:
        import numpy as np
        import pyopencl as cl

        wanted, zero = launch.wanted, np.zeros(1, np.uint8)
        kernel = self.device.kernel(wanted.file, wanted.name, fast_math=wanted.fast_math, **dict(wanted.defines))
        for value in launch.args:
            if isinstance(value, cl.MemoryObjectHolder) and not any(value is kept for kept in self.kept.values()):
                cl.enqueue_fill_buffer(self.device.queue, value, zero, 0, value.size)
        self.device.launch(kernel, launch.global_size, launch.local_size, *launch.args)


def shared_cache(device: Device) -> Path | None:
    """Return the kernel cache shared by this user's processes: PoCL's, or clcomm's for Intel's runtime; else None."""
    if not device.is_cpu:
        return None
    if program.serves(device.cl_device):
        return program.directory()
    is_pocl = device.cl_device.platform.name.strip() == "Portable Computing Language"
    if not is_pocl or os.environ.get("POCL_KERNEL_CACHE", "1") == "0":
        return None
    directory = os.environ.get("POCL_CACHE_DIR")  # as selection.prepare_environment sets it
    return Path(directory) if directory else None


def build_identity(device: Device) -> str:
    """Return a digest of everything that builds depend on: kernels, driver and device."""
    cl_device = device.cl_device
    parts = [cl_device.platform.version, cl_device.driver_version, cl_device.version, cl_device.name]
    parts += [repr((device.kind, device.compute_units, device.group, device.row_group, device.tuning))]
    parts += [program.all_sources()]
    return sha256("\0".join(parts).encode()).hexdigest()


# --- The first difference between two recordings of a function, launch by launch. ---


def first_difference(recorded: LaunchRecording, now: LaunchRecording) -> str | None:
    """Return a description of the first difference from a recording to a later one of the same function; None: none.

    Memory allocated in the runs differs each time: it counts as the same if all launches use it in the same places.
    """
    roles = _Roles(recorded.constants, now.constants)
    count = 0
    for before, after in zip(recorded.segments, now.segments, strict=False):
        for first, second in zip(before.launches, after.launches, strict=False):
            count += 1
            found = _of_launches(roles, first, second)
            if found is not None:
                return f"launch {count} {found}"
        found = _of_ends(before, after, count)
        if found is not None:
            return found
    hooks_before, hooks_now = len(recorded.segments) - 1, len(now.segments) - 1
    if hooks_before != hooks_now:
        return f"it ran {hooks_before} hooks and functions on the host, and runs {hooks_now} now"
    if len(recorded.results) != len(now.results):
        return f"it returned {len(recorded.results)} tensors, and returns {len(now.results)} now"
    for index, (before_result, after_result) in enumerate(zip(recorded.results, now.results, strict=True)):
        if before_result[:2] != after_result[:2] or not roles.are_alike(before_result[2], after_result[2]):
            return f"result {index} is another tensor"
    return None


def _of_launches(roles: _Roles, before: RecordedLaunch, after: RecordedLaunch) -> str | None:
    name, new_name = before.kernel.function_name, after.kernel.function_name
    if name != new_name:
        return f"was {name} and is {new_name} now"
    if before.kernel is not after.kernel:
        return f"({name}) was built with other options"
    if before.sizes != after.sizes:
        return f"({name}) was of size {before.sizes[0]} and is of {after.sizes[0]} now"
    for index, (one, other) in enumerate(zip(before.args, after.args, strict=True)):
        if not roles.are_alike(one, other):
            is_number = isinstance(one, (int, float)) and not isinstance(one, InputIndex)
            what = f"was {one} and is {other} now" if is_number else "is another buffer now"
            return f"({name}) has another argument: number {index} {what}"
    return None


def _of_ends(before: Segment, after: Segment, count: int) -> str | None:
    """Compare the ends of two segments: number of launches, states of gradients, and host functions."""
    if len(before.launches) != len(after.launches):
        longer = max(before.launches, after.launches, key=len)
        name = longer[min(len(before.launches), len(after.launches))].kernel.function_name
        return f"launch {count + 1} ({name}) {'is gone' if longer is before.launches else 'is new'}"
    if before.states != after.states:
        return f"after launch {count} other gradients are there"
    if _identity(before.function) != _identity(after.function):
        return f"after launch {count} another function runs on the host"
    return None


def _identity(function: object) -> object:
    """Return a value that is equal for functions created by the same code."""
    while hasattr(function, "func"):  # a partial
        function = function.func
    return getattr(function, "__qualname__", type(function))


class _Roles:
    """The pairs of corresponding memory in two runs."""

    def __init__(self, constants: dict[int, object], new_constants: dict[int, object]):
        self._constants, self._new_constants = constants, new_constants
        self._pairs: dict[int, Allocation] = {}
        self._taken: set[int] = set()

    def are_alike(self, before: object, after: object) -> bool:
        if isinstance(before, Allocation) and isinstance(after, Allocation):
            if id(before) not in self._pairs and id(after) not in self._taken:
                self._pairs[id(before)] = after
                self._taken.add(id(after))
            return self._pairs.get(id(before)) is after and before.nbytes == after.nbytes
        if isinstance(before, float) and isinstance(after, float):
            return repr(before) == repr(after)  # NaN is NaN, and 0 is not -0
        if hasattr(before, "int_ptr") and hasattr(after, "int_ptr"):
            held = self._constants.get(before.int_ptr)
            return bool(before == after) or (held is not None and held == self._new_constants.get(after.int_ptr))
        return type(before) is type(after) and bool(before == after)
