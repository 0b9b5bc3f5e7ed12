"""Rehearsal: which kernels a run would queue, found without building or running any.

PoCL compiles a kernel when it is first queued, so a first step takes seconds. Processes that share PoCL's cache can
share that work: each rehearses the step, and builds a part of what it takes.
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

Program = tuple[Any, ...]


@dataclass(frozen=True)
class _Wanted:
    """A kernel that is not built: stands for it until then."""

    file: str
    name: str
    fast_math: bool
    defines: tuple[tuple[str, Any], ...]

    @property
    def function_name(self) -> str:
        return self.name

    @property
    def program(self) -> Program:
        """What has to be built for it, the same for all kernels of one program."""
        return self.file, self.fast_math, tuple(sorted(self.defines))


@dataclass
class _Launch:
    """The first launch of a kernel with some local size."""

    wanted: _Wanted
    global_size: tuple[int, ...]
    local_size: tuple[int, ...] | None
    args: list[Any] = field(repr=False)


class Rehearsal(Device):
    """A device that notes launches instead of queueing them; its memory is real, and what it holds means nothing.

    Build a model on it and run what is to be rehearsed; then `programs` are what that takes, and `build` makes some of
    them ready on the device that this one stands for.
    """

    def __init__(self, device: Device):
        self.__dict__.update(vars(device))
        self.device = device
        self._peak_bytes = device.memory.peak_bytes
        self.kept = {}
        self._wanted: dict[Any, _Wanted] = {}
        self._launches: dict[Any, _Launch] = {}

    def kernel(self, file: str, name: str, *, fast_math: bool = False, **defines: Any) -> Any:
        """Return what stands for the kernel."""
        wanted = _Wanted(file, name, fast_math, tuple(defines.items()))
        return self._wanted.setdefault(wanted, wanted)

    def launch(self, kernel: Any, global_size: tuple[int, ...], local_size: tuple[int, ...] | None, *args: Any) -> None:
        """Note a launch."""
        values = [getattr(arg, "buffer", arg) for arg in args]
        self._launches.setdefault((kernel, local_size), _Launch(kernel, global_size, local_size, values))

    @property
    def programs(self) -> list[Program]:
        """The programs whose kernels were launched, the same list in every process that rehearsed the same."""
        return sorted({launch.wanted.program for launch in self._launches.values()}, key=repr)

    def build(self, programs: Iterable[Program]) -> None:
        """Build programs, and have the driver compile their kernels for the sizes at which they were launched.

        The kernels run once, on buffers of zeros; nothing else sees those. Raises DeviceError where one does not build.
        """
        chosen = set(programs)
        for launch in self._launches.values():
            if launch.wanted.program in chosen:
                self._run(launch)
        self.device.finish()

    def close(self) -> None:
        """Give back what memory nobody refers to any longer; it does not count as the device's use."""
        self._launches.clear()
        self.kept = {}
        gc.collect()  # models refer to themselves in circles
        memory = self.device.memory
        memory.release_unused()
        memory.peak_bytes = max(self._peak_bytes, memory.held_bytes)

    def _run(self, launch: _Launch) -> None:
        import numpy as np
        import pyopencl as cl

        wanted, zero = launch.wanted, np.zeros(1, np.uint8)
        kernel = self.device.kernel(wanted.file, wanted.name, fast_math=wanted.fast_math, **dict(wanted.defines))
        for value in launch.args:
            if isinstance(value, cl.MemoryObjectHolder):
                cl.enqueue_fill_buffer(self.device.queue, value, zero, 0, value.size)
        self.device.launch(kernel, launch.global_size, launch.local_size, *launch.args)


def shared_cache(device: Device) -> Path | None:
    """Return where PoCL keeps what it built for CPUs, for all processes of this user; None for any other driver."""
    if not device.is_cpu or device.cl_device.platform.name.strip() != "Portable Computing Language":
        return None
    if os.environ.get("POCL_KERNEL_CACHE", "1") == "0":
        return None
    directory = os.environ.get("POCL_CACHE_DIR")  # as selection.prepare_environment sets it
    return Path(directory) if directory else None


def build_identity(device: Device) -> str:
    """Return a digest of all that builds depend on: kernels, driver and device."""
    cl_device = device.cl_device
    parts = [cl_device.platform.version, cl_device.driver_version, cl_device.version, cl_device.name]
    parts += [repr((device.kind, device.compute_units, device.group, device.row_group, device.tuning))]
    parts += [program.all_sources()]
    return sha256("\0".join(parts).encode()).hexdigest()
