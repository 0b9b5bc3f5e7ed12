"""A rank's OpenCL device: one context, one in-order queue, kernels built once, memory from a pool.

Everything is queued and nothing waits, except where a caller asks for values on the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from threading import RLock, get_ident
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from clcomm.engine import pocl_cache, program, selection, timing
from clcomm.engine.memory import Memory
from clcomm.engine.pocl_target import name_processor
from clcomm.engine.timing import KernelLog, Launch, Profile
from clcomm.engine.tuning import Tuning
from clcomm.engine.tuning import load as _load_tuning
from clcomm.errors import ArgumentError, DeviceError, ShortageError

if TYPE_CHECKING:
    import pyopencl as cl

    from clcomm.engine.recording import Recorder

#: What the address of host memory must be a multiple of for a buffer to lie on top of it.
HOST_POINTER_ALIGNMENT = 128
_MOST_BORROWED = 64
_MOST_KEPT = 1024
_CPU_RUN = 8192  # elements that are worth a CPU work-item of their own
_GPU_ROW_GROUP = 64


class Device:
    """An OpenCL device with its context, in-order queue, kernel cache and memory pool.

    `kind` is "cpu", "gpu" or "accelerator". CPU kernels run one work-item per long run of elements; the others run
    one per element, with work-groups of `group` items, and `row_group` items for each row of a row-wise kernel.
    `tuning` are its kernels' sizes, by default those that `clcomm tune-kernels` stored, else built-in ones.
    """

    def __init__(self, cl_device: cl.Device, *, kind: str | None = None, tuning: Tuning | None = None):
        import pyopencl as cl

        self.cl_device = cl_device
        name_processor(cl_device)
        self.name: str = cl_device.name.strip()
        self.driver = f"{cl_device.platform.name.strip()} {cl_device.driver_version.strip()}"
        self.kind = kind or selection.device_kind(cl_device)
        self.is_cpu = self.kind == "cpu"
        self.shares_host_memory = self.is_cpu
        self.runs_in_caller = self.is_cpu and self.name.startswith("basic")  # PoCL's driver without worker threads
        self.compute_units: int = cl_device.max_compute_units
        self.tuning = _load_tuning(cl_device, self.kind) if tuning is None else tuning
        self.group = 1 if self.is_cpu else min(self.tuning.group, cl_device.max_work_group_size)
        self.row_group = 1 if self.is_cpu else min(_GPU_ROW_GROUP, cl_device.max_work_group_size)  # a power of two
        self.context = cl.Context([cl_device])
        self.queue = cl.CommandQueue(self.context)
        self.memory = Memory(self.context, self.queue, self.name)
        self.buffer_alignment = max(128, cl_device.mem_base_addr_align // 8)  # bytes, of buffers within buffers
        self._programs: dict[tuple[Any, ...], Any] = {}
        self._kernels: dict[tuple[Any, ...], Any] = {}
        self.spare_kernels: dict[Any, list[Any]] = {}  # of recordings that are no more, by the kernel they are like
        self._grids: dict[int, tuple[tuple[int], tuple[int]]] = {}
        self.kept: dict[Any, Any] = {}  # buffers of values that never change, by what they are
        self._uploads: deque[tuple[Any, np.ndarray]] = deque()
        self._borrowed: list[Any] = []  # buffers on arrays of the caller's, kept while kernels may be queued on them
        self._recorders: dict[int, Recorder] = {}  # by the thread whose run each notes
        self.launching = RLock()  # a kernel's arguments are set and it is queued before another thread sets its own
        # Kernels in the calling thread: PoCL's lets each thread run what others have queued, and two of them may wait
        # for each other's events then. So one thread at a time uses such a device.
        self.in_turn = self.launching if self.runs_in_caller else nullcontext()
        self.revision = 0  # grows when memory, hooks or requires_grad of tensors change: recordings are void then
        self.note: Callable[[Launch], None] | None = None  # told about each launch
        self._enqueue = cl.enqueue_nd_range_kernel
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

    def __copy__(self) -> Device:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Device:
        return self

    def __reduce__(self) -> NoReturn:
        raise ArgumentError("Device: expected to be selected in each process, got one to be pickled; leave it out")

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
            defines = {**self.tuning.defines(file), **defines}
            options = [f"-D{name}={value}" for name, value in sorted(defines.items())]
            options += [f"-DGROUP={self.group}", f"-DROW_GROUP={self.row_group}"]
            options += ["-DON_CPU"] if self.is_cpu else []
            options += ["-cl-fast-relaxed-math"] if fast_math else []
            self._programs[key] = program.build(self.context, file, options)
        return self._programs[key]

    def launch(self, kernel: Any, global_size: tuple[int, ...], local_size: tuple[int, ...] | None, *args: Any) -> None:
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

    def launch_all(self, launches: Iterable[tuple[Any, tuple[int, ...], tuple[int, ...] | None]]) -> None:
        """Queue kernels whose arguments are set: (kernel, global size, local size) of each."""
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

    def _failed(self, kernel: Any, error: BaseException) -> DeviceError:
        text = " | ".join(line.strip() for line in str(error).splitlines() if line.strip())
        shortage = pocl_cache.shortage()  # PoCL compiles a kernel for its sizes when it is first queued
        if shortage:
            return ShortageError(f"kernel {kernel.function_name} on {self.name}, {shortage}: {text}")
        return DeviceError(f"kernel {kernel.function_name} on {self.name}: {text}")

    @cached_property
    def side_queue(self) -> cl.CommandQueue:
        """A second queue, for copies that don't wait for all that is queued in the first."""
        import pyopencl as cl

        return cl.CommandQueue(self.context)

    @cached_property
    def timed_queue(self) -> cl.CommandQueue:
        """A queue whose kernels can be asked when they ran."""
        import pyopencl as cl

        return cl.CommandQueue(self.context, properties=cl.command_queue_properties.PROFILING_ENABLE)

    def on_host(self, function: Callable[..., Any], *args: Any) -> None:
        """Run `function`; while a step is recorded, note that each replay has to run it at this point."""
        if self.recorder is None:
            function(*args)
        else:
            self.recorder.on_host(function, args)

    @property
    def recorder(self) -> Recorder | None:
        """What notes this thread's run, None where none does; see capture.py."""
        recorders = self._recorders
        return recorders.get(get_ident()) if recorders else None

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        if recorder is None:
            self._recorders.pop(get_ident(), None)
        else:
            self._recorders[get_ident()] = recorder

    def profile(self) -> AbstractContextManager[Profile]:
        """Time the kernels queued within the block, on a queue of its own; waits at both ends."""
        return timing.profile(self)

    def log_kernels(self) -> AbstractContextManager[KernelLog]:
        """Note when kernels run, on a queue of its own, until the block ends; waits there only."""
        return timing.log_kernels(self)

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

    # -- memory

    @property
    def active_bytes(self) -> int:
        """Bytes of device memory in use."""
        return self.memory.active_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes of device memory that were ever taken, pooled memory that waits for its next use included."""
        return self.memory.peak_bytes

    def allocate(self, nbytes: int) -> Any:
        """Return a pooled buffer of at least `nbytes`; it goes back to the pool when the last reference is dropped.

        The one in-order queue makes it safe to reuse while kernels that read it are still queued.
        """
        if self.recorder is not None:
            return self.recorder.allocate(nbytes)
        return self.memory.allocate(nbytes)

    def upload(self, array: np.ndarray, *, copy: bool = True) -> Any:
        """Return a buffer holding the values of a C-contiguous host array, without waiting for the queue.

        With `copy` False it lies on top of the array where the device can use that memory.
        """
        import pyopencl as cl

        self.not_replayable("brings values to the device")
        if self.shares_host_memory:
            if copy or not array.flags.writeable or array.__array_interface__["data"][0] % HOST_POINTER_ALIGNMENT:
                return self.memory.exact(copy_of=array)
            return self._on_top_of(array)
        buffer = self.allocate(array.nbytes)
        staged = array.copy()
        self._uploads.append((cl.enqueue_copy(self.queue, buffer, staged, is_blocking=False), staged))
        complete = cl.command_execution_status.COMPLETE
        while self._uploads and self._uploads[0][0].command_execution_status == complete:
            self._uploads.popleft()
        return buffer

    def keep(self, key: Any, make: Callable[[], np.ndarray]) -> Any:
        """Return the buffer of what `make()` returns, which is always the same for a key; uploaded at its first use."""
        buffer = self.kept.get(key)
        if buffer is None:
            recorder, self.recorder = self.recorder, None  # a recording may rely on it
            try:
                buffer = self.upload(make())
            finally:
                self.recorder = recorder
            if len(self.kept) >= _MOST_KEPT:
                del self.kept[next(iter(self.kept))]
            self.kept[key] = buffer
        return buffer

    def _on_top_of(self, array: np.ndarray) -> Any:
        buffer = self.memory.exact(on_top_of=array)
        if not self.runs_in_caller:  # kernels that are still queued may outlive the tensor, but not its memory
            if len(self._borrowed) == _MOST_BORROWED:
                self.finish()
            self._borrowed.append(buffer)
        return buffer

    def write(self, buffer: Any, array: np.ndarray, offset: int = 0) -> None:
        """Copy a C-contiguous host array into a buffer, `offset` bytes in; waits."""
        import pyopencl as cl

        self.not_replayable("brings values to the device")
        with self.in_turn:
            cl.enqueue_copy(self.queue, buffer, array, dst_offset=offset, is_blocking=True)

    def read(self, buffer: Any, array: np.ndarray, offset: int = 0) -> None:
        """Fill a C-contiguous host array from a buffer, `offset` bytes in; waits."""
        import pyopencl as cl

        self.not_replayable("brings values to the host")
        with self.in_turn:
            cl.enqueue_copy(self.queue, array, buffer, src_offset=offset, is_blocking=True)

    def copy(self, target: Any, source: Any, nbytes: int) -> None:
        """Queue a copy of the first `nbytes` of one buffer to another."""
        import pyopencl as cl

        self.not_replayable("copies buffers without a kernel")
        with self.in_turn:
            cl.enqueue_copy(self.queue, target, source, byte_count=nbytes)

    def finish(self) -> None:
        """Wait until everything queued is done."""
        self.not_replayable("waits for the device")
        with self.in_turn:
            self.queue.finish()
        self._borrowed.clear()

    def not_replayable(self, what: str) -> None:
        """Let a recording under way, if any, know of something that no replay can do."""
        if self.recorder is not None:
            self.recorder.refuse(f"it {what}")


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
