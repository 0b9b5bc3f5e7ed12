"""A rank's OpenCL device: one context, one in-order queue, kernels built once, memory from a pool.

Everything is queued and nothing waits, except where a caller asks for values on the host.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from clcomm.engine import program, selection
from clcomm.errors import ArgumentError, DeviceError
from clcomm.units import format_size

if TYPE_CHECKING:
    import pyopencl as cl

_CPU_RUN = 8192  # elements that are worth a CPU work-item of their own
_GPU_GROUP = 256
_GPU_ROW_GROUP = 64


class Device:
    """An OpenCL device with its context, in-order queue, kernel cache and memory pool.

    `kind` is "cpu", "gpu" or "accelerator". CPU kernels run one work-item per long run of elements; the others run
    one per element, with work-groups of `group` items, and `row_group` items for each row of a row-wise kernel.
    """

    def __init__(self, cl_device: cl.Device, *, kind: str | None = None):
        import pyopencl as cl
        from pyopencl.tools import ImmediateAllocator, MemoryPool

        self.cl_device = cl_device
        self.name: str = cl_device.name.strip()
        self.kind = kind or selection.device_kind(cl_device)
        self.is_cpu = self.kind == "cpu"
        self.shares_host_memory = self.is_cpu
        self.compute_units: int = cl_device.max_compute_units
        self.group = 1 if self.is_cpu else min(_GPU_GROUP, cl_device.max_work_group_size)
        self.row_group = 1 if self.is_cpu else min(_GPU_ROW_GROUP, cl_device.max_work_group_size)  # a power of two
        self.context = cl.Context([cl_device])
        self.queue = cl.CommandQueue(self.context)
        self._pool = MemoryPool(ImmediateAllocator(self.queue, cl.mem_flags.READ_WRITE))
        self._programs: dict[tuple[Any, ...], Any] = {}
        self._kernels: dict[tuple[Any, ...], Any] = {}
        self._grids: dict[int, tuple[tuple[int], tuple[int]]] = {}
        self.constants: dict[float, Any] = {}  # small tensors, by value
        self.plans: dict[Any, Any] = {}  # index plans of broadcasts, by shapes
        self._uploads: deque[tuple[Any, np.ndarray]] = deque()
        self._error = cl.Error

    @staticmethod
    def select(
        spec: str | Device | None = None,
        *,
        local_rank: int | None = None,
        local_size: int | None = None,
        cores: int | None = None,
    ) -> Device:
        """Return this process's device.

        `spec` is "gpu", "gpu:1", "cpu", "cpu:0" or part of a device or platform name; None means CLCOMM_DEVICE, else
        the GPUs round-robin by local rank, else the CPU. `cores` is how many cores a CPU device may use; by default
        the host's cores are shared out evenly. Raises DeviceError, listing what is there, when nothing fits.
        """
        if isinstance(spec, Device):
            return spec
        if spec is not None and not isinstance(spec, str):
            raise ArgumentError(f"device: expected a Device or a name such as 'gpu:0', got {spec!r}")
        rank, size = selection.local_place(local_rank, local_size)
        selection.prepare_environment(selection.core_share(size) if cores is None else cores)
        return Device(selection.choose(spec, rank).cl_device)

    def __repr__(self) -> str:
        return f"Device({self.kind}: {self.name}, {self.compute_units} compute units)"

    def kernel(self, file: str, name: str, *, fast_math: bool = False, **defines: Any) -> Any:
        """Return kernel `name` of `kernels/<file>.cl`, built once with `-D<define>=<value>` for each define.

        `fast_math` adds -cl-fast-relaxed-math, under which a compiler may assume that NaN and Inf never occur: only for
        sums of products, never for comparisons or transcendental functions. Raises DeviceError if it does not build.
        """
        key = (file, name, fast_math, *defines.items()) if defines or fast_math else (file, name)
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = program.typed_kernel(self._program(file, fast_math, defines), name)
        return kernel

    def _program(self, file: str, fast_math: bool, defines: dict[str, Any]) -> Any:
        key = (file, fast_math, *sorted(defines.items()))
        if key not in self._programs:
            options = [f"-D{name}={value}" for name, value in sorted(defines.items())]
            options += [f"-DGROUP={self.group}", f"-DROW_GROUP={self.row_group}"]
            options += ["-DON_CPU"] if self.is_cpu else []
            options += ["-cl-fast-relaxed-math"] if fast_math else []
            self._programs[key] = program.build(self.context, file, options)
        return self._programs[key]

    def launch(self, kernel: Any, global_size: tuple[int, ...], local_size: tuple[int, ...] | None, *args: Any) -> None:
        """Queue a kernel; `args` are buffers, tensors and plain or NumPy numbers. The one place that does so."""
        try:
            kernel(self.queue, global_size, local_size, *[getattr(arg, "buffer", arg) for arg in args])
        except self._error as error:
            raise DeviceError(f"kernel {kernel.function_name} on {self.name}: {_one_line(error)}") from None

    def grid(self, count: int) -> tuple[tuple[int], tuple[int]]:
        """Return (global, local) size for a FOR_EACH kernel over `count` elements."""
        sizes = self._grids.get(count)
        if sizes is None:
            if self.is_cpu:
                items = max(1, min(-(-count // _CPU_RUN), 2 * self.compute_units))
            else:
                items = min(-(-count // self.group), 32 * self.compute_units) * self.group
            sizes = self._grids[count] = ((items,), (self.group,))
        return sizes

    def row_grid(self, rows: int, columns: int) -> tuple[tuple[int], tuple[int]]:
        """Return (global, local) size for a FOR_ROWS kernel over `rows` rows of `columns` elements."""
        if self.is_cpu:
            return (max(1, min(rows, rows * columns // _CPU_RUN, 2 * self.compute_units)),), (1,)
        return (min(rows, 64 * self.compute_units) * self.row_group,), (self.row_group,)

    def allocate(self, nbytes: int) -> Any:
        """Return a pooled buffer of at least `nbytes`; it goes back to the pool when the last reference is dropped.

        The one in-order queue makes it safe to reuse while kernels that read it are still queued.
        """
        try:
            return self._pool.allocate(nbytes)
        except (self._error, MemoryError) as error:
            held = format_size(self._pool.active_bytes)
            asked = format_size(nbytes)
            raise DeviceError(f"{self.name}: no memory for {asked} beside {held} in use: {_one_line(error)}") from None

    def upload(self, array: np.ndarray) -> Any:
        """Return a buffer holding a copy of a C-contiguous host array, without waiting for the queue."""
        import pyopencl as cl

        if self.shares_host_memory:
            return cl.Buffer(self.context, cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR, hostbuf=array)
        buffer = self.allocate(array.nbytes)
        staged = array.copy()
        self._uploads.append((cl.enqueue_copy(self.queue, buffer, staged, is_blocking=False), staged))
        complete = cl.command_execution_status.COMPLETE
        while self._uploads and self._uploads[0][0].command_execution_status == complete:
            self._uploads.popleft()
        return buffer

    def write(self, buffer: Any, array: np.ndarray, offset: int = 0) -> None:
        """Copy a C-contiguous host array into a buffer, `offset` bytes in; waits."""
        import pyopencl as cl

        cl.enqueue_copy(self.queue, buffer, array, dst_offset=offset, is_blocking=True)

    def read(self, buffer: Any, array: np.ndarray, offset: int = 0) -> None:
        """Fill a C-contiguous host array from a buffer, `offset` bytes in; waits."""
        import pyopencl as cl

        cl.enqueue_copy(self.queue, array, buffer, src_offset=offset, is_blocking=True)

    def finish(self) -> None:
        """Wait until everything queued is done."""
        self.queue.finish()


def _one_line(error: BaseException) -> str:
    return " | ".join(line.strip() for line in str(error).splitlines() if line.strip())


_default: Device | None = None


def default_device() -> Device:
    """Return the device that tensors and modules use when none is given; selected at first use."""
    global _default
    if _default is None:
        _default = Device.select()
    return _default


def set_default_device(device: Device | str | None) -> None:
    """Make `device`, or the one that a name such as "gpu:0" selects, the default; None selects anew at next use."""
    global _default
    _default = Device.select(device) if device is not None else None
