"""Results of collectives by rank formula: each rank draws the values of every other rank."""

from __future__ import annotations

from functools import reduce

import torch
import torch.distributed as dist

#: By the names of releases before 2.13 too.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *INTEGERS, *COMPLEX)
SHAPES = ((), (0,), (1,), (7, 3), (2, 0, 5), (4, 1, 6))

_FUNCTIONS = {
    "SUM": torch.add, "AVG": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum,
    "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
}  # fmt: skip
OPS = tuple(_FUNCTIONS)


def supports(op: str, dtype: torch.dtype) -> bool:
    """Return whether a reduction is defined for the dtype."""
    if op in ("BAND", "BOR", "BXOR"):
        return dtype in INTEGERS
    if op == "AVG":  # of complex numbers PyTorch itself refuses all but sums and means
        return dtype != torch.bool
    return op == "SUM" or dtype not in COMPLEX


def drawn(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return rank's values."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype in INTEGERS:
        high = 2 if dtype == torch.bool else 100
        return torch.randint(0, high, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=dtype if dtype in COMPLEX else torch.float64).to(dtype)


def strided(values: torch.Tensor) -> torch.Tensor:
    """Return the same values with gaps between them."""
    if not values.dim():
        return torch.stack([values, values])[1]
    wide = torch.zeros((*values.shape[:-1], 2 * values.shape[-1]), dtype=values.dtype)
    view = wide[..., ::2]
    view.copy_(values)
    return view


def folded(rows: list[torch.Tensor], op: str) -> torch.Tensor:
    """Return the reduction in rank order: of half precision in float32, rounded once."""
    dtype = rows[0].dtype
    summed = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = reduce(_FUNCTIONS[op], [row.to(summed) for row in rows])
    total = total.to(summed)  # torch.add of booleans is an or, as NumPy's
    if op == "AVG" and dtype in COMPLEX:  # which PyTorch passes on as pairs of reals
        return torch.view_as_complex(torch.view_as_real(total) / len(rows))
    return (total / len(rows) if op == "AVG" else total).to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and bits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1)]).view(torch.uint8)


def reduce_op(op: str):
    """Return PyTorch's object for a name of OPS."""
    return getattr(dist.ReduceOp, op)
