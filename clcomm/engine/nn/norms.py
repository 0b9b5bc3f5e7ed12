"""Normalisation layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine import functional as F
from clcomm.engine.device import Device
from clcomm.engine.nn.layers import require_positive
from clcomm.engine.nn.module import Module
from clcomm.engine.ops.batch_norm import RankExchange
from clcomm.engine.parameter import Parameter
from clcomm.engine.tensor import Tensor


def _parameters(
    shape: tuple[int, ...], affine: bool, bias: bool, device: Device | str | None
) -> tuple[Parameter | None, Parameter | None]:
    """Return a weight of ones and a bias of zeros, None for those that the layer does not have."""
    if not affine:
        return None, None
    weight = Parameter(np.ones(shape, np.float32), device)
    return weight, Parameter(np.zeros(shape, np.float32), weight.device) if bias else None


class LayerNorm(Module):
    """x [..., *normalized_shape] -> the same, normalised over those dimensions, times `weight` plus `bias`.

    The weight begins as ones, the bias as zeros, as PyTorch's.

    Args:
        normalized_shape: the last dimensions of x; one number for one dimension.
        eps: is added to the variance.
        elementwise_affine: whether the layer has a weight and a bias.
        bias: whether it has a bias beside the weight.
        device: where its parameters are; by default `default_device()`.

    Raises ArgumentError for dimensions below 1.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        device: Device | str | None = None,
    ):
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if not shape or any(not isinstance(n, int) or n < 1 for n in shape):
            raise ArgumentError(f"normalized_shape: expected whole numbers of at least 1, got {normalized_shape!r}")
        self.normalized_shape, self.eps = shape, eps
        self.weight, self.bias = _parameters(shape, elementwise_affine, bias, device)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(Module):
    """x [..., *normalized_shape] -> x / sqrt(mean(x^2) + eps) over those dimensions, times `weight`, at first ones."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        *,
        device: Device | str | None = None,
    ):
        like = LayerNorm(normalized_shape, 0.0, elementwise_affine, bias=False, device=device)
        self.normalized_shape, self.eps, self.weight = like.normalized_shape, eps, like.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class BatchNorm(Module):
    """A layer that normalises each channel over the batch in training, and by its running statistics in `eval()`.

    The weight and the running variance begin as ones, the bias and the running mean as zeros, as PyTorch's.

    Args:
        num_features: the channels of x.
        eps: is added to the variance.
        momentum: the share of a batch in the running statistics; None: they are the means of all batches.
        affine: whether the layer has a weight and a bias.
        track_running_stats: whether it keeps running statistics; if not, `eval()` normalises over the batch too.
        device: where its parameters and buffers are; by default `default_device()`.

    Raises ArgumentError for sizes below 1, and for an x of other dimensions or channels.
    """

    #: Numbers of dimensions that x may have.
    _dims: tuple[int, ...] = ()
    #: The ranks over whose batches it normalises in training; None: over its own.
    _ranks: RankExchange | None = None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        device: Device | str | None = None,
    ):
        require_positive(num_features=num_features)
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.weight, self.bias = _parameters((num_features,), affine, True, device)
        ones, zeros = np.ones(num_features, np.float32), np.zeros(num_features, np.float32)
        is_kept = track_running_stats
        self.register_buffer("running_mean", Tensor(zeros, device) if is_kept else None)
        self.register_buffer("running_var", Tensor(ones, device) if is_kept else None)
        self.register_buffer("num_batches_tracked", Tensor(np.int32(0), device) if is_kept else None)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim not in self._dims or x.shape[1] != self.num_features:
            dims = " or ".join(str(n) for n in self._dims)
            raise ArgumentError(
                f"{type(self).__name__}: expected x of {dims} dimensions with {self.num_features} channels, "
                f"got shape {x.shape}"
            )
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias,
            self.training or self.running_mean is None, self.momentum, self.eps, batches=self.num_batches_tracked,
            ranks=self._ranks,
        )  # fmt: skip


class BatchNorm1d(BatchNorm):
    """x [N, C] or [N, C, L] -> the same, normalised in each channel, times `weight` plus `bias`; see F.batch_norm."""

    _dims = (2, 3)


class BatchNorm2d(BatchNorm):
    """x [N, C, H, W] -> the same, normalised in each channel, times `weight` plus `bias`; see F.batch_norm."""

    _dims = (4,)


class BatchNorm3d(BatchNorm):
    """x [N, C, D, H, W] -> the same, normalised in each channel, times `weight` plus `bias`; see F.batch_norm."""

    _dims = (5,)


class GroupNorm(Module):
    """x [N, C, ...] -> the same, normalised in each sample's groups of channels, times `weight` plus `bias`.

    The weight begins as ones, the bias as zeros, as PyTorch's.

    Args:
        num_groups: divides the channels into so many groups of neighbours.
        num_channels: the channels of x.
        eps: is added to the variance.
        affine: whether the layer has a weight and a bias, of one number for each channel.
        device: where its parameters are; by default `default_device()`.

    Raises ArgumentError for groups that do not divide the channels, and for an x of other channels.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        *,
        device: Device | str | None = None,
    ):
        require_positive(num_groups=num_groups, num_channels=num_channels)
        if num_channels % num_groups:
            raise ArgumentError(f"num_groups: expected groups that divide {num_channels} channels, got {num_groups}")
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, eps
        self.weight, self.bias = _parameters((num_channels,), affine, True, device)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or x.shape[1] != self.num_channels:
            raise ArgumentError(f"GroupNorm: expected x with {self.num_channels} channels, got shape {x.shape}")
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


class InstanceNorm(Module):
    """A layer that normalises each channel of each sample, times `weight` plus `bias` with `affine`.

    Source: Ulyanov, Vedaldi and Lempitsky, "Instance normalization", 2016.

    Args:
        num_features: the channels of x.
        eps: is added to the variance.
        momentum: of running statistics, which are not kept here.
        affine: whether the layer has a weight and a bias.
        track_running_stats: False.
        device: where its parameters are; by default `default_device()`.

    Raises ArgumentError for an x of other dimensions or channels, and with `track_running_stats`.
    """

    _dims: int

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        *,
        device: Device | str | None = None,
    ):
        if track_running_stats is not False:
            raise ArgumentError(f"track_running_stats: expected False, got {track_running_stats!r}")
        like = GroupNorm(1, num_features, eps, affine, device=device)
        self.num_features, self.eps, self.momentum, self.weight, self.bias = (
            num_features, eps, momentum, like.weight, like.bias,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != self._dims or x.shape[1] != self.num_features:
            raise ArgumentError(
                f"{type(self).__name__}: expected x of {self._dims} dimensions with {self.num_features} channels, got "
                f"shape {x.shape}"
            )
        return F.group_norm(x, self.num_features, self.weight, self.bias, self.eps)


class InstanceNorm1d(InstanceNorm):
    """x [N, C, L] -> the same, normalised in each channel of each sample."""

    _dims = 3


class InstanceNorm2d(InstanceNorm):
    """x [N, C, H, W] -> the same, normalised in each channel of each sample."""

    _dims = 4


class InstanceNorm3d(InstanceNorm):
    """x [N, C, D, H, W] -> the same, normalised in each channel of each sample."""

    _dims = 5
