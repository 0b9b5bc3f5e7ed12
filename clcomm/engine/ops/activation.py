"""Elementwise activations; ReLU, sigmoid and tanh, with gradients computed from their results."""

from __future__ import annotations

from clcomm.engine.autograd import Context, Op
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
        device, size, y = x.device, x.size, empty(x.device, x.shape)
        device.launch(device.kernel(cls.source, cls.kernel_name), *device.grid(size), y, x, *settings, size)
        ctx.settings = settings
        ctx.save(y if cls.keeps_result else x)
        return y

    @classmethod
    def backward(cls, ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = ctx.saved
        device, size, dx = grad.device, grad.size, ctx.out(0)
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


def relu(x: Tensor) -> Tensor:
    """Return max(x, 0) of each element; NaN stays NaN."""
    return Relu.apply(float_tensor("relu", x))


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)) of each element."""
    return SigmoidOp.apply(float_tensor("sigmoid", x))


def tanh(x: Tensor) -> Tensor:
    """Return the hyperbolic tangent of each element."""
    return TanhOp.apply(float_tensor("tanh", x))
