"""add, sub, mul and div of tensors and numbers, with NumPy's broadcasting."""

from __future__ import annotations

from numbers import Real

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.ops.reduce import sum_over
from clcomm.engine.ops.types import (
    are_whole,
    broadcast_axes,
    broadcast_shape,
    expand,
    floats,
    is_whole,
    launch_broadcast,
    of_integers,
    to_float,
)
from clcomm.engine.tensor import FLOAT32, Shape, Tensor, empty, float_tensor

_NOTHING = -0.0  # adding it changes no bit


def binary(name: str, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Queue out = a <name> b and return out."""
    device = a.device
    if a.shape == b.shape:
        out = empty(device, a.shape) if out is None else out
        size = out.numel()
        device.launch(device.kernel("elementwise", name), *device.grid(size), out, a, b, size)
        return out
    out = empty(device, broadcast_shape(name, a.shape, b.shape)) if out is None else out
    launch_broadcast(f"{name}_broadcast", out, a, b)
    return out


def _affine(x: Tensor, scale: float, shift: float = _NOTHING, out: Tensor | None = None) -> Tensor:
    device, size = x.device, x.numel()
    out = empty(device, x.shape) if out is None else out
    device.launch(device.kernel("elementwise", "affine"), *device.grid(size), out, x, scale, shift, size)
    return out


def _target(ctx: Context, index: int, shape: Shape) -> Tensor | None:
    """Return the tensor for the gradient of input `index` if that input has this shape, else None."""
    return ctx.out(index) if ctx.inputs[index].shape == shape else None


def folded(ctx: Context, index: int, grad: Tensor, sign: float = 1.0) -> Tensor:
    """Return a gradient of the result's shape, or with sign -1 the opposite, summed to the shape of input `index`."""
    shape = ctx.inputs[index].shape
    if grad.shape == shape:
        return grad if sign == 1.0 else _affine(grad, sign, out=ctx.out(index))
    return sum_over(grad, broadcast_axes(shape, grad.shape), sign, ctx.out(index))


class Add(Op):
    """a + b"""

    keeps_columns = True

    @staticmethod
    def forward(ctx: Context, a: Tensor, b: Tensor) -> Tensor:
        return binary("add", a, b)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return tuple([folded(ctx, i, grad) if ctx.needs[i] else None for i in (0, 1)])


class Sub(Op):
    """a - b"""

    keeps_columns = True

    @staticmethod
    def forward(ctx: Context, a: Tensor, b: Tensor) -> Tensor:
        return binary("sub", a, b)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return tuple([folded(ctx, i, grad, (1.0, -1.0)[i]) if ctx.needs[i] else None for i in (0, 1)])


class Mul(Op):
    """a * b"""

    keeps_columns = True

    @staticmethod
    def forward(ctx: Context, a: Tensor, b: Tensor) -> Tensor:
        ctx.save(a, b)
        return binary("mul", a, b)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads: list[Tensor | None] = [None, None]
        for i in (0, 1):
            if ctx.needs[i]:
                full = binary("mul", grad, ctx.saved[1 - i], _target(ctx, i, grad.shape))
                grads[i] = folded(ctx, i, full)
        return tuple(grads)


class Div(Op):
    """a / b"""

    keeps_columns = True

    @staticmethod
    def forward(ctx: Context, a: Tensor, b: Tensor) -> Tensor:
        ctx.save(a, b)
        return binary("div", a, b)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved
        da = db = None
        if ctx.needs[0]:
            da = folded(ctx, 0, binary("div", grad, b, _target(ctx, 0, grad.shape)))
        if ctx.needs[1]:
            a, b = [x if x.shape == grad.shape else expand(x, grad.shape) for x in (a, b)]
            device, size = grad.device, grad.numel()
            full = ctx.out(1) if ctx.inputs[1].shape == grad.shape else empty(device, grad.shape)
            device.launch(device.kernel("elementwise", "div_grad"), *device.grid(size), full, grad, a, b, size)
            db = folded(ctx, 1, full)
        return da, db


class Affine(Op):
    """scale * x + shift, where scale and shift are numbers."""

    keeps_columns = True

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, scale: float, shift: float) -> Tensor:
        ctx.scale, ctx.shift = scale, shift
        return _affine(x, scale, shift)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (grad if ctx.scale == 1.0 else _affine(grad, ctx.scale, out=ctx.out(0)),)


class DivideBy(Op):
    """x / number"""

    keeps_columns = True

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, number: float) -> Tensor:
        ctx.number = number
        return expand(x, x.shape, number)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (expand(grad, grad.shape, ctx.number, ctx.out(0)),)


class DivideNumber(Op):
    """number / x"""

    keeps_columns = True

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, number: float) -> Tensor:
        device, size = x.device, x.numel()
        out = empty(device, x.shape)
        device.launch(device.kernel("elementwise", "divide_number"), *device.grid(size), out, x, number, size)
        ctx.number = number
        ctx.save(out, x)
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, x = ctx.saved
        device, size, dx = x.device, x.numel(), ctx.out(0)
        kernel = device.kernel("elementwise", "divide_number_grad")
        device.launch(kernel, *device.grid(size), dx, grad, out, x, size)
        return (dx,)


def add(a: Tensor | float, b: Tensor | float, *, alpha: float = 1.0) -> Tensor:
    """Return a + alpha b; tensors broadcast as in NumPy, and one operand may be a number.

    a, b: float32, or one of them a number; the result has the shape to which they broadcast. Integers: `types.py`.
    """
    b = b if alpha == 1 else b * alpha
    if is_whole(a) or is_whole(b):
        return of_integers("add", a, b) if are_whole(a, b) else add(*floats(a, b))
    if isinstance(b, Real):
        return Affine.apply(float_tensor("add", a), scale=1.0, shift=float(b))
    if isinstance(a, Real):
        return Affine.apply(float_tensor("add", b), scale=1.0, shift=float(a))
    return Add.apply(*pair("add", a, b))


def sub(a: Tensor | float, b: Tensor | float, *, alpha: float = 1.0) -> Tensor:
    """Return a - alpha b; tensors broadcast as in NumPy, and one operand may be a number.

    a, b: float32, or one of them a number; the result has the shape to which they broadcast. Integers: `types.py`.
    """
    b = b if alpha == 1 else b * alpha
    if is_whole(a) or is_whole(b):
        return of_integers("sub", a, b) if are_whole(a, b) else sub(*floats(a, b))
    if isinstance(b, Real):
        return Affine.apply(float_tensor("sub", a), scale=1.0, shift=-float(b))
    if isinstance(a, Real):
        return Affine.apply(float_tensor("sub", b), scale=-1.0, shift=float(a))
    return Sub.apply(*pair("sub", a, b))


def mul(a: Tensor | float, b: Tensor | float) -> Tensor:
    """Return a * b, element by element; tensors broadcast as in NumPy, and one operand may be a number.

    a, b: float32, or one of them a number; the result has the shape to which they broadcast. Integers: `types.py`.
    """
    if is_whole(a) or is_whole(b):
        return of_integers("mul", a, b) if are_whole(a, b) else mul(*floats(a, b))
    if isinstance(b, Real):
        return Affine.apply(float_tensor("mul", a), scale=float(b), shift=_NOTHING)
    if isinstance(a, Real):
        return Affine.apply(float_tensor("mul", b), scale=float(a), shift=_NOTHING)
    return Mul.apply(*pair("mul", a, b))


def div(a: Tensor | float, b: Tensor | float) -> Tensor:
    """Return a / b, element by element; tensors broadcast as in NumPy, and one operand may be a number.

    a, b: float32, or one of them a number; the result has the shape to which they broadcast. Integers become float32.
    """
    if is_whole(a) or is_whole(b):
        return div(*floats(a, b))
    if isinstance(b, Real):
        return DivideBy.apply(float_tensor("div", a), number=float(b))
    if isinstance(a, Real):
        return DivideNumber.apply(float_tensor("div", b), number=float(a))
    return Div.apply(*pair("div", a, b))


def pair(name: str, a: Tensor | float, b: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return two tensors of one device, of which one is float32, as float32; raises ArgumentError for others."""
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype != b.dtype and FLOAT32 in (a.dtype, b.dtype):
        a, b = to_float(a), to_float(b)
    a, b = float_tensor(name, a), float_tensor(name, b)
    if a.device is not b.device:
        raise ArgumentError(f"{name}: expected tensors of one device, got {a.device.name} and {b.device.name}")
    return a, b
