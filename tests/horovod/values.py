"""Tensors of each rank by formula, so that every rank knows those of all, and what the calls make of them."""

from __future__ import annotations

import functools

import numpy as np
import torch

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SHAPES = ((), (1,), (7,), (3, 5), (2, 0), (4, 3, 2), (20_000,))


def tensor_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return a rank's tensor."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(shape, dtype=wide, generator=generator).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
    return torch.randint(1, 60, shape, generator=generator).to(dtype)


def spread(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a tensor of the same values whose memory is laid out in another way."""
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided" and tensor.dim():
        wide = torch.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    return tensor


def folded(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
    """Return the reduction in rank order, in the tensors' dtype; bfloat16 in float32, rounded once."""
    dtype = tensors[0].dtype
    wide = [each.float() if dtype == torch.bfloat16 else each for each in tensors]
    arrays = [np.asarray(each.numpy()) for each in wide]
    folds = {"Sum": np.add, "Average": np.add, "Min": np.minimum, "Max": np.maximum, "Product": np.multiply}
    with np.errstate(all="ignore"):
        total = functools.reduce(folds[op], arrays)
        if op == "Average":
            kind = total.dtype
            if kind.kind in "iub":
                quotient = np.abs(total.astype(np.int64)) // len(arrays)
                total = (np.sign(total.astype(np.int64)) * quotient).astype(kind)
            else:
                total = (total / np.asarray(len(arrays), kind)).astype(kind)
    return torch.from_numpy(np.asarray(total)).to(dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bits."""
    kinds = one.dtype == other.dtype and one.shape == other.shape
    return kinds and torch.equal(_bytes_of(one), _bytes_of(other))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1)).view(torch.uint8)
