"""Variance over all elements or over some dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from clcomm.base.errors import ArgumentError
from clcomm.engine.ops.elementwise import mul, sub
from clcomm.engine.ops.names import pytorch_names
from clcomm.engine.ops.reduce import SumOp, mean, reduced
from clcomm.engine.tensor import Tensor


@pytorch_names
def var(
    x: Tensor,
    axis: int | Sequence[int] | None = None,
    unbiased: bool = True,
    keepdims: bool = False,
    *,
    correction: int = 1,
) -> Tensor:
    """Return the variance of x over the dimensions `axis` (all by default), which `keepdims` keeps with size 1.

    Args:
        x: float32 of any shape; of all dimensions the result has the shape ().
        unbiased: False: a correction of 0.
        correction: is subtracted from the number n of elements in the divisor: 1 for the unbiased estimate, 0 for the
            mean of the squared differences from the mean.

    Raises ArgumentError for an axis that does not fit, and unless `correction` is from 0 to n - 1.
    """
    axes, shape = reduced("var", x, axis, keepdims)
    correction = correction if unbiased else 0
    count = math.prod([x.shape[d] for d in axes])
    if not 0 <= correction < count:
        raise ArgumentError(f"var: expected a correction below the number of elements, {count}, got {correction!r}")
    apart = sub(x, mean(x, axes, keepdims=True))
    return SumOp.apply(mul(apart, apart), axes=axes, shape=shape, divisor=count - correction)
