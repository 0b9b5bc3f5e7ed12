"""add, sub, mul and div of tensors and numbers, with NumPy's broadcasting."""

from __future__ import annotations

from numbers import Real

from clcomm.engine.autograd import Context, Op
from clcomm.engine.ops.elements import elements
from clcomm.engine.ops.reduce import affine
from clcomm.engine.ops.types import are_whole, expand, floats, is_whole, of_integers, pair
from clcomm.engine.tensor import Tensor, float_tensor

_NOTHING = -0.0  # adding it changes no bit
Add = elements("add", ("a", "b"), (), "a + b", "g", "g")
Sub = elements("sub", ("a", "b"), (), "a - b", "g", "-g")
Mul = elements("mul", ("a", "b"), (), "a * b", "g * b", "g * a")
Div = elements("div", ("a", "b"), (), "a / b", "g / b", "-g * (a / b) / b")
DivideNumber = elements("divide_number", ("x",), ("number",), "number / x", "-g * y / x")


class Affine(Op):
    """scale * x + shift, where scale and shift are numbers."""

    keeps_columns = True

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, scale: float, shift: float) -> Tensor:
        ctx.scale, ctx.shift = scale, shift
        return affine(x, scale, shift)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (grad if ctx.scale == 1.0 else affine(grad, ctx.scale, _NOTHING, ctx.out(0)),)


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
        return DivideNumber.apply(float_tensor("div", b), settings=(float(a),))
    return Div.apply(*pair("div", a, b))
