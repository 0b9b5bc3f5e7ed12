"""Elements of another type, and operations that move elements of any type."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from clcomm.engine.tensor import FLOAT32, Tensor, empty, wrap


def to_float(x: Tensor) -> Tensor:
    """Return x as float32, 1 for true; x: of any type, itself where it is float32."""
    return x if x.dtype == FLOAT32 else cast(x, "float_of_int", FLOAT32)


def cast(x: Tensor, kernel: str, dtype: np.dtype) -> Tensor:
    """Queue kernel `kernel` of compare.cl, which gives elements another type; the result is not on the tape."""
    out = empty(x.device, x.shape, dtype)
    x.device.launch(x.device.kernel("compare", kernel), *x.device.grid(x.size), out, x, x.size)
    return out


def moved(x: Tensor, operation: Callable[[Tensor], Tensor]) -> Tensor:
    """Return operation(x) for one that only moves elements, which are four bytes each of all types."""
    if x.dtype == FLOAT32:
        return operation(x)
    result = operation(wrap(x.device, x.buffer, x.shape))
    return wrap(result.device, result.buffer, result.shape, x.dtype)
