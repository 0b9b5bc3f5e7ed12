"""Elementwise activations: functions with gradients from their results, and x * gate(x), which keep x for backward."""

from __future__ import annotations

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.ops.in_place import overwrite
from clcomm.engine.tensor import Tensor, empty, float_tensor


class Activation(Op):
    """y = f(x), element by element; `kernel_name` names f's kernel, and `<kernel_name>_grad` its gradient's.

    Backward takes y if the class `keeps_result`, else x. `settings` are the kernels' numbers between the arrays and the
    count.
    """

    keeps_columns = True

    source = "activation"
    kernel_name: str
    keeps_result = True

    @classmethod
    def forward(cls, ctx: Context, x: Tensor, *, settings: tuple[float, ...] = ()) -> Tensor:
        device, size, y = x.device, x.numel(), empty(x.device, x.shape)
        device.launch(device.kernel(cls.source, cls.kernel_name), *device.grid(size), y, x, *settings, size)
        ctx.settings = settings
        ctx.save(y if cls.keeps_result else x)
        return y

    @classmethod
    def backward(cls, ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = ctx.saved
        device, size, dx = grad.device, grad.numel(), ctx.out(0)
        kernel = device.kernel(cls.source, cls.kernel_name + "_grad")
        device.launch(kernel, *device.grid(size), dx, grad, kept, *ctx.settings, size)
        return (dx,)


class Relu(Activation):
    """max(x, 0)"""

    kernel_name = "relu"


class SigmoidOp(Activation):
    """1 / (1 + exp(-x))"""

    kernel_name = "sigmoid"


class TanhOp(Activation):
    """Hyperbolic tangent."""

    kernel_name = "hyperbolic_tangent"


def relu(x: Tensor, inplace: bool = False) -> Tensor:
    """Return max(x, 0) of each element, in place in x itself; NaN stays NaN.

    x: float32 of any shape, which the result has too.
    """
    if inplace:
        return overwrite(x, Relu.apply)
    return Relu.apply(float_tensor("relu", x))


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)) of each element.

    x: float32 of any shape, which the result has too.
    """
    return SigmoidOp.apply(float_tensor("sigmoid", x))


def tanh(x: Tensor) -> Tensor:
    """Return the hyperbolic tangent of each element.

    x: float32 of any shape, which the result has too.
    """
    return TanhOp.apply(float_tensor("tanh", x))


class _Gated(Activation):
    """y = x * gate(x)"""

    source = "gated"
    keeps_result = False


class Gelu(_Gated):
    """x times the normal distribution's cumulative function at x."""

    kernel_name = "gelu"


class GeluTanh(_Gated):
    """GELU with tanh in place of that function."""

    kernel_name = "gelu_tanh"


class Silu(_Gated):
    """x / (1 + exp(-x))"""

    kernel_name = "silu"


class LeakyRelu(_Gated):
    """x where it is positive, else slope * x."""

    kernel_name = "leaky_relu"


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return x times the normal distribution's cumulative function at x, of each element.

    x: float32 of any shape, which the result has too.
    `approximate` "tanh" computes that function as 0.5 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))), as GPT-2 does.
    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016. Raises ArgumentError for another approximation.
    """
    ops = {"none": Gelu, "tanh": GeluTanh}
    if approximate not in ops:
        raise ArgumentError(f"gelu: expected approximate 'none' or 'tanh', got {approximate!r}")
    return ops[approximate].apply(float_tensor("gelu", x))


def silu(x: Tensor) -> Tensor:
    """Return x / (1 + exp(-x)) of each element.

    x: float32 of any shape, which the result has too.
    Source: Elfwing, Uchibe and Doya, "Sigmoid-weighted linear units for neural network function approximation", 2018.
    """
    return Silu.apply(float_tensor("silu", x))


def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    """Return x where it is positive, else `negative_slope` * x, of each element; NaN stays NaN.

    x: float32 of any shape, which the result has too.
    """
    return LeakyRelu.apply(float_tensor("leaky_relu", x), settings=(float(negative_slope),))
