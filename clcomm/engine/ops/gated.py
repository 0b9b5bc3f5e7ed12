"""GELU, SiLU and leaky ReLU: activations x * gate(x), which keep x for backward."""

from __future__ import annotations

from typing import Any

from clcomm.engine.autograd import Op
from clcomm.engine.tensor import Tensor, empty, float_tensor
from clcomm.errors import ArgumentError


class Gated(Op):
    """y = x * gate(x), element by element; `name` is the kernel, `<name>_grad` its gradient's.

    `settings` are the kernels' numbers between the arrays and the count.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *, name: str, settings: tuple[float, ...] = ()) -> Tensor:
        device, size, y = x.device, x.size, empty(x.device, x.shape)
        device.launch(device.kernel("gated", name), *device.grid(size), y, x, *settings, size)
        ctx.name, ctx.settings = name, settings
        ctx.save(x)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved
        device, size, dx = x.device, x.size, ctx.out(0)
        kernel = device.kernel("gated", ctx.name + "_grad")
        device.launch(kernel, *device.grid(size), dx, grad, x, *ctx.settings, size)
        return (dx,)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return x times the normal distribution's cumulative function at x, of each element.

    `approximate` "tanh" computes that function as 0.5 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))), as GPT-2 does.
    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016. Raises ArgumentError for another approximation.
    """
    kernels = {"none": "gelu", "tanh": "gelu_tanh"}
    if approximate not in kernels:
        raise ArgumentError(f"gelu: expected approximate 'none' or 'tanh', got {approximate!r}")
    return Gated.apply(float_tensor("gelu", x), name=kernels[approximate])


def silu(x: Tensor) -> Tensor:
    """Return x / (1 + exp(-x)) of each element.

    Source: Elfwing, Uchibe and Doya, "Sigmoid-weighted linear units for neural network function approximation", 2018.
    """
    return Gated.apply(float_tensor("silu", x), name="silu")


def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    """Return x where it is positive, else `negative_slope` * x, of each element; NaN stays NaN."""
    return Gated.apply(float_tensor("leaky_relu", x), name="leaky_relu", settings=(float(negative_slope),))
