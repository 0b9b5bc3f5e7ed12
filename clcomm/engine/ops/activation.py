"""ReLU, sigmoid and tanh; each keeps its result, from which backward computes the gradient."""

from __future__ import annotations

from typing import Any

from clcomm.engine.autograd import Op
from clcomm.engine.tensor import Tensor, empty, float_tensor


class _Activation(Op):
    """y = f(x), element by element; `kernel_name` names f's kernel, and `<kernel_name>_grad` its gradient's."""

    kernel_name: str

    @classmethod
    def forward(cls, ctx: Any, x: Tensor) -> Tensor:
        device, size = x.device, x.size
        y = empty(device, x.shape)
        device.launch(device.kernel("activation", cls.kernel_name), *device.grid(size), y, x, size)
        ctx.save(y)
        return y

    @classmethod
    def backward(cls, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved
        device, size, dx = grad.device, grad.size, ctx.out(0)
        device.launch(device.kernel("activation", cls.kernel_name + "_grad"), *device.grid(size), dx, grad, y, size)
        return (dx,)


class Relu(_Activation):
    """max(x, 0)"""

    kernel_name = "relu"


class Sigmoid(_Activation):
    """1 / (1 + exp(-x))"""

    kernel_name = "sigmoid"


class Tanh(_Activation):
    """Hyperbolic tangent."""

    kernel_name = "hyperbolic_tangent"


def relu(x: Tensor) -> Tensor:
    """Return max(x, 0) of each element; NaN stays NaN."""
    return Relu.apply(float_tensor("relu", x))


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)) of each element."""
    return Sigmoid.apply(float_tensor("sigmoid", x))


def tanh(x: Tensor) -> Tensor:
    """Return the hyperbolic tangent of each element."""
    return Tanh.apply(float_tensor("tanh", x))
