"""Contiguous PyTorch tensors in the host's memory as NumPy arrays, and back; copies between tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from clcomm.bfloat16 import BFLOAT16
from clcomm.errors import ArgumentError
from clcomm.stats.call import describe_shapes

#: The dtypes of fractions and complex numbers in which a Communicator computes.
_SUMMABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
#: Of other dtypes NumPy has none: their bits travel as integers.
_AS_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HOST = torch.device("cpu")


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
    """Raise ArgumentError for a dtype whose numbers a Communicator cannot add, of which it would add the bits."""
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
    """Let autograd know that a tensor's memory was written to, as it knows of copy_."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def dtype_name(dtype: torch.dtype) -> str:
    """Return what messages call a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def described(tensors: Sequence[torch.Tensor]) -> str:
    """Return what ranks compare of tensors of one dtype: their shapes and it."""
    return f"{describe_shapes([tuple(each.shape) for each in tensors])} {dtype_name(tensors[0].dtype)}"
