"""Batch norm, of one rank's batch or of several ranks', with its gradients and running statistics."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.modes import is_recomputing
from clcomm.engine.ops.shape import copy_part, permuted
from clcomm.engine.tensor import INT32, Shape, Tensor, empty, float_tensor, wrap
from clcomm.engine.view import Block

#: Where the statistics come from, as in batch_norm.cl.
GIVEN, _OF_BATCH, _TRACKED, _CUMULATIVE = range(4)
#: The label of the ranks' exchange.
STATISTICS = "batch statistics"


class Running(NamedTuple):
    """Running statistics of each channel, and the number of batches, int32 of shape ()."""

    mean: Tensor
    variance: Tensor
    batches: Tensor | None


class RankExchange(Protocol):
    """The ranks' exchange as batch norm uses it: gathered parts, and sums in rank order."""

    size: int

    def gather(self, part: Tensor, axis: int, label: str) -> Tensor:
        """Return all ranks' parts one after the other along `axis`; collective."""

    def weighted(self, x: Tensor, label: str) -> Tensor:
        """Return the sum of all ranks' x times the weights of their losses, divided by this rank's; collective."""


def _count(weight: Tensor | None, bias: Tensor | None) -> int:
    return (weight is not None) + (bias is not None)


def _count_batch(batches: Tensor | None, statistics: int) -> None:
    if batches is not None and statistics in (_TRACKED, _CUMULATIVE):
        device = batches.device
        device.launch(device.kernel("batch_norm", "count_batch"), *device.grid(1), batches)


def _grid(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (global, local) size of a kernel with a row for each channel of x."""
    return x.device.row_grid(x.shape[1], x.numel() // x.shape[1])


class BatchNormOp(Op):
    """(x - mean) / sqrt(variance + eps) * weight + bias in each channel; the batch's or running `statistics`."""

    @classmethod
    def shape_of_none(cls, x: Tensor, *parameters: Tensor | None, statistics: int, **attrs: Any) -> Shape | None:
        return x.shape if statistics == GIVEN else None

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weight: Tensor | None, bias: Tensor | None, *, running: Running | None,
        statistics: int, momentum: float, eps: float,
    ) -> Tensor:  # fmt: skip
        device, channels = x.device, x.shape[1]
        ctx.parameters, ctx.statistics, ctx.eps, ctx.running = _count(weight, bias), statistics, eps, running
        ctx.turned = math.prod(x.shape[2:]) == 1 and x.shape[0] > 1
        ctx.sizes = (1, channels, x.shape[0]) if ctx.turned else (x.shape[0], channels, math.prod(x.shape[2:]))
        values = _turned(x, ctx.sizes) if ctx.turned else x
        y, means, scales = empty(device, x.shape), empty(device, (channels,)), empty(device, (channels,))
        mean, variance, batches = running or (x, x, None)
        _count_batch(batches, statistics)
        device.launch(
            device.kernel("batch_norm", "batch_norm"), *_grid(x),
            y, means, scales, values, x if weight is None else weight, x if bias is None else bias, mean, variance,
            x if batches is None else batches, momentum, eps, ctx.parameters, statistics, *ctx.sizes,
        )  # fmt: skip
        ctx.save(values, weight, means, scales)
        return _turned_back(y, x.shape, empty(device, x.shape)) if ctx.turned else y

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, means, scales = ctx.saved
        device, channels = grad.device, ctx.sizes[1]
        up = _turned(grad, ctx.sizes) if ctx.turned else grad
        dx = ctx.out(0) if ctx.needs[0] else None
        place = empty(device, grad.shape) if dx is None or ctx.turned else dx
        sums = [ctx.out(i) if ctx.needs[i] else empty(device, (channels,)) for i in (1, 2)]
        device.launch(
            device.kernel("batch_norm", "batch_norm_grad"), *_grid(grad),
            place, *sums, up, values, means, scales, values if weight is None else weight,
            ctx.parameters, ctx.statistics, int(dx is not None), *ctx.sizes,
        )  # fmt: skip
        if dx is not None and ctx.turned:
            _turned_back(place, dx.shape, dx)
        return dx, *(each if ctx.needs[index] else None for index, each in enumerate(sums, 1))


def _turned(x: Tensor, sizes: Shape) -> Tensor:
    """Return [N, C] as [C, N], so that sums run along memory."""
    _, channels, images = sizes
    return permuted(x.alias((images, channels)), (1, 0), empty(x.device, (channels, images)))


def _turned_back(x: Tensor, shape: Shape, out: Tensor) -> Tensor:
    permuted(x.alias((shape[1], shape[0])), (1, 0), wrap(out.device, out.buffer, shape[:2]))
    return out


class BatchNormOfRanks(Op):
    """(x - mean) / sqrt(variance + eps) * weight + bias, where the statistics are those of all ranks' x together.

    Gradients of weight and bias are this rank's. Sums are made in the order of the ranks.
    """

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weight: Tensor | None, bias: Tensor | None, *, running: Running | None,
        statistics: int, momentum: float, eps: float, ranks: RankExchange,
    ) -> Tensor:  # fmt: skip
        device, channels = x.device, x.shape[1]
        ctx.ranks, ctx.parameters = ranks, _count(weight, bias)
        ctx.sizes = x.shape[0], channels, math.prod(x.shape[2:])
        own = empty(device, (2 * channels + 1,))
        device.launch(device.kernel("batch_norm", "moments"), *_grid(x), own, x, *ctx.sizes)
        everyone = ranks.gather(own, 0, STATISTICS)
        mean, variance, batches = running or (x, x, None)
        _count_batch(batches, statistics)
        means, variances, total = empty(device, (channels,)), empty(device, (channels,)), empty(device, (1,))
        device.launch(
            device.kernel("batch_norm", "combine_moments"), *device.grid(channels), means, variances, total, everyone,
            mean, variance, x if batches is None else batches, momentum, statistics, ranks.size, channels,
        )  # fmt: skip
        y, means_used, scales = empty(device, x.shape), empty(device, (channels,)), empty(device, (channels,))
        device.launch(
            device.kernel("batch_norm", "batch_norm"), *_grid(x),
            y, means_used, scales, x, x if weight is None else weight, x if bias is None else bias, means, variances,
            x, 0.0, eps, ctx.parameters, GIVEN, *ctx.sizes,
        )  # fmt: skip
        ctx.save(x, weight, means_used, scales, total)
        return y

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, means, scales, total = ctx.saved
        device, channels = grad.device, ctx.sizes[1]
        own = [ctx.out(i) if ctx.needs[i] else empty(device, (channels,)) for i in (1, 2)]
        factors = x if weight is None else weight
        device.launch(
            device.kernel("batch_norm", "batch_norm_grad"), *_grid(grad),
            x, *own, grad, x, means, scales, factors, ctx.parameters, GIVEN, 0, *ctx.sizes,
        )  # fmt: skip
        dx = None
        if ctx.needs[0]:
            sums = empty(device, (2 * channels,))
            for number, each in enumerate((own[1], own[0])):
                copy_part((channels,), sums, Block(number * channels, (1,)), each, Block(0, (1,)))
            sums, dx = ctx.ranks.weighted(sums, STATISTICS), ctx.out(0)
            device.launch(
                device.kernel("batch_norm", "batch_norm_dx"), *_grid(grad),
                dx, grad, x, means, scales, factors, sums, total, ctx.parameters, *ctx.sizes,
            )  # fmt: skip
        return dx, *(each if ctx.needs[index] else None for index, each in enumerate(own, 1))


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *,
    batches: Tensor | None = None,
    ranks: RankExchange | None = None,
) -> Tensor:
    """Return x [N, C, ...] normalised in each channel, then times `weight` plus `bias`, as PyTorch's batch_norm.

    Source: Ioffe and Szegedy, "Batch Normalization", 2015.

    Args:
        x: float32 [N, C, ...], the result's shape too.
        running_mean, running_var: float32 [C], both or none: the statistics that are used where not `training`; in
            training they move towards those of the batch, with the unbiased variance.
        weight: float32 [C]; None: 1.
        bias: float32 [C], with a weight only; None: 0.
        training: whether the statistics are the batch's.
        momentum: the share of the batch in the running statistics; None: 1 / `batches`, so that these are means.
        eps: is added to the variance.
        batches: int32 of shape (), the number of batches so far, which training increases by 1.
        ranks: in training the statistics are those of all these ranks' x; None: of x alone.

    Raises ArgumentError for arguments that do not fit, and in training for one element a channel.
    """
    float_tensor("batch_norm", x)
    if x.ndim < 2:
        raise ArgumentError(f"batch_norm: expected x of shape [N, C, ...], got shape {x.shape}")
    channels = x.shape[1:2]
    check_parameters("batch_norm", channels, weight, bias, eps)
    for name, tensor in (("running_mean", running_mean), ("running_var", running_var)):
        if tensor is not None and float_tensor(f"batch_norm: {name}", tensor).shape != channels:
            raise ArgumentError(f"batch_norm: expected {name} of shape {channels}, got {tensor.shape}")
    if (running_mean is None) != (running_var is None):
        raise ArgumentError("batch_norm: expected running_mean and running_var both or neither, got one")
    if batches is not None and (batches.shape, batches.dtype) != ((), INT32):
        raise ArgumentError(f"batch_norm: expected batches as int32 of shape (), got {batches.dtype} {batches.shape}")
    running = None if running_mean is None or running_var is None else Running(running_mean, running_var, batches)
    if not training and running is None:
        raise ArgumentError("batch_norm: expected running_mean and running_var where it does not train, got none")
    alone = ranks is None or ranks.size == 1
    if training and alone and x.numel() == x.shape[1]:
        raise ArgumentError(f"batch_norm: expected more than one element a channel in training, got shape {x.shape}")
    if momentum is None and batches is None and training and running is not None:
        raise ArgumentError("batch_norm: expected batches with momentum None, got none")
    if momentum is not None and not 0 <= momentum <= 1:
        raise ArgumentError(f"batch_norm: expected momentum from 0 to 1 or None, got {momentum!r}")
    statistics = GIVEN
    if training:
        statistics = _OF_BATCH if running is None or is_recomputing() else _CUMULATIVE if momentum is None else _TRACKED
    share = 0.0 if momentum is None else float(momentum)
    settings = {"running": running, "statistics": statistics, "momentum": share, "eps": float(eps)}
    if alone or not training:
        return BatchNormOp.apply(x, weight, bias, **settings)
    return BatchNormOfRanks.apply(x, weight, bias, **settings, ranks=ranks)


def check_parameters(name: str, shape: Shape, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
    """Raise ArgumentError for parameters and an eps that do not fit a norm of such a shape."""
    for what, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and float_tensor(f"{name}: {what}", parameter).shape != shape:
            raise ArgumentError(f"{name}: expected {what} of shape {shape}, got {parameter.shape}")
    if bias is not None and weight is None:
        raise ArgumentError(f"{name}: expected a weight with the bias, got none")
    if not eps >= 0:
        raise ArgumentError(f"{name}: expected eps of at least 0, got {eps!r}")
