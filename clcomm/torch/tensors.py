"""Tensors of the backend's devices and dtypes, and the copies that they need."""

from __future__ import annotations

import torch

from clcomm.errors import ArgumentError
from clcomm.tensors.arrays import copy_values, require_summable
from clcomm.tensors.private_torch import private_backend_name

#: Device types whose tensors the backend takes; all but the CPU's are copied to the host and back.
DEVICES = ("cpu", "cuda", "xpu", "privateuseone")
#: The dtype in which a reduction sums: of half precision in float32, rounded once.
SUMMED_AS = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def summed_as(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of this one are reduced; ArgumentError where that is not defined."""
    require_summable(dtype)
    return SUMMED_AS.get(dtype, dtype)


def is_mean_of_integers(op: str, dtype: torch.dtype) -> bool:
    """Return whether a reduction is a mean that is summed and then cut to an integer, as NCCL's and Lightning's are."""
    return op == "mean" and not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's values as a contiguous tensor in the host's memory: itself, or a copy.

    Raises ArgumentError for another device, and for sparse tensors.
    """
    device = tensor.device.type
    if device not in (*DEVICES, private_backend_name()):
        raise ArgumentError(f"tensor: expected one on {', '.join(DEVICES)}, got one on {device}")
    if tensor.layout != torch.strided:
        raise ArgumentError(f"tensor: expected a dense one, got {tensor.layout}; use to_dense()")
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()


def give_back(values: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy values to the tensor that they came from, unless they are in it already."""
    if not is_same_memory(values, tensor):
        copy_values(tensor.detach(), values.view(tensor.shape))


def is_same_memory(values: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return whether `on_host(tensor)` is the tensor itself."""
    return tensor.device.type == "cpu" and values.data_ptr() == tensor.data_ptr() and tensor.is_contiguous()
