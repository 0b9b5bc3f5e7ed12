"""Layers and losses. N C H W: images, channels, height, width."""

from __future__ import annotations

import numpy as np

from clcomm.engine import functional as F
from clcomm.engine.device import Device
from clcomm.engine.nn.init import Generator, layer_values, normal_values
from clcomm.engine.nn.module import Module
from clcomm.engine.ops.dropout import check_probability
from clcomm.engine.parameter import Parameter
from clcomm.engine.random_stream import RandomStream
from clcomm.engine.tensor import Tensor
from clcomm.errors import ArgumentError


def require_positive(**sizes: int) -> None:
    """Raise ArgumentError, with the name, for a size below 1."""
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise ArgumentError(f"{name}: expected a whole number of at least 1, got {value!r}")


class Linear(Module):
    """x [N, in_features] -> x weight^T + bias [N, out_features]; initial values are PyTorch's.

    Args:
        bias: whether the layer has a bias.
        device: where its parameters are; by default `default_device()`.
        rng: the source of the initial values; by default the one that `manual_seed` seeds.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: Device | str | None = None,
        rng: Generator | None = None,
    ):
        require_positive(in_features=in_features, out_features=out_features)
        weight_values, bias_values = layer_values((out_features, in_features), bias, rng)
        self.weight = Parameter(weight_values, device)
        self.bias = None if bias_values is None else Parameter(bias_values, self.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Embedding(Module):
    """Indices [...] -> rows of a table [..., embedding_dim]; initial values are drawn from N(0, 1), as PyTorch's.

    Args:
        num_embeddings: the rows of the table.
        embedding_dim: the values of a row.
        padding_idx: a row that begins as zeros and gets no gradient; a negative one counts from the end.
        device: where the table is; by default `default_device()`.
        rng: the source of the initial values; by default the one that `manual_seed` seeds.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        device: Device | str | None = None,
        rng: Generator | None = None,
    ):
        require_positive(num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            last = num_embeddings - 1
            raise ArgumentError(f"padding_idx: expected from {-num_embeddings} to {last}, got {padding_idx!r}")
        values = normal_values((num_embeddings, embedding_dim), rng)
        if padding_idx is not None:
            values[padding_idx] = 0
        self.padding_idx = padding_idx
        self.weight = Parameter(values, device)

    def forward(self, indices: Tensor) -> Tensor:
        return F.embedding(indices, self.weight, self.padding_idx)


class _Pool(Module):
    """A pooling layer's sizes: each is one number for both directions, or (vertical, horizontal)."""

    def __init__(
        self,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] | None = None,
        padding: int | tuple[int, int] = 0,
    ):
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding


class MaxPool2d(_Pool):
    """x [N, C, H, W] -> the largest value of each window; `stride` is `kernel_size` unless given."""

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, self.kernel_size, self.stride, self.padding)


class AvgPool2d(_Pool):
    """x [N, C, H, W] -> the mean of each window; `stride` is `kernel_size` unless given."""

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, self.kernel_size, self.stride, self.padding)


class AdaptiveAvgPool2d(Module):
    """x [N, C, H, W] -> the means of windows that cover it in `output_size` rows and columns; None: as many as x's."""

    def __init__(self, output_size: int | tuple[int | None, int | None] | None):
        self.output_size = output_size

    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(x, self.output_size)


class _Activation(Module):
    """An activation, which gives x its result where it is to work in place."""

    def __init__(self, inplace: bool = False):
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        return F.overwrite(x, self.of) if self.inplace else self.of(x)

    def of(self, x: Tensor) -> Tensor:
        """Return the result."""
        raise TypeError(f"{type(self).__name__} defines no of()")


class ReLU(_Activation):
    """max(x, 0); inplace: x itself gets it."""

    def of(self, x: Tensor) -> Tensor:
        return F.relu(x)


class Sigmoid(Module):
    """1 / (1 + exp(-x))"""

    def forward(self, x: Tensor) -> Tensor:
        return F.sigmoid(x)


class Tanh(Module):
    """Hyperbolic tangent."""

    def forward(self, x: Tensor) -> Tensor:
        return F.tanh(x)


class GELU(Module):
    """x times the normal distribution's cumulative function at x; with `approximate` "tanh" as GPT-2 computes it."""

    def __init__(self, approximate: str = "none"):
        if approximate not in ("none", "tanh"):
            raise ArgumentError(f"GELU: expected approximate 'none' or 'tanh', got {approximate!r}")
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, self.approximate)


class SiLU(_Activation):
    """x / (1 + exp(-x)); inplace: x itself gets it."""

    def of(self, x: Tensor) -> Tensor:
        return F.silu(x)


class LeakyReLU(_Activation):
    """x where it is positive, else negative_slope * x; inplace: x itself gets it."""

    def __init__(self, negative_slope: float = 0.01, inplace: bool = False):
        super().__init__(inplace)
        self.negative_slope = negative_slope

    def of(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, self.negative_slope)


class Dropout(_Activation):
    """x with each element set to 0 with probability p, else divided by 1 - p, in training; x itself in `eval()`.

    inplace: x itself gets the result.

    The random numbers are those of the device's RandomStream, which `manual_seed` seeds, for each rank another.

    Attributes:
        stream: draws the numbers in place of the device's; None: the device's does.

    Raises ArgumentError unless p is from 0 to 1.
    """

    stream: RandomStream | None = None

    def __init__(self, p: float = 0.5, inplace: bool = False):
        super().__init__(inplace)
        check_probability("Dropout", p)
        self.p = p

    def of(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, self.training, stream=self.stream)


class Softmax(Module):
    """exp(x) / sum(exp(x)) along `axis`."""

    def __init__(self, axis: int = -1):
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(x, self.axis)


class LogSoftmax(Module):
    """x - log(sum(exp(x))) along `axis`."""

    def __init__(self, axis: int = -1):
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(x, self.axis)


class Flatten(Module):
    """x [N, ...] -> [N, rest], the dimensions from `start_dim` on merged into one."""

    def __init__(self, start_dim: int = 1):
        self.start_dim = start_dim

    def forward(self, x: Tensor) -> Tensor:
        return F.flatten(x, self.start_dim)


class CrossEntropyLoss(Module):
    """Cross-entropy of logits [rows, classes] against integer classes [rows]; see ops.class_losses.cross_entropy."""

    def __init__(
        self,
        reduction: str = "mean",
        *,
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
    ):
        self.reduction, self.weight = reduction, weight
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing

    def forward(self, logits: Tensor, targets: Tensor | np.ndarray) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(
            logits, targets, self.reduction, weight=self.weight, ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )  # fmt: skip


class NLLLoss(Module):
    """Negative log-likelihood of log-probabilities [rows, classes]; see ops.class_losses.nll_loss."""

    def __init__(self, reduction: str = "mean", *, weight: Tensor | None = None, ignore_index: int | None = None):
        self.reduction, self.weight, self.ignore_index = reduction, weight, ignore_index

    def forward(self, log_probabilities: Tensor, targets: Tensor | np.ndarray) -> Tensor:  # type: ignore[override]
        return F.nll_loss(
            log_probabilities, targets, self.reduction, weight=self.weight, ignore_index=self.ignore_index
        )


class BCEWithLogitsLoss(Module):
    """Binary cross-entropy of sigmoid(logits); see ops.loss.binary_cross_entropy_with_logits."""

    def __init__(self, reduction: str = "mean", *, weight: Tensor | None = None, pos_weight: Tensor | None = None):
        self.reduction, self.weight, self.pos_weight = reduction, weight, pos_weight

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return F.binary_cross_entropy_with_logits(
            logits, target, self.reduction, weight=self.weight, pos_weight=self.pos_weight
        )


class SmoothL1Loss(Module):
    """Squared for small errors, absolute for large ones; see ops.loss.smooth_l1_loss."""

    def __init__(self, reduction: str = "mean", beta: float = 1.0):
        self.reduction, self.beta = reduction, beta

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return F.smooth_l1_loss(prediction, target, self.reduction, self.beta)


class MSELoss(Module):
    """Squared error of two tensors of one shape; see ops.loss.mse_loss."""

    def __init__(self, reduction: str = "mean"):
        self.reduction = reduction

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return F.mse_loss(prediction, target, self.reduction)
