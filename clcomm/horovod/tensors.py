"""The tensors of Horovod's calls on the host, and its arithmetic with integers."""

from __future__ import annotations

import torch

from clcomm.errors import ArgumentError


def host_tensor(tensor: object, name: str = "tensor") -> torch.Tensor:
    """Return a tensor's values on the host, contiguous and without gradients: itself where it is all that.

    Raises ArgumentError for what is no dense tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.is_sparse or tensor.layout != torch.strided:
        raise ArgumentError(f"{name}: expected a dense tensor, got layout {tensor.layout}; use tensor.to_dense()")
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


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
