"""GELU, SiLU and leaky ReLU: activations x * gate(x), which keep x for backward."""

from __future__ import annotations

from clcomm.engine.ops.activation import Activation
from clcomm.engine.tensor import Tensor, float_tensor
from clcomm.errors import ArgumentError


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

    `approximate` "tanh" computes that function as 0.5 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))), as GPT-2 does.
    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016. Raises ArgumentError for another approximation.
    """
    ops = {"none": Gelu, "tanh": GeluTanh}
    if approximate not in ops:
        raise ArgumentError(f"gelu: expected approximate 'none' or 'tanh', got {approximate!r}")
    return ops[approximate].apply(float_tensor("gelu", x))


def silu(x: Tensor) -> Tensor:
    """Return x / (1 + exp(-x)) of each element.

    Source: Elfwing, Uchibe and Doya, "Sigmoid-weighted linear units for neural network function approximation", 2018.
    """
    return Silu.apply(float_tensor("silu", x))


def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    """Return x where it is positive, else `negative_slope` * x, of each element; NaN stays NaN."""
    return LeakyRelu.apply(float_tensor("leaky_relu", x), settings=(float(negative_slope),))
