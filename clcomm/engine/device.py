"""A rank's OpenCL device: one context, one in-order queue, kernels built once, pooled memory.

Calls queue work and return; only reads to the host block.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine import host_addresses, intel_runtime, program, selection, sub_groups, timing
from clcomm.engine.launch_queue import LaunchQueue
from clcomm.engine.memory import Memory
from clcomm.engine.pocl import name_processor
from clcomm.engine.program import Kernel
from clcomm.engine.timing import KernelLog, Profile
from clcomm.engine.tuning import Tuning
from clcomm.engine.tuning import load as _load_tuning

if TYPE_CHECKING:
    import pyopencl as cl

#: Alignment, in bytes, of host memory that a buffer can lie on top of.
HOST_POINTER_ALIGNMENT = 128
_MOST_KEPT = 1024  # buffers of constants; beyond that the oldest is dropped
_CPU_RUN = 8192  # elements for each CPU work-item
_GPU_ROW_GROUP = 64  # work-items for each row of a row-wise kernel


class Device(LaunchQueue):
    """An OpenCL device with its context, in-order queue, kernel cache and memory pool.

    CPU kernels run one work-item per long run of elements; those of other devices run one per element, with work-groups
    of `group` items, and `row_group` items for each row of a row-wise kernel.

    Args:
        kind: "cpu", "gpu" or "accelerator"; None: as OpenCL reports.
        tuning: kernel sizes; None: those stored by `clcomm tune-kernels`, else the built-in ones.
    """

    def __init__(self, cl_device: cl.Device, *, kind: str | None = None, tuning: Tuning | None = None):
        import pyopencl as cl

        name_processor(cl_device)
        name: str = cl_device.name.strip()
        self.kind = kind or selection.device_kind(cl_device)
        is_cpu, is_intel = self.kind == "cpu", intel_runtime.is_intel(cl_device)
        self.compute_units: int = selection.compute_units(cl_device)
        in_caller = is_cpu and name.startswith("basic")  # PoCL's driver without worker threads
        properties = 0
        name += f" ({intel_runtime.PLATFORM})" if is_intel else ""
        if is_cpu and self.compute_units == 1 and intel_runtime.can_run_in_caller(cl_device):
            in_caller, properties = True, intel_runtime.IN_CALLER
        super().__init__(
            cl.Context([cl_device]), name, is_cpu=is_cpu, runs_in_caller=in_caller,
            takes_addresses=is_cpu and host_addresses.are_taken(cl_device), queue_properties=properties,
        )  # fmt: skip
        self.cl_device = cl_device
        self.driver = f"{cl_device.platform.name.strip()} {cl_device.driver_version.strip()}"
        self.shares_host_memory = self.is_cpu
        self.local_bytes: int = cl_device.local_mem_size
        #: Whether it reports half precision, in which it computes by itself.
        self.has_half = "cl_khr_fp16" in cl_device.extensions.split()
        self.tuning = _load_tuning(cl_device, self.kind) if tuning is None else tuning
        self.group = 1 if self.is_cpu else min(self.tuning.group, cl_device.max_work_group_size)
        self.row_group = 1 if self.is_cpu else min(_GPU_ROW_GROUP, cl_device.max_work_group_size)  # a power of two
        #: Whether divisions and roots can be IEEE 754's, as on CPUs; unless it is asked for, OpenCL allows 3 ulp.
        self.can_round = bool(cl_device.single_fp_config & cl.device_fp_config.CORRECTLY_ROUNDED_DIVIDE_SQRT)
        self.sub_groups = 0 if self.is_cpu else sub_groups.working(self.queue, self.row_group)
        self.memory = Memory(self.context, self.queue, self.name)
        self.memory.on_release = self.keep_while_queued
        self.buffer_alignment = max(128, cl_device.mem_base_addr_align // 8)  # bytes, of sub-buffers
        self._programs: dict[tuple[object, ...], cl.Program] = {}
        self._kernels: dict[tuple[object, ...], Kernel] = {}
        self.spare_kernels: dict[Kernel, list[cl.Kernel]] = {}  # released recordings' copies of each kernel
        self._grids: dict[int, tuple[tuple[int], tuple[int]]] = {}
        self.kept: dict[object, cl.Buffer] = {}  # buffers of constant values, by key
        self.random_stream: Any = None  # see random_stream.py
        if not in_caller:
            process_devices().computing.add(self)

    @staticmethod
    def select(
        spec: str | Device | None = None,
        *,
        local_rank: int | None = None,
        local_size: int | None = None,
        cores: int | None = None,
    ) -> Device:
        """Return this process's device.

        Args:
            spec: "gpu", "gpu:1", "cpu", "cpu:0" or part of a device or platform name; None: CLCOMM_DEVICE, else the
                GPUs round-robin by local rank, else the CPU.
            local_rank: this process's rank among the job's processes on its host; by default the launcher's.
            local_size: the number of these processes; by default the launcher's.
            cores: the cores that a CPU device may use; by default the host's cores are divided evenly.

        Raises:
            ArgumentError: `spec` is neither a Device nor a string.
            DeviceError: no device fits; the message lists those present.
        """
        if isinstance(spec, Device):
            return spec
        if spec is not None and not isinstance(spec, str):
            raise ArgumentError(f"device: expected a Device or a name such as 'gpu:0', got {spec!r}")
        rank, size = selection.local_place(local_rank, local_size)
        selection.prepare_environment(selection.core_share(size) if cores is None else cores, spec)
        return Device(selection.choose(spec, rank).cl_device)

    @property
    def family(self) -> str:
        """The kernels' kind and the driver; devices of one family round alike, and use tensors in the same order."""
        return f"{self.kind}, {self.driver}"

    def __copy__(self) -> Device:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Device:
        return self

    def __reduce__(self) -> NoReturn:
        raise ArgumentError("Device: expected to be selected in each process, got one to be pickled; leave it out")

    def __repr__(self) -> str:
        return f"Device({self.kind}: {self.name}, {self.compute_units} compute units)"

    def kernel(self, file: str, name: str, *, fast_math: bool = False, **defines: object) -> Kernel:
        """Return kernel `name` of `kernels/<file>.cl`, built once with `-D<define>=<value>` for each define.

        `fast_math` adds -cl-fast-relaxed-math, under which a compiler may assume that NaN and Inf never occur: only for
        sums of products, never for comparisons or transcendental functions. Raises DeviceError if it does not build.
        """
        key = (file, name, fast_math, *defines.items()) if defines or fast_math else (file, name)
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = program.typed_kernel(self._program(file, fast_math, defines), name)
        return kernel

    def _program(self, file: str, fast_math: bool, defines: dict[str, object]) -> cl.Program:
        key = (file, fast_math, *sorted(defines.items()))
        if key not in self._programs:
            defines = {**self.tuning.defines(file), **defines}
            options = [f"-D{name}={value}" for name, value in sorted(defines.items())]
            options += [f"-DGROUP={self.group}", f"-DROW_GROUP={self.row_group}"]
            options += ["-DON_CPU"] if self.is_cpu else []
            options += [f"-DSUB_GROUPS={self.sub_groups}"] if self.sub_groups else []
            options += ["-cl-fp32-correctly-rounded-divide-sqrt"] if self.can_round and not self.is_cpu else []
            options += ["-cl-fast-relaxed-math"] if fast_math else []
            self._programs[key] = program.build(self.context, file, options)
        return self._programs[key]

    def profile(self) -> AbstractContextManager[Profile]:
        """Time the kernels queued in a `with` block, on a separate queue; waits at both ends."""
        return timing.profile(self)

    def log_kernels(self) -> AbstractContextManager[KernelLog]:
        """Log when kernels run, on a separate queue, until a `with` block ends; waits at both ends only."""
        return timing.log_kernels(self)

    def grid(self, count: int) -> tuple[tuple[int], tuple[int]]:
        """Return (global, local) size for a FOR_EACH kernel over `count` elements."""
        sizes = self._grids.get(count)
        if sizes is None:
            if self.is_cpu:
                items = max(1, min(-(-count // _CPU_RUN), 2 * self.compute_units))
            else:
                items = max(1, min(-(-count // self.group), 32 * self.compute_units)) * self.group
            sizes = self._grids[count] = ((items,), (self.group,))
        return sizes

    def row_grid(self, rows: int, columns: int) -> tuple[tuple[int], tuple[int]]:
        """Return (global, local) size for a FOR_ROWS kernel over `rows` rows of `columns` elements."""
        if self.is_cpu:
            return (max(1, min(rows, rows * columns // _CPU_RUN, 2 * self.compute_units)),), (1,)
        return (max(1, min(rows, 64 * self.compute_units)) * self.row_group,), (self.row_group,)

    # -- memory

    @property
    def active_bytes(self) -> int:
        """Bytes of device memory in use."""
        return self.memory.active_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes of device memory that were ever held, including unused memory in the pool."""
        return self.memory.peak_bytes

    def allocate(self, nbytes: int) -> cl.Buffer:
        """Return a pooled buffer of at least `nbytes`, which returns to the pool with its last reference.

        It can be used again while kernels that read it are still queued, as the queue is in order.
        """
        if self.recorder is not None:
            return self.recorder.allocate(nbytes)
        return self.memory.allocate(nbytes)

    def upload(self, array: np.ndarray, *, copy: bool = True) -> Any:
        """Return a buffer holding the values of a C-contiguous host array, without waiting for the queue.

        With `copy` False it lies on top of the array if the device can use that memory.
        """
        self.not_replayable("brings values to the device")
        if self.shares_host_memory:
            if copy or not array.flags.writeable or array.__array_interface__["data"][0] % HOST_POINTER_ALIGNMENT:
                return self.memory.exact(copy_of=array)
            self.limit_kept_arrays()
            return self.memory.exact(on_top_of=array)
        buffer = self.allocate(array.nbytes)
        self.transfers.write(buffer, array)
        return buffer

    @staticmethod
    def lies_on(array: np.ndarray, buffer: object) -> bool:
        """Return whether a buffer of `upload` lies on top of this array."""
        return getattr(buffer, "array", None) is array

    def keep(self, key: object, make: Callable[[], np.ndarray]) -> cl.Buffer:
        """Return the constant buffer of a key; `make()` returns its values, uploaded at first use."""
        buffer = self.kept.get(key)
        if buffer is None:
            recorder, self.recorder = self.recorder, None  # a replay needs no upload: the buffer stays
            try:
                buffer = self.upload(make())
            finally:
                self.recorder = recorder
            if len(self.kept) >= _MOST_KEPT:
                del self.kept[next(iter(self.kept))]
            self.kept[key] = buffer
        return buffer

    def write(self, buffer: cl.Buffer, array: np.ndarray, offset: int = 0) -> None:
        """Copy a C-contiguous host array into a buffer at byte `offset`.

        Waits on devices that share the host's memory; from others it returns once the array may change.
        """
        import pyopencl as cl

        self.not_replayable("brings values to the device")
        if not self.shares_host_memory:
            self.transfers.write(buffer, array, offset)
            return
        with self.in_turn:
            cl.enqueue_copy(self.queue, buffer, array, dst_offset=offset, is_blocking=True)

    def read(self, buffer: cl.Buffer, array: np.ndarray, offset: int = 0) -> None:
        """Fill a C-contiguous host array from a buffer, from byte `offset` on; waits."""
        self.not_replayable("brings values to the host")
        with self.in_turn:
            self._enqueue_copy(self.queue, array, buffer, src_offset=offset, is_blocking=True)

    def read_one(self, buffer: Any, dtype: np.dtype) -> float | int | None:
        """Return the first element of a buffer that lies on a host array of this dtype where kernels write; waits.

        None for other buffers, and devices that do not take addresses.
        """
        array: np.ndarray | None = getattr(buffer, "array", None)
        if array is None or not self.takes_addresses or array.dtype != dtype:
            return None
        self.not_replayable("brings values to the host")
        with self.in_turn:
            self.queue.finish()
        value: float | int = array.item(0)
        return value

    def host_address(self, buffer: Any, nbytes: int) -> int:
        """Return the address of a buffer's first `nbytes`, on a device that shares the host's memory; waits.

        Such a device maps a buffer where it is, so the address holds as long as the buffer.
        """
        import pyopencl as cl

        self.not_replayable("hands memory to the host")
        flags: Any = cl.map_flags.READ | cl.map_flags.WRITE
        with self.in_turn:
            array, _ = cl.enqueue_map_buffer(self.queue, buffer, flags, 0, (nbytes,), np.dtype("u1"), is_blocking=True)
            address: int = array.__array_interface__["data"][0]
            array.base.release(self.queue)
            self.queue.finish()
        return address

    def copy(self, target: cl.Buffer, source: cl.Buffer, nbytes: int) -> None:
        """Queue a copy of the first `nbytes` of one buffer to another."""
        import pyopencl as cl

        self.not_replayable("copies buffers without a kernel")
        with self.in_turn:
            cl.enqueue_copy(self.queue, target, source, byte_count=nbytes)


class ProcessDevices:
    """The devices that this process has once.

    Attributes:
        default: the device of tensors and modules that name none; None: selected at first use.
        by_name: devices that a program selected by name, for the same one at each selection.
        computing: those that compute in threads of their own, or beside the host.
    """

    def __init__(self) -> None:
        self.default: Device | None = None
        self.by_name: dict[str, Device] = {}
        self.computing: weakref.WeakSet[Device] = weakref.WeakSet()
        atexit.register(self._finish)

    def _finish(self) -> None:
        """Wait for the devices: PoCL's threads crash in a compiler that the process's end has taken apart."""
        for device in list(self.computing):
            device.finish_at_exit()


@cache
def process_devices() -> ProcessDevices:
    """Return the devices of this process; made by the first call."""
    return ProcessDevices()


def default_device() -> Device:
    """Return the device that tensors and modules use when none is given; selected at first use."""
    devices = process_devices()
    if devices.default is None:
        devices.default = Device.select()
    return devices.default


def set_default_device(device: Device | str | None) -> None:
    """Make a device, or the one that a name such as "gpu:0" selects, the default; None: select again at next use."""
    process_devices().default = Device.select(device) if device is not None else None
