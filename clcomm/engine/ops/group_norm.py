"""Group norm with its gradients."""

from __future__ import annotations

import math
from typing import Any

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.ops.batch_norm import check_parameters
from clcomm.engine.ops.layer_norm import layer_norm
from clcomm.engine.ops.reduce import sum_over
from clcomm.engine.ops.shape import reshape
from clcomm.engine.tensor import Shape, Tensor, empty, float_tensor, wrap


class GroupNormOp(Op):
    """(x - mean) / sqrt(variance + eps) * weight + bias, of each image's groups of channels."""

    @classmethod
    def shape_of_none(cls, x: Tensor, *others: Any, **attrs: Any) -> Shape:
        return x.shape

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None, *, groups: int, eps: float) -> Tensor:
        device, channels, rows = x.device, x.shape[1], x.shape[0] * groups
        ctx.groups, ctx.eps = groups, eps
        ctx.sizes = rows, groups, channels // groups, math.prod(x.shape[2:])
        y, means, scales = empty(device, x.shape), empty(device, (rows,)), empty(device, (rows,))
        kernel, grid = device.kernel("group_norm", "group_norm"), device.row_grid(rows, x.numel() // rows)
        added, parameters = (weight, 1) if bias is None else (bias, 2)
        device.launch(kernel, *grid, y, means, scales, x, weight, added, eps, parameters, *ctx.sizes)
        ctx.save(x, weight, means, scales)
        return y

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, means, scales = ctx.saved
        device, parts = grad.device, (x.shape[0], x.shape[1])
        dx = ctx.out(0) if ctx.needs[0] else None
        sums = [empty(device, parts) for _ in range(2)]
        kernel, grid = device.kernel("group_norm", "group_norm_grad"), device.row_grid(ctx.sizes[0], x.numel())
        own = grad if dx is None else dx  # written to where it is needed alone
        device.launch(kernel, *grid, own, *sums, grad, x, means, scales, weight, int(dx is not None), *ctx.sizes)
        return dx, *[
            wrap(device, sum_over(each, (0,), 1.0, ctx.out(index)).buffer, (x.shape[1],)) if ctx.needs[index] else None
            for index, each in enumerate(sums, 1)
        ]


def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Return x [N, C, ...] normalised in each sample's groups of channels, then times `weight` plus `bias`, both [C].

    Source: Wu and He, "Group Normalization", 2018.

    Args:
        x: float32 [N, C, ...], the result's shape too.
        num_groups: divides the channels into so many groups of neighbours.
        weight, bias: float32 [C], a bias with a weight only; None: 1 and 0.
        eps: is added to the variance.

    Raises ArgumentError for arguments that do not fit.
    """
    float_tensor("group_norm", x)
    if x.ndim < 2:
        raise ArgumentError(f"group_norm: expected x of shape [N, C, ...], got shape {x.shape}")
    images, channels = x.shape[:2]
    if not isinstance(num_groups, int) or num_groups < 1 or channels % num_groups:
        raise ArgumentError(f"group_norm: expected num_groups that divide {channels} channels, got {num_groups!r}")
    check_parameters("group_norm", (channels,), weight, bias, eps)
    if weight is not None:
        return GroupNormOp.apply(x, weight, bias, groups=num_groups, eps=float(eps))
    rows = reshape(x, (images, num_groups, -1))
    return reshape(layer_norm(rows, rows.shape[2], eps=eps), x.shape)
