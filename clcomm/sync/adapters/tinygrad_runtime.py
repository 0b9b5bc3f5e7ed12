"""tinygrad's buffers on memory of ours, and calls of ours among what its TinyJit replays.

Written for tinygrad 0.14: neither has a public interface there, so other versions are refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from functools import cache
from itertools import count
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError, needed, require_version

with needed("tinygrad"):
    import tinygrad  # noqa: F401
require_version("tinygrad", "0.14")

from tinygrad import Device, Tensor, dtypes  # noqa: E402
from tinygrad.device import Buffer, BufferSpec  # noqa: E402
from tinygrad.dtype import _to_np_dtype  # noqa: E402
from tinygrad.engine import realize  # noqa: E402
from tinygrad.helpers import CAPTURING, Context  # noqa: E402
from tinygrad.tensor import all_tensors  # noqa: E402
from tinygrad.uop.ops import Ops, PatternMatcher, UOp, UPat  # noqa: E402

_DTYPES = {"float32": dtypes.float32, "float64": dtypes.float64}
#: Ranks that build a new program at the same time may collide in PoCL's cache, so a failed build is repeated.
_TRIES = 2


def shares_memory(device: str) -> bool:
    """Return whether kernels of a tinygrad device compute in the host's memory."""
    if not device.startswith("CL"):
        return False
    from tinygrad.runtime.autogen import opencl as cl

    kind = ctypes.c_uint64()
    cl.clGetDeviceInfo(Device[device].cl_dev, cl.CL_DEVICE_TYPE, ctypes.sizeof(kind), ctypes.byref(kind), None)
    return bool(kind.value & cl.CL_DEVICE_TYPE_CPU)


def own_buffer(tensor: Tensor) -> Buffer | None:
    """Return the buffer that a tensor has for itself; None: it has none yet, or is a view of another's."""
    buffer = tensor.uop.buffer if tensor.uop.has_buffer_identity() else None
    if not isinstance(buffer, Buffer) or buffer.base is not buffer:
        return None
    return buffer if buffer.size == tensor.numel() and not buffer.allocated_views else None


def lay(buffer: Buffer, array: np.ndarray) -> None:
    """Let a buffer lie on an array of as many bytes; its own memory is released, and its values are the array's."""
    if buffer.is_allocated():
        buffer.deallocate()
    address = array.ctypes.data
    buffer.options = BufferSpec(external_ptr=address)  # tinygrad then never hands the memory to another buffer
    buffer.allocate(_cl_memory(Device[buffer.device], array))
    buffer.clcomm_array = array  # which has to last as long as the buffer


def lies_on(buffer: Buffer | None, array: np.ndarray) -> bool:
    """Return whether `lay` has laid a buffer on this array."""
    return getattr(buffer, "clcomm_array", None) is array


def _cl_memory(device: Any, array: np.ndarray) -> Any:
    from tinygrad.runtime.autogen import opencl as cl

    status = ctypes.c_int32()
    flags = cl.CL_MEM_READ_WRITE | cl.CL_MEM_USE_HOST_PTR
    memory = cl.clCreateBuffer(device.context, flags, array.nbytes, array.ctypes.data, ctypes.byref(status))
    if status.value:
        raise ArgumentError(f"device: expected buffers on the host's memory, got OpenCL's error {status.value}")
    return memory


def read(tensor: Tensor) -> np.ndarray:
    """Return a copy of a tensor's values, bfloat16 as uint16: its bits, which no kernel rounds."""
    run_now(tensor)
    buffer = own_buffer(tensor)
    if buffer is None:
        run_now(copy := tensor.contiguous())
        buffer = copy.uop.buffer
    dtype = np.dtype(np.uint16 if tensor.dtype == dtypes.bfloat16 else _to_np_dtype(tensor.dtype))
    return np.frombuffer(buffer.as_memoryview(), dtype).reshape(tensor.shape)


def write(tensor: Tensor, values: np.ndarray) -> None:
    """Overwrite a tensor with values as `read` returns them."""
    run_now(tensor)
    buffer = own_buffer(tensor)
    if buffer is None:
        source = Tensor(np.array(values, order="C"), device=tensor.device)
        run_now(tensor.assign(source if source.dtype == tensor.dtype else source.bitcast(tensor.dtype)))
    else:
        bits = memoryview(bytearray(values.tobytes()))
        buffer.copy_from(Buffer("PYTHON", buffer.size, buffer.dtype, opaque=bits))


def build_from_source() -> None:
    """Let PoCL's driver "basic" get programs as sources: as binaries PoCL 3.0 crashes on them. Loads OpenCL."""
    from tinygrad.runtime import ops_cl

    cl, load = ops_cl.cl, ops_cl.CLProgram.__init__

    def build(self: Any, device: Any, obj: Any) -> None:
        if not device.device_name.startswith("basic"):
            load(self, device, obj)
            return
        self.dev, self.signature, status = device, obj.signature, ctypes.c_int32()
        source = ops_cl.to_char_p_p([obj.lib])
        for _ in range(_TRIES):
            self.program = cl.clCreateProgramWithSource(device.context, 1, source, None, ctypes.byref(status))
            ops_cl.check(status.value)
            status.value = cl.clBuildProgram(self.program, 1, device.cl_dev, None, ops_cl.BP_CB(), None)
            if status.value == cl.CL_SUCCESS:
                break
        ops_cl.check(status.value)
        self.kernel = cl.clCreateKernel(self.program, obj.name.encode(), ctypes.byref(status))
        ops_cl.check(status.value)

    ops_cl.CLProgram.__init__ = build


class Place:
    """A tensor on a part of the flat space, or beside it on a device that has memory of its own."""

    def __init__(self, array: np.ndarray, device: str, shares: bool):
        self._array, self._shares = array, shares
        self.tensor = Tensor.empty(*array.shape, dtype=_DTYPES[str(array.dtype)], device=device)
        if shares:
            lay(self.tensor.uop.buffer, array)
        else:
            self.tensor.uop.buffer.ensure_allocated()

    @property
    def buffer(self) -> UOp:
        """The node of tinygrad's graphs that stands for its memory."""
        return self.tensor.uop.base

    def to_host(self) -> None:
        """Copy the tensor to the flat space, unless it lies there."""
        if not self._shares:
            self._array[...] = read(self.tensor)

    def to_device(self) -> None:
        """Copy the flat space's part to the tensor, unless that lies there."""
        if not self._shares:
            write(self.tensor, self._array)


def run_now(*tensors: Tensor) -> None:
    """Compute tensors at once, also where a TinyJit records."""
    if tensors:
        with Context(CAPTURING=0):
            Tensor.realize(*tensors)


def waiting_for(buffers: Iterable[UOp]) -> list[Tensor]:
    """Return the tensors, anywhere in the process, that are to be computed from these buffers and are not yet."""
    wanted = set(buffers)
    return [tensor for tensor in _uncomputed() if wanted & tensor.uop.toposort().keys()]


def in_backward() -> list[Tensor]:
    """Return the tensors that backward went through and that are not computed yet, such as the loss."""
    return [tensor for tensor in _uncomputed() if tensor.grad is not None]


def _uncomputed() -> Iterable[Tensor]:
    tensors = [tensor for reference in list(all_tensors) if (tensor := reference()) is not None]
    return [tensor for tensor in tensors if not (tensor.uop.is_virtual or tensor.uop.has_buffer_identity())]


# --- within a TinyJit ---


def is_recording() -> bool:
    """Return whether a TinyJit records what runs now, instead of running it."""
    return bool(realize.capturing) and bool(CAPTURING)


class _Call(str):
    """The name of a call in a recording, which tells it from all others, with what it calls."""

    run: Callable[[], None]

    def __reduce__(self) -> Any:
        raise ArgumentError("TinyJit: expected to stay in its process, got one to be pickled that synchronises ranks")


_NUMBERS = count()


def record(run: Callable[[], None], buffers: Iterable[UOp]) -> None:
    """Let each replay of the TinyJit that records call `run` here; buffers: that it reads."""
    _add_calls()
    name = _Call(f"clcomm {next(_NUMBERS)}")
    name.run = run
    call = UOp(Ops.CUSTOM_FUNCTION, arg=name).call(*buffers)
    realize.capturing[0].add_linear(UOp(Ops.LINEAR, src=(call,)), {})


def _run(ctx: Any, call: UOp, ast: UOp) -> list[float | None] | None:
    if not isinstance(ast.arg, _Call):
        return None  # tinygrad's own
    ast.arg.run()
    return []


@cache
def _add_calls() -> None:
    """Let tinygrad run such calls, and leave them out of what it prints of its kernels."""
    pattern = UPat(Ops.CALL, src=(UPat(Ops.CUSTOM_FUNCTION, name="ast"),), name="call", allow_any_len=True)
    realize.pm_exec = PatternMatcher([(pattern, _run)]) + realize.pm_exec
    kernels_of = realize.get_call_kernels
    realize.get_call_kernels = lambda call: [] if isinstance(call.src[0].arg, _Call) else kernels_of(call)
