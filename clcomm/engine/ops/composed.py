"""Activations and losses made of other functions, with PyTorch's names and gradients, at their kinks too."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from clcomm.base.errors import ArgumentError
from clcomm.engine.fusion import chained
from clcomm.engine.ops.activation import sigmoid
from clcomm.engine.ops.blocks import split
from clcomm.engine.ops.comparisons import where
from clcomm.engine.ops.elements import elements, of_elements
from clcomm.engine.ops.elementwise import add, div, mul, sub
from clcomm.engine.ops.functions import abs, clamp, exp, rsqrt, square, xlogy
from clcomm.engine.ops.loss import SmoothL1, check_pair, check_reduction
from clcomm.engine.ops.ordered import norm
from clcomm.engine.ops.reduce import broadcast_to, mean, sum
from clcomm.engine.ops.shape import reshape
from clcomm.engine.ops.types import broadcast_shape
from clcomm.engine.tensor import Tensor, float_tensor, whole_rows

Softplus = elements(
    "softplus", ("x",), ("beta", "threshold"),
    "x if x * beta > threshold else (above_0(x * beta) + log_of_1_plus(exp(-abs(x * beta)))) / beta",
    "g if x * beta > threshold else g / beta * (1 / (1 + exp(-(x * beta)))) * beta",
)  # fmt: skip
elements("mish_gate", ("x",), (), "mish_gate(x)", "g * (1 - y * y) * sigmoid(x)")
HardTanh = elements(
    "hardtanh", ("x",), ("least", "most"), "least if x < least else most if x > most else x",
    "0 if (x <= least) | (x >= most) else g",
)  # fmt: skip
Entropy = elements(
    "entropy", ("p", "target"), (), "(target - 1) * limited(log1p(-p)) - target * limited(log(p))",
    "g * ((p - target) / (1e-12 if (1 - p) * p < 1e-12 else (1 - p) * p))",
    "g * (limited(log(1 - p)) - limited(log(p)))",
)  # fmt: skip
elements("limited", ("x",), (), "-100 if x < -100 else x", "0 if x < -100 else g")


@of_elements("x if x > 0 else alpha * (exp(x) - 1)", "g * (alpha * exp(x) if x <= 0 else 1)")
def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """Return x where it is positive, else alpha * (e^x - 1); x: float32 of any shape, which the result has too."""


def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """Return log(1 + e^(beta x)) / beta, x itself where beta x is above the threshold.

    x: float32 of any shape, which the result has too. Raises ArgumentError unless beta is positive.
    """
    if not beta > 0:
        raise ArgumentError(f"softplus: expected a positive beta, got {beta!r}")
    return Softplus.apply(float_tensor("softplus", x), settings=(float(beta), float(threshold)))


@of_elements("x * mish_gate(x)", "g * (mish_gate(x) + x * (1 - mish_gate(x) * mish_gate(x)) * sigmoid(x))")
def mish(x: Tensor) -> Tensor:
    """Return x * tanh(softplus(x)); x: float32 of any shape, which the result has too. Source: Misra, "Mish", 2019."""


def hardtanh(x: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    """Return x between two limits, else the limit, at which there is no gradient; x: float32 of any shape."""
    if not min_val <= max_val:
        raise ArgumentError(f"hardtanh: expected min_val of at most max_val, got {min_val} and {max_val}")
    return HardTanh.apply(float_tensor("hardtanh", x), settings=(float(min_val), float(max_val)))


def relu6(x: Tensor) -> Tensor:
    """Return x between 0 and 6, else the limit, at which there is no gradient; x: float32 of any shape."""
    return hardtanh(x, 0.0, 6.0)


@of_elements("hardtanh(x + 3, 0, 6) / 6", "g / 6 if (x > -3) & (x < 3) else 0")
def hardsigmoid(x: Tensor) -> Tensor:
    """Return relu6(x + 3) / 6; x: float32 of any shape, which the result has too."""


@of_elements("x * (above_0(x + 3 if x + 3 < 6 else 6) / 6)", "g * (0 if x <= -3 else x / 3 + 0.5 if x < 3 else 1)")
def hardswish(x: Tensor) -> Tensor:
    """Return x * hardsigmoid(x); x: float32 of any shape. Source: Howard et al., "Searching for MobileNetV3", 2019."""


@of_elements("-above_0(-x) - log_of_1_plus(exp(-abs(x)))", "g * (1 / (1 + exp(x)))")
def logsigmoid(x: Tensor) -> Tensor:
    """Return log(1 / (1 + e^-x)) of each element; x: float32 of any shape, which the result has too."""


@of_elements("value if x <= threshold else x", "0 if x <= threshold else g")
def threshold(x: Tensor, threshold: float, value: float) -> Tensor:
    """Return x where it is above the threshold, else the value; x: float32 of any shape, which the result has too."""


def glu(x: Tensor, axis: int = -1) -> Tensor:
    """Return the first half of x along a dimension times the sigmoid of the second.

    x: float32. Raises ArgumentError for an odd length. Source: Dauphin et al., "Language Modeling with Gated
    Convolutional Networks", 2017.
    """
    if x.shape[axis] % 2:
        raise ArgumentError(f"glu: expected an even length of dimension {axis}, got shape {x.shape}")
    first, second = split(x, x.shape[axis] // 2, axis)
    return mul(first, sigmoid(second))


def normalize(x: Tensor, p: float = 2.0, axis: int = 1, eps: float = 1e-12) -> Tensor:
    """Return x divided by its norm of order p along a dimension, or by eps where the norm is less.

    x: float32, whose shape the result has too.
    """
    return div(x, clamp(norm(x, p, axis, keepdims=True), min=eps))


def cosine_similarity(x1: Tensor, x2: Tensor, axis: int = 1, eps: float = 1e-8) -> Tensor:
    """Return the cosine of the angle of x1 and x2 along a dimension, which the result does not have.

    x1, x2: float32 that broadcast; each norm counts as at least eps.
    """
    shape = broadcast_shape("cosine_similarity", x1.shape, x2.shape)
    whole = [x if x.shape == shape else broadcast_to(x, shape) for x in (x1, x2)]
    return sum(mul(*[div(x, clamp(norm(x, 2.0, axis, keepdims=True), min=eps)) for x in whole]), axis)


@chained
def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """Return x where it is positive, else x times the weight.

    x: float32 [N, C, ...]; weight: [1] or [C]. Raises ArgumentError for another number of weights.
    """
    channels = x.shape[1] if float_tensor("prelu", x).ndim > 1 else 1
    if float_tensor("prelu: weight", weight).shape not in ((1,), (channels,)):
        raise ArgumentError(f"prelu: weight: expected shape (1,) or ({channels},), got {weight.shape}")
    slopes = reshape(weight, (weight.numel(), *[1] * max(x.ndim - 2, 0)))
    return where(x > 0, x, mul(slopes, x))


@chained
def rms_norm(
    x: Tensor, normalized_shape: int | tuple[int, ...], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) over its last dimensions, times the weight.

    x: float32 [..., *normalized_shape], which the result has too; eps: 2^-23 by default. Raises ArgumentError for other
    dimensions. Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not shape or float_tensor("rms_norm", x).shape[x.ndim - len(shape) :] != shape:
        raise ArgumentError(f"rms_norm: expected the last dimensions {shape}, got shape {x.shape}")
    whole_rows("rms_norm", x)
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    scaled = mul(x, rsqrt(add(mean(square(x), axes, True), 2.0**-23 if eps is None else float(eps))))
    return scaled if weight is None else mul(scaled, weight)


def reduced_loss(losses: Tensor, reduction: str) -> Tensor:
    """Return losses, their "mean" or their "sum"; ArgumentError for another reduction than these and "none"."""
    check_reduction("loss", reduction)
    return losses if reduction == "none" else mean(losses) if reduction == "mean" else sum(losses)


@chained
def l1_loss(prediction: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """Return |prediction - target| of two float32 tensors of one shape, averaged, summed or of each element."""
    check_pair("l1_loss", prediction, target, reduction)
    return reduced_loss(abs(sub(prediction, target)), reduction)


def huber_loss(prediction: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0) -> Tensor:
    """Return d^2 / 2 where the difference d of two tensors of one shape is below delta, else delta (|d| - delta / 2).

    prediction, target: float32. Raises ArgumentError unless delta is positive.
    """
    if not delta > 0:
        raise ArgumentError(f"huber_loss: expected a positive delta, got {delta!r}")
    check_pair("huber_loss", prediction, target, reduction)
    return SmoothL1.apply(prediction, target, settings=(float(delta), float(delta)), reduction=reduction)


@chained
def binary_cross_entropy(prediction: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """Return -(y log(p) + (1 - y) log(1 - p)) of probabilities p and y of one shape, with logarithms of at least -100.

    prediction, target: float32. `binary_cross_entropy_with_logits` is more exact.
    """
    check_pair("binary_cross_entropy", prediction, target, reduction)
    return reduced_loss(Entropy.apply(prediction, target), reduction)


@chained
def kl_div(prediction: Tensor, target: Tensor, *, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """Return y (log(y) - x) of log-probabilities x and probabilities y of one shape, 0 where y is 0.

    Args:
        prediction: float32 logarithms.
        target: float32 probabilities, or with `log_target` their logarithms.
        reduction: "mean" of all elements, "batchmean", their sum divided by the first dimension, "sum" or "none".
    """
    check_pair("kl_div", prediction, target, "sum" if reduction == "batchmean" else reduction)
    if log_target:
        losses = mul(exp(target), sub(target, prediction))
    else:
        losses = sub(xlogy(target, target), mul(target, prediction))
    if reduction == "batchmean":
        return div(sum(losses), float(prediction.shape[0]))
    return reduced_loss(losses, reduction)
