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
from clcomm.engine.ops.elements import TABLE
from training.engines import gather

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
    parts += [program.all_sources(), gather.SOURCE]
    parts += [repr([(op.value, op.given) for op in TABLE.values() if op.given])]
    return sha256("\0".join(parts).encode()).hexdigest()
