"""Comparisons, booleans, and elements chosen by them, as PyTorch's."""

from __future__ import annotations

from numbers import Real
from typing import Any, overload

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.device import Device
from clcomm.engine.ops.reduce import folded
from clcomm.engine.ops.types import (
    are_whole,
    binary,
    broadcast_shape,
    cast,
    expand,
    is_whole,
    launch_broadcast,
    of_integers,
    to_float,
)
from clcomm.engine.tensor import (
    BOOL,
    FLOAT32,
    INT32,
    Shape,
    Tensor,
    constant,
    empty,
    float_tensor,
    whole_rows,
    wrap,
)
from clcomm.engine.tensor_methods import require_below


def equal_to(a: Tensor, b: Tensor | float) -> Tensor:
    """Return whether each element of a equals b's; tensors of any type, or a number, that broadcast to the result."""
    return _compared("==", "equal", a, b)


def not_equal_to(a: Tensor, b: Tensor | float) -> Tensor:
    """Return whether each element of a differs from b's, as NaN does from all; arguments as for `==`."""
    return _compared("!=", "not_equal", a, b)


def less_than(a: Tensor, b: Tensor | float) -> Tensor:
    """Return whether each element of a is less than b's; arguments as for `==`."""
    return _compared("<", "less", a, b)


def less_or_equal(a: Tensor, b: Tensor | float) -> Tensor:
    """Return whether each element of a is at most b's; arguments as for `==`."""
    return _compared("<=", "less_equal", a, b)


def greater_than(a: Tensor, b: Tensor | float) -> Tensor:
    """Return whether each element of a is greater than b's; arguments as for `==`."""
    return _compared(">", "less", a, b, turned=True)


def greater_or_equal(a: Tensor, b: Tensor | float) -> Tensor:
    """Return whether each element of a is at least b's; arguments as for `==`."""
    return _compared(">=", "less_equal", a, b, turned=True)


def logical_and(a: Tensor, b: Tensor) -> Tensor:
    """Return whether both are true; a, b: of any type, that broadcast to the result."""
    return _logical("&", a, b)


def logical_or(a: Tensor, b: Tensor) -> Tensor:
    """Return whether one of both is true; a, b: of any type, that broadcast."""
    return _logical("|", a, b)


def logical_xor(a: Tensor, b: Tensor) -> Tensor:
    """Return whether exactly one of both is true; a, b: of any type, that broadcast."""
    return _logical("^", a, b)


def logical_not(x: Tensor) -> Tensor:
    """Return whether each element is false, or 0; x: of any type."""
    return equal_to(x, 0)


def inverted(x: Tensor) -> Tensor:
    """Return `~x`: the opposite of booleans, or of integers' bits."""
    return of_integers("sub", -1, x) if is_whole(x) else logical_not(_boolean("~", x))


def bits(sign: str, a: Tensor, b: Tensor) -> Tensor:
    """Return `a & b` and its like: of the bits of integers, or of booleans."""
    if is_whole(a) and are_whole(a, b):
        return of_integers(sign, a, b)
    return _logical(sign, _boolean(sign, a), _boolean(sign, b))


def to_int(x: Tensor) -> Tensor:
    """Return x as int32, floats without their fractions; x: of any type. There is no gradient."""
    return cast(x, "int_of_float", INT32) if x.dtype == FLOAT32 else wrap(x.device, x.buffer, x.shape, INT32)


def to_bool(x: Tensor) -> Tensor:
    """Return whether each element is not 0; x: of any type."""
    return x if x.dtype == BOOL else not_equal_to(x, 0)


def _compared(sign: str, kernel: str, a: Tensor, b: object, turned: bool = False) -> Tensor:
    device = a.device
    if not isinstance(b, (Tensor, Real)):
        raise ArgumentError(
            f"{sign}: expected a tensor or a number, got {type(b).__name__}; wrap arrays in Tensor(...)"
        )
    if isinstance(b, Tensor) and b.device is not device:
        raise ArgumentError(f"{sign}: expected tensors of one device, got {device.name} and {b.device.name}")
    if a.dtype != FLOAT32 and (b.dtype != FLOAT32 if isinstance(b, Tensor) else _is_whole(b)):
        right, kernel = b if isinstance(b, Tensor) else _whole(device, round(float(b)), INT32), kernel + "_int"
    else:
        a, right = to_float(a), to_float(b) if isinstance(b, Tensor) else constant(device, float(b))
    return _launched(sign, kernel, right, a) if turned else _launched(sign, kernel, a, right)


def _is_whole(number: Real) -> bool:
    return float(number).is_integer() and -(2.0**31) <= float(number) < 2.0**31


def _whole(device: Device, number: int, dtype: np.dtype) -> Tensor:
    return wrap(device, device.keep(("whole", number), lambda: np.array(number, INT32)), (), dtype)


def _boolean(sign: str, x: object) -> Tensor:
    if not isinstance(x, Tensor) or x.dtype != BOOL:
        found = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentError(f"{sign}: expected a tensor of booleans, got {found}; x != 0 is one")
    return x


def _logical(sign: str, *operands: Tensor) -> Tensor:
    kernel = {"&": "both", "|": "either", "^": "not_equal_int"}[sign]
    return _launched(sign, kernel, *[to_bool(x) if isinstance(x, Tensor) else _boolean(sign, x) for x in operands])


def _launched(sign: str, kernel: str, a: Tensor, b: Tensor) -> Tensor:
    out = empty(a.device, broadcast_shape(sign, a.shape, b.shape), BOOL)
    return binary(kernel, out, a, b, file="compare")


def _flags(name: str, condition: object, shape: Shape, device: Device) -> Tensor:
    """Return booleans broadcast to `shape`; an array's are uploaded."""
    if isinstance(condition, np.ndarray) and condition.dtype.kind == "b":
        condition = Tensor(condition, device)
    flags = _boolean(name, condition)
    if flags.shape == shape:
        return flags
    if broadcast_shape(name, flags.shape, shape) != shape:
        raise ArgumentError(f"{name}: expected booleans that broadcast to shape {shape}, got {flags.shape}")
    out = empty(device, shape, BOOL)
    launch_broadcast("first_broadcast", out, flags, flags, file="compare")
    return out


class MaskedFill(Op):
    """x, with a number where `flags` are equal to `where`; there is no gradient there."""

    is_linear = True
    keeps_columns = True

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, flags: Tensor, where: int, value: float) -> Tensor:
        ctx.flags, ctx.where = flags, where
        return _masked(x, flags, where, value, empty(x.device, x.shape))

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (_masked(grad, ctx.flags, ctx.where, 0.0, ctx.out(0)),)


def _masked(x: Tensor, flags: Tensor, where: int, value: float, out: Tensor) -> Tensor:
    kernel = x.device.kernel("compare", "masked")
    x.device.launch(kernel, *x.device.grid(x.numel()), out, x, flags, where, value, x.numel())
    return out


class Where(Op):
    """a where `flags` are true, else b; each has its gradient where it was chosen."""

    keeps_columns = True

    @staticmethod
    def forward(ctx: Context, a: Tensor, b: Tensor, *, flags: Tensor) -> Tensor:
        ctx.flags, device, out = flags, a.device, empty(a.device, flags.shape)
        a, b = [x if x.shape == flags.shape else expand(x, flags.shape) for x in (a, b)]
        device.launch(device.kernel("compare", "chosen"), *device.grid(out.numel()), out, flags, a, b, out.numel())
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads: list[Tensor | None] = []
        for index in (0, 1):
            full = None
            if ctx.needs[index]:
                full = _masked(grad, ctx.flags, index, 0.0, empty(grad.device, grad.shape))
            grads.append(None if full is None else folded(ctx, index, full))
        return tuple(grads)


def masked_fill(x: Tensor, mask: Tensor | np.ndarray, value: float) -> Tensor:
    """Return x with `value` where `mask` is true.

    x: float32 of any shape, which the result has too; mask: booleans that broadcast to it; value: a number. Raises
    ArgumentError for others.
    """
    float_tensor("masked_fill", x)
    if not isinstance(value, Real):
        raise ArgumentError(f"masked_fill: value: expected a number, got {type(value).__name__}")
    flags = _flags("masked_fill: mask", mask, x.shape, x.device)
    return MaskedFill.apply(x, flags=flags, where=1, value=float(value))


@overload
def where(condition: Tensor) -> tuple[Tensor, ...]: ...
@overload
def where(condition: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor: ...
def where(condition: Tensor, a: Any = None, b: Any = None) -> Tensor | tuple[Tensor, ...]:
    """Return a where `condition` is true, else b; without both a tuple of its true places' indices, read to the host.

    condition: booleans; a, b: float32 or numbers; all broadcast to the result. Raises ArgumentError for others.
    """
    if a is None and b is None:
        return tuple([Tensor(each, condition.device) for each in np.nonzero(np.atleast_1d(condition.numpy()))])
    flags = _boolean("where: condition", condition)
    a, b = [constant(flags.device, float(x)) if isinstance(x, Real) else float_tensor("where", x) for x in (a, b)]
    if a.device is not flags.device or b.device is not flags.device:
        raise ArgumentError("where: expected the condition and both tensors on one device, got several")
    shape = broadcast_shape("where", flags.shape, broadcast_shape("where", a.shape, b.shape))
    return Where.apply(a, b, flags=_flags("where", flags, shape, flags.device))


def tril(x: Tensor, diagonal: int = 0) -> Tensor:
    """Return x with zeros above a diagonal of its last two dimensions; x: float32 [..., rows, columns]."""
    return _triangle("tril", x, diagonal, False)


def triu(x: Tensor, diagonal: int = 0) -> Tensor:
    """Return x with zeros below a diagonal of its last two dimensions; x: float32 [..., rows, columns]."""
    return _triangle("triu", x, diagonal, True)


class Triangle(Op):
    """Matrices with zeros below a diagonal, or above it."""

    is_linear = True
    keeps_shape = True

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, diagonal: int, upper: bool) -> Tensor:
        ctx.side = diagonal, int(upper)
        return Triangle._of(x, ctx.side, empty(x.device, x.shape))

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (Triangle._of(grad, ctx.side, ctx.out(0)),)

    @staticmethod
    def _of(x: Tensor, side: tuple[int, int], out: Tensor) -> Tensor:
        device, (rows, columns) = x.device, x.shape[-2:]
        count = x.numel() // columns
        kernel = device.kernel("shape", "triangle")
        device.launch(kernel, *device.grid(count), out, x, *side, rows, columns, count)
        return out


def _triangle(name: str, x: Tensor, diagonal: int, upper: bool) -> Tensor:
    whole_rows(name, float_tensor(name, x))
    if x.ndim < 2:
        raise ArgumentError(f"{name}: expected at least two dimensions, got shape {x.shape}")
    if not isinstance(diagonal, (int, np.integer)):
        raise ArgumentError(f"{name}: diagonal: expected a whole number, got {diagonal!r}")
    limit = max(x.shape[-2:])  # beyond, it has all or nothing
    return Triangle.apply(x, diagonal=int(min(max(diagonal, -limit), limit)), upper=upper)


def one_hot(x: Tensor, num_classes: int = -1) -> Tensor:
    """Return int32 [..., num_classes]: 1 at the class of each element, 0 elsewhere.

    x: int32 of any shape; num_classes: -1 for one more than the largest, which waits for the queue.
    Raises ArgumentError for a number that is no class; what only the device knows is read to the host.
    """
    if not isinstance(x, Tensor) or x.dtype != INT32:
        raise ArgumentError(f"one_hot: expected int32 classes, got {x.dtype if isinstance(x, Tensor) else type(x)}")
    whole = x.numpy() if num_classes == -1 else x
    classes = int(whole.max()) + 1 if isinstance(whole, np.ndarray) else num_classes
    said = "one_hot: expected classes from 0 to {}, got {}"
    if not require_below(said, whole, max(classes, 1)):
        require_below(said, x.numpy(), max(classes, 1))
    if classes < 1:
        raise ArgumentError(f"one_hot: num_classes: expected -1, or 1 or more, got {num_classes}")
    numbers = Tensor(np.arange(classes, dtype=np.int32), x.device)
    return to_int(equal_to(x.alias((*x.shape, 1)), numbers))
