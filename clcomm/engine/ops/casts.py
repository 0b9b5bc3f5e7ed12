"""Elements of another type, and operations that move elements of any type."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import numpy as np

from clcomm.engine.targets import note_of
from clcomm.engine.tensor import FLOAT32, INT32, Tensor, empty, wrap

Result = TypeVar("Result")


def to_float(x: Tensor) -> Tensor:
    """Return x as float32, 1 for true; x: of any type, itself where it is float32."""
    return x if x.dtype == FLOAT32 else cast(x, "float_of_int", FLOAT32)


def cast(x: Tensor, kernel: str, dtype: np.dtype) -> Tensor:
    """Queue kernel `kernel` of compare.cl, which gives elements another type; the result is not on the tape."""
    out = empty(x.device, x.shape, dtype)
    noted = [note_of(x.device)] if dtype == INT32 else []
    x.device.launch(x.device.kernel("compare", kernel), *x.device.grid(x.numel()), out, x, *noted, x.numel())
    return out


def moved(x: Tensor, operation: Callable[[Tensor], Tensor]) -> Tensor:
    """Return operation(x) for one that only moves elements, which are four bytes each of all types."""
    if x.dtype == FLOAT32:
        return operation(x)
    result = operation(wrap(x.device, x.buffer, x.shape))
    return wrap(result.device, result.buffer, result.shape, x.dtype)


def of_any_type(function: Callable[..., Result]) -> Callable[..., Result]:
    """Let a function that only moves elements take tensors of any one type, alone or in a sequence."""

    @wraps(function)
    def call(x: Any, *args: Any, **named: Any) -> Any:
        several = not isinstance(x, Tensor)
        x = _of_one_type(x) if several else x
        first = x[0] if several and isinstance(x, (list, tuple)) and x else x
        if not isinstance(first, Tensor) or first.dtype == FLOAT32:
            return function(x, *args, **named)
        dtype = first.dtype
        if several and any(not isinstance(each, Tensor) or each.dtype != dtype for each in x):
            return function(x, *args, **named)  # which names the one that is not float32
        floats = [wrap(each.device, each.buffer, each.shape) for each in (x if several else [x])]
        result: Any = function(floats if several else floats[0], *args, **named)
        back = [wrap(each.device, each.buffer, each.shape, dtype) for each in _listed(result)]
        return back if isinstance(result, list) else back[0]

    return call


def _of_one_type(tensors: Any) -> Any:
    """Return tensors of several types as float32, or as int32 where there is none of float32."""
    types = {each.dtype for each in tensors if isinstance(each, Tensor)} if isinstance(tensors, (list, tuple)) else ()
    if len(types) < 2:
        return tensors
    if FLOAT32 not in types:
        return [wrap(each.device, each.buffer, each.shape, INT32) for each in tensors]
    return [to_float(each) for each in tensors]


def _listed(result: Any) -> list[Tensor]:
    return result if isinstance(result, list) else [result]
