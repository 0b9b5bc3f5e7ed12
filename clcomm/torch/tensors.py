"""Tensors as NumPy arrays: devices, dtypes, and the copies that they need."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from clcomm.bfloat16 import BFLOAT16
from clcomm.errors import ArgumentError

#: Device types whose tensors the backend takes; all but the CPU's are copied to the host and back.
DEVICES = ("cpu", "cuda", "xpu", "privateuseone")
#: The dtype in which a reduction sums: of half precision in float32, rounded once.
SUMMED_AS = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
#: Of these NumPy has no dtype: their bits travel as integers.
_AS_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HOST = torch.device("cpu")


def summed_as(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of this one are reduced; ArgumentError where that is not defined."""
    if dtype.is_floating_point and dtype not in (torch.float32, torch.float64, *SUMMED_AS):
        raise ArgumentError(f"tensor: expected a dtype that can be summed, got {dtype}; convert it to float16 or wider")
    return SUMMED_AS.get(dtype, dtype)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's values as a contiguous tensor in the host's memory: itself, or a copy.

    Raises ArgumentError for another device, and for sparse tensors.
    """
    device = tensor.device.type
    if device not in (*DEVICES, torch._C._get_privateuse1_backend_name()):
        raise ArgumentError(f"tensor: expected one on {', '.join(DEVICES)}, got one on {device}")
    if tensor.layout != torch.strided:
        raise ArgumentError(f"tensor: expected a dense one, got {tensor.layout}; use to_dense()")
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()


def give_back(values: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy values to the tensor that they came from, unless they are in it already."""
    if not is_same_memory(values, tensor):
        copy_values(tensor.detach(), values.view(tensor.shape))


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
        if not to.is_inference():
            torch.autograd.graph.increment_version(to)  # so that autograd knows of the change, as of copy_'s
    else:
        to.copy_(source)


def is_same_memory(values: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return whether `on_host(tensor)` is the tensor itself."""
    return tensor.device.type == "cpu" and values.data_ptr() == tensor.data_ptr() and tensor.is_contiguous()


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
