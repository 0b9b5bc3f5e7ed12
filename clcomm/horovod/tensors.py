"""Tensors as the NumPy arrays that a Communicator moves, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from clcomm.bfloat16 import BFLOAT16
from clcomm.errors import ArgumentError


def host_tensor(tensor: Any, name: str = "tensor") -> torch.Tensor:
    """Return a tensor's values on the host, contiguous and without gradients: itself where it is all that.

    Raises ArgumentError for what is no dense tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.is_sparse or tensor.layout != torch.strided:
        raise ArgumentError(f"{name}: expected a dense tensor, got layout {tensor.layout}; use tensor.to_dense()")
    return tensor.detach().cpu().contiguous()


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a contiguous tensor of the host as a flat array of the same memory; bfloat16 as BFLOAT16."""
    flat = tensor.reshape(-1)
    if tensor.dtype == torch.bfloat16:
        return flat.view(torch.int16).numpy().view(BFLOAT16)
    if tensor.is_conj() or tensor.is_neg():
        flat = flat.resolve_conj().resolve_neg()
    return flat.numpy()


def as_tensor(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Return an array as a tensor of the dtype and device of `like`, in the array's memory where that is the host's."""
    flat = np.ascontiguousarray(array)
    if like.dtype == torch.bfloat16:
        return torch.from_numpy(flat.view(np.int16)).view(torch.bfloat16).to(like.device)
    return torch.from_numpy(flat).to(like.device)


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return a tensor times a number in its own dtype; integers are cut towards zero."""
    if factor == 1.0:
        return tensor
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor * factor
    return (tensor.to(torch.float64) * factor).trunc().to(tensor.dtype)


def divided(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return integers divided by the number of ranks, cut towards zero, as Horovod averages them."""
    return torch.div(tensor, ranks, rounding_mode="trunc").to(tensor.dtype)
