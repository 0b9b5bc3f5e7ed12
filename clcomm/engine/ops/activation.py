"""Elementwise activations of most models: functions with gradients from their results, and x * gate(x)."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from clcomm.base.errors import ArgumentError
from clcomm.engine.ops.elements import elements, of_elements
from clcomm.engine.ops.in_place import overwrite
from clcomm.engine.tensor import Tensor, float_tensor

Relu = elements("relu", ("x",), (), "0 if x <= 0 else x", "0 if y <= 0 else g")
elements("normal_density", ("x",), (), "0.39894228040143268 * bell(x)", "g * (-x * y)")
elements(
    "normal_cumulative", ("x",), (), "1 - normal_beyond(x) if x > 0 else normal_beyond(x)", "g * normal_density(x)"
)
Gelu = elements("gelu", ("x",), (), "x * normal_cumulative(x)", "g * (normal_cumulative(x) + x * normal_density(x))")
# 0.5 * (1 + tanh(u)) is logistic(2 u), which reaches 0 and 1 where tanh of some drivers stops an ulp before 1.
elements(
    "tanh_gate", ("x",), (), "logistic(1.5957691216057308 * (x + 0.044715 * x * x * x))",
    "g * y * (1 - y) * (1.5957691216057308 * (1 + 3 * 0.044715 * x * x))",
)  # fmt: skip
GeluTanh = elements(
    "gelu_tanh", ("x",), (), "x * tanh_gate(x)",
    "g * (tanh_gate(x) + x * tanh_gate(x) * (1 - tanh_gate(x)) * (1.5957691216057308 * (1 + 3 * 0.044715 * x * x)))",
)  # fmt: skip


def relu(x: Tensor, inplace: bool = False) -> Tensor:
    """Return max(x, 0) of each element, in place in x itself; NaN stays NaN.

    x: float32 of any shape, which the result has too.
    """
    if inplace:
        return overwrite(x, Relu.apply)
    return Relu.apply(float_tensor("relu", x))


@of_elements("logistic(x)", "g * y * (1 - y)")
def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)) of each element.

    x: float32 of any shape, which the result has too.
    """


@of_elements("tangent(x)", "g * (1 - y * y)")
def tanh(x: Tensor) -> Tensor:
    """Return the hyperbolic tangent of each element.

    x: float32 of any shape, which the result has too.
    """


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


@of_elements("x / (1 + exp(-x))", "g * (sigmoid(x) * (1 + x * (1 - sigmoid(x))))")
def silu(x: Tensor) -> Tensor:
    """Return x / (1 + exp(-x)) of each element.

    x: float32 of any shape, which the result has too.
    Source: Elfwing, Uchibe and Doya, "Sigmoid-weighted linear units for neural network function approximation", 2018.
    """


@of_elements("x if x > 0 else negative_slope * x", "g if x > 0 else negative_slope * g")
def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    """Return x where it is positive, else `negative_slope` * x, of each element; NaN stays NaN.

    x: float32 of any shape, which the result has too.
    """
