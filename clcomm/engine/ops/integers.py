"""Arithmetic of integers: they are indices, classes and counts, few, and computed on the host.

A step with such arithmetic waits for the queue, and is not replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.ops.casts import to_float
from clcomm.engine.tensor import BOOL, INT32, Tensor

_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "floor_divide": np.floor_divide, "remainder": np.remainder,
    "trunc_divide": lambda a, b: (a - np.fmod(a, b)) // b, "&": np.bitwise_and, "|": np.bitwise_or,
    "^": np.bitwise_xor, "<<": np.left_shift, ">>": np.right_shift,
}  # fmt: skip


def is_whole(x: object) -> bool:
    """Return whether x is a tensor of integers."""
    return isinstance(x, Tensor) and x.dtype.kind == "i"


def are_whole(a: object, b: object) -> bool:
    """Return whether both operands, of which one is a tensor of integers, have no fractions."""
    return all(isinstance(x, (int, np.integer)) or (isinstance(x, Tensor) and x.dtype in (INT32, BOOL)) for x in (a, b))


def floats(*operands: Any) -> list[Any]:
    """Return operands of which tensors are float32."""
    return [to_float(x) if isinstance(x, Tensor) else x for x in operands]


def of_integers(name: str, a: Any, b: Any) -> Tensor:
    """Return an operation of operands that `are_whole`; ArgumentError for x / 0, and for a result outside int32."""
    first, second = [x.numpy().astype(np.int64) if isinstance(x, Tensor) else np.int64(x) for x in (a, b)]
    if name in ("<<", ">>") and not np.all((second >= 0) & (second < 32)):
        raise ArgumentError(f"{name}: expected to shift by 0 to 31 bits, got {_text(b)}")
    if name in ("floor_divide", "remainder", "trunc_divide") and not np.all(second):
        raise ArgumentError(f"{name}: expected to divide by other integers than 0, got {_text(b)}")
    try:
        values = _OPERATIONS[name](first, second)
    except ValueError:
        raise ArgumentError(f"{name}: shapes {first.shape} and {second.shape} do not broadcast") from None
    return Tensor(values, a.device if isinstance(a, Tensor) else b.device)


def _text(operand: object) -> str:
    return f"a tensor of shape {operand.shape}" if isinstance(operand, Tensor) else repr(operand)


def shifted(name: str, a: Tensor, bits: Any) -> Tensor:
    """Return integers with their bits moved; ArgumentError for others, and for a result outside int32."""
    if not is_whole(a) or not are_whole(a, bits):
        raise ArgumentError(f"{name}: expected integers, got {a.dtype} and {type(bits).__name__}")
    return of_integers(name, a, bits)


def on_host(function: Any, x: Tensor, axis: int | Sequence[int] | None, keepdims: bool) -> Tensor:
    """Return NumPy's function of integers along dimensions.

    Raises ArgumentError for a dimension that x does not have, and for a result outside int32.
    """
    values = x.numpy()
    try:
        over = axis if axis is None or isinstance(axis, int) else tuple(axis) or None  # () is all, as PyTorch's
        values = function(values, axis=over, keepdims=keepdims)
    except ValueError:
        raise ArgumentError(f"axis {axis!r} does not fit a tensor of shape {x.shape}") from None
    return Tensor(values, x.device)
