"""PyTorch's tensors in host memory as NumPy arrays and back; copies of them, and their arithmetic."""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from clcomm.base.errors import ArgumentError
from clcomm.base.host.arrays import BFLOAT16
from clcomm.comm.stats.events import Phase, describe_shapes
from clcomm.comm.tensors import sharing
from clcomm.comm.tensors.private_torch import WeakStorage, private_backend_name, storage_address

#: Types of devices whose tensors collectives take; all but the CPU's are copied to the host and back.
DEVICES = ("cpu", "cuda", "xpu", "privateuseone")
#: The dtypes of fractions and complex numbers in which a Communicator computes.
_SUMMABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
#: Of other dtypes NumPy has none: their bits travel as integers.
_AS_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HOST = torch.device("cpu")
#: Half precision is summed in float32 and rounded once.
HALVES_IN_FLOAT32 = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def require_usable(tensor: torch.Tensor, name: str = "tensor") -> None:
    """Raise ArgumentError, which calls it `name`, for what is no dense tensor on a device that has its values."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if torch.nn.parameter.is_lazy(tensor):
        raise ArgumentError(f"{name}: expected a shape, got a lazy one; run one batch through the model")
    device = tensor.device.type
    if device not in DEVICES and device != private_backend_name():
        instead = "it has no values: use to_empty(device='cpu')" if device == "meta" else "use cpu()"
        raise ArgumentError(f"{name}: expected one on {', '.join(DEVICES)}, got one on {device}; {instead}")
    if tensor.layout != torch.strided:
        raise ArgumentError(f"{name}: expected a dense tensor, got layout {tensor.layout}; use to_dense()")


class HostCopies:
    """Copies of tensors from other devices than the CPU and to them, each a phase, which reports count.

    notify: called with each phase, "pack" or "unpack"; its label, where none is given, names the device.
    """

    def __init__(self, notify: Callable[[Phase], None]):
        self._notify = notify
        self._rooms: dict[tuple[object, ...], tuple[WeakStorage, torch.Tensor]] = {}

    def on_host(
        self, tensor: torch.Tensor, label: str = "", bucket: int = -1, in_place: bool = False, name: str = "tensor"
    ) -> torch.Tensor:
        """Return a tensor's values, contiguous in host memory and without gradients: itself, or a copy.

        Raises ArgumentError as `require_usable` does.

        Args:
            in_place: the call uses no other tensor, so that the tensor's own memory may be mapped.
            name: what an error calls the tensor.
        """
        began_s = time.perf_counter()
        require_usable(tensor, name)
        own = sharing.mapped(tensor) if in_place and tensor.device.type == sharing.DEVICE else None
        if own is not None:
            return own
        try:
            if bucket >= 0 and tensor.device.type != "cpu" and tensor.is_contiguous():
                values = self._room_of(tensor).copy_(tensor.detach())
            else:
                values = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
        except NotImplementedError as error:
            raise ArgumentError(
                f"{name}: expected a device whose tensors PyTorch copies to the host, got {tensor.device}: "
                f"{str(error).partition('. ')[0]}"
            ) from None
        self._count("pack", began_s, tensor, label, bucket)
        return values

    def _room_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory of the host that a bucket on a device keeps, so that it can move to what ranks share."""
        storage = tensor.untyped_storage()
        key = storage_address(storage), tensor.storage_offset(), tensor.shape, tensor.dtype
        if key not in self._rooms or self._rooms[key][0].expired():
            self._rooms = {each: room for each, room in self._rooms.items() if not room[0].expired()}
            self._rooms[key] = WeakStorage(storage), torch.empty(tensor.shape, dtype=tensor.dtype)
        return self._rooms[key][1]

    def sparse_on_host(self, tensor: torch.Tensor, label: str = "") -> torch.Tensor:
        """Return a sparse COO tensor in host memory and without gradients: itself, or a copy."""
        began_s = time.perf_counter()
        values = tensor.detach().to("cpu")
        self._count("pack", began_s, tensor, label)
        return values

    def room_for(self, output: torch.Tensor) -> torch.Tensor:
        """Return memory of the host for a tensor's new values, its own if it is contiguous there."""
        require_usable(output)
        return self.on_host(output) if output.device.type == "cpu" else torch.empty(output.shape, dtype=output.dtype)

    def give_back(self, values: torch.Tensor, tensor: torch.Tensor, label: str = "", bucket: int = -1) -> None:
        """Copy values to the dense tensor that they came from, unless they share memory."""
        if tensor.device.type == sharing.DEVICE and sharing.is_mapped(values, tensor):
            changed(tensor)
            return
        began_s, on_host = time.perf_counter(), tensor.device.type == "cpu"
        if not (on_host and values.data_ptr() == tensor.data_ptr() and tensor.is_contiguous()):
            copy_values(tensor.detach(), values.view(tensor.shape))
        self._count("unpack", began_s, tensor, label, bucket)

    def to_device_of(self, tensor: torch.Tensor, values: torch.Tensor, label: str = "") -> torch.Tensor:
        """Return values on a tensor's device: themselves, or a copy."""
        began_s = time.perf_counter()
        moved = values.to(tensor.device)
        self._count("unpack", began_s, tensor, label)
        return moved

    @contextmanager
    def counted(self, name: str, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Count a block's copies as one phase, if one of these tensors, which it copies, is on another device."""
        began_s = time.perf_counter()
        yield
        elsewhere = next((each for each in tensors if each.device.type != "cpu"), None)
        if elsewhere is not None:
            self._count(name, began_s, elsewhere, "")

    def _count(self, name: str, began_s: float, tensor: torch.Tensor, label: str, bucket: int = -1) -> None:
        device = tensor.device.type
        if device != "cpu":
            label = label or f"{'from' if name == 'pack' else 'to'} {device}"
            self._notify(Phase(name, began_s, time.perf_counter() - began_s, label, bucket))


def array_of(values: torch.Tensor) -> np.ndarray:
    """Return a contiguous tensor's memory as a flat array; where NumPy lacks its dtype, as bits."""
    values = flat(values)
    if values.dtype == torch.bfloat16:
        return values.view(torch.int16).numpy().view(BFLOAT16)
    try:
        return values.numpy()
    except TypeError:
        return values.view(_AS_BITS[values.dtype.itemsize]).numpy()


def bytes_of(values: torch.Tensor) -> np.ndarray:
    """Return a contiguous tensor's memory as a flat array of bytes."""
    return flat(values).view(torch.uint8).numpy()


def flat(values: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as one dimension of stride 1, which a single element may lack."""
    return values.as_strided((values.numel(),), (1,))


def as_tensor(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Return an array of `array_of` as a tensor again, in its memory, on the device of `like` and of its dtype."""
    values = np.ascontiguousarray(array)
    found = torch.from_numpy(values.view(np.int16) if values.dtype == BFLOAT16 else values)
    return (found if found.dtype == like.dtype else found.view(like.dtype)).to(like.device)


def require_summable(dtype: torch.dtype) -> None:
    """Raise ArgumentError for a dtype that a Communicator cannot add, as it would add the bits."""
    if (dtype.is_floating_point or dtype.is_complex) and dtype not in _SUMMABLE:
        raise ArgumentError(f"tensor: expected a dtype that can be summed, got {dtype}; convert it to float16 or wider")


def copy_values(to: torch.Tensor, source: torch.Tensor) -> None:
    """Copy values to a tensor of the same shape, in this thread where their bytes are the same.

    PyTorch divides a long copy among its threads, and these wait for each other where ranks share cores: 1 MiB then
    takes milliseconds instead of 25 us. A NumPy array on the tensors would keep PyTorch from resizing their memory.
    """
    are_bytes = all(
        each.device == _HOST and each.is_contiguous() and not each.is_conj() and not each.is_neg()
        for each in (to, source)
    )
    if are_bytes and to.dtype == source.dtype and to.nbytes == source.nbytes:
        ctypes.memmove(to.data_ptr(), source.data_ptr(), to.nbytes)
        changed(to)
    else:
        to.copy_(source)


def changed(tensor: torch.Tensor) -> None:
    """Tell autograd that a tensor's memory was written to, as by copy_."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name in messages, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def described(tensors: Sequence[torch.Tensor]) -> str:
    """Return the text of shapes and dtype by which ranks compare tensors."""
    return _described(tuple(tuple(each.shape) for each in tensors), tensors[0].dtype)


@functools.lru_cache(maxsize=4096)
def _described(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> str:
    return f"{describe_shapes(shapes)} {dtype_name(dtype)}"


def by_dtype(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
    return [[index for index, tensor in enumerate(tensors) if tensor.dtype == dtype] for dtype in dtypes]


# --- arithmetic ---


def is_mean_of_integers(op: str, dtype: torch.dtype) -> bool:
    """Return whether a reduction is a mean of integers, summed and then cut, as NCCL's and Lightning's are."""
    return op == "mean" and not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return a tensor times a number in its own dtype; integers are cut towards zero."""
    if factor == 1.0:
        return tensor
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor * factor
    return (tensor.to(torch.float64) * factor).trunc().to(tensor.dtype)


def divide_by(ranks: int, tensor: torch.Tensor) -> None:
    """Divide integers by the number of ranks, in place, cut towards zero."""
    tensor.div_(ranks, rounding_mode="trunc")


def adaptive_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which Adasum adds tensors; ArgumentError for others."""
    if not dtype.is_floating_point:
        raise ArgumentError(f"op: Adasum needs a real floating dtype, got {dtype}")
    require_summable(dtype)
    return torch.float32 if dtype == torch.bfloat16 else dtype


class Together:
    """Tensors of one dtype flattened into one, `values`, and memory for its reduction, `reduced`; on the host."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        flattened = [flat(tensor) for tensor in tensors]
        self._tensors = tensors
        self.values = flattened[0] if len(flattened) == 1 else torch.cat(flattened)
        self.reduced = torch.empty_like(self.values)

    def compared(self, label: str) -> str:
        """Return the text that ranks compare: the label, shapes and the dtype."""
        return f"{label} {described(self._tensors)}".lstrip()

    def parts(self) -> list[torch.Tensor]:
        parts = self.reduced.split([tensor.numel() for tensor in self._tensors])
        return [part.reshape(tensor.shape) for part, tensor in zip(parts, self._tensors, strict=True)]
