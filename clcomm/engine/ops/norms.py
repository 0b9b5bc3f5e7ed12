"""Layer norm with its gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.ops.batch_norm import check_parameters
from clcomm.engine.ops.elementwise import mul, sub
from clcomm.engine.ops.reduce import SumOp, mean, reduced, sum_over
from clcomm.engine.ops.shape import reshape
from clcomm.engine.tensor import Tensor, empty, float_tensor, whole_rows, wrap

#: Rows that one work unit sums; a constant, so that results do not depend on the device.
_ROW_BLOCK = 64


class LayerNormOp(Op):
    """(x - mean) / sqrt(variance + eps) * weight + bias, in rows of `columns` elements."""

    keeps_shape = True

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weight: Tensor | None, bias: Tensor | None, *, columns: int, eps: float
    ) -> Tensor:
        device, rows = x.device, x.numel() // columns
        y, means, scales = empty(device, x.shape), empty(device, (rows,)), empty(device, (rows,))
        ctx.columns, ctx.eps, ctx.parameters = columns, eps, (weight is not None) + (bias is not None)
        device.launch(
            device.kernel("layer_norm", "layer_norm"), *device.row_grid(rows, columns),
            y, means, scales, x, x if weight is None else weight, x if bias is None else bias,
            eps, ctx.parameters, rows, columns,
        )  # fmt: skip
        ctx.save(x, weight, means, scales)
        return y

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, means, scales = ctx.saved
        device, rows = x.device, means.numel()
        columns, factors = x.numel() // rows, x if weight is None else weight
        for_parameters = ctx.needs[1] or ctx.needs[2]
        dx = ctx.out(0) if ctx.needs[0] else None
        if dx is not None and not (for_parameters and device.is_cpu):
            kernel = device.kernel("layer_norm", "layer_norm_grad")
            grid = device.row_grid(rows, columns)
            device.launch(kernel, *grid, dx, grad, x, means, scales, factors, ctx.parameters, rows, columns)
        if not for_parameters:
            return dx, None, None
        blocks = -(-rows // _ROW_BLOCK)
        sums = [empty(device, (blocks, columns)) for _ in range(2)]
        sizes = rows, columns, _ROW_BLOCK, blocks
        if device.is_cpu:
            kernel, grid = device.kernel("layer_norm", "layer_norm_all_grads"), device.row_grid(blocks, rows * columns)
            target = empty(device, x.shape) if dx is None else dx
            device.launch(kernel, *grid, target, *sums, grad, x, means, scales, factors, ctx.parameters, *sizes)
        else:
            kernel = device.kernel("layer_norm", "layer_norm_parameter_grads")
            device.launch(kernel, *device.grid(blocks * columns), *sums, grad, x, means, scales, *sizes)
        return dx, *_totals(ctx, sums)


def _totals(ctx: Context, sums: list[Tensor]) -> list[Tensor | None]:
    """Return the totals of the blocks' sums, as the gradients of the parameters that need them."""
    totals = [ctx.out(index) if ctx.needs[index] else None for index in (1, 2)]
    blocks, columns = sums[0].shape
    device, given = sums[0].device, [each for each in totals if each is not None]
    device.launch(
        device.kernel("layer_norm", "layer_norm_totals"), *device.grid(columns), given[0], given[-1], *sums,
        columns, blocks, *[int(each is not None) for each in totals],
    )  # fmt: skip
    return totals


def layer_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Return x normalised over its last dimensions, then times `weight` plus `bias`, as PyTorch's layer_norm.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.

    Args:
        x: float32 [..., *normalized_shape], the result's shape too.
        normalized_shape: those last dimensions.
        weight: float32 of that shape; None: 1.
        bias: float32 of that shape, with a weight only; None: 0.
        eps: is added to the variance, the mean of the squared differences from the mean.

    Raises ArgumentError for other shapes, for a bias without a weight, and for an `eps` that is negative.
    """
    float_tensor("layer_norm", x)
    whole_rows("layer_norm", x)
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not shape or x.shape[-len(shape) :] != shape or not math.prod(shape):
        raise ArgumentError(f"layer_norm: expected x to end in the dimensions {shape}, got shape {x.shape}")
    check_parameters("layer_norm", shape, weight, bias, eps)
    return LayerNormOp.apply(x, weight, bias, columns=math.prod(shape), eps=float(eps))


# --- Group norm with its gradients. ---


class GroupNormOp(Op):
    """(x - mean) / sqrt(variance + eps) * weight + bias, of each image's groups of channels."""

    keeps_shape = True

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


# --- Variance over all elements or over some dimensions. ---


def var(
    x: Tensor,
    axis: int | Sequence[int] | None = None,
    unbiased: bool = True,
    keepdims: bool = False,
    *,
    correction: int = 1,
) -> Tensor:
    """Return the variance of x over the dimensions `axis` (all by default), which `keepdims` keeps with size 1.

    Args:
        x: float32 of any shape; of all dimensions the result has the shape ().
        unbiased: False: a correction of 0.
        correction: is subtracted from the number n of elements in the divisor: 1 for the unbiased estimate, 0 for the
            mean of the squared differences from the mean.

    Raises ArgumentError for an axis that does not fit, and unless `correction` is from 0 to n - 1.
    """
    axes, shape = reduced("var", x, axis, keepdims)
    correction = correction if unbiased else 0
    count = math.prod([x.shape[d] for d in axes])
    if not 0 <= correction < count:
        raise ArgumentError(f"var: expected a correction below the number of elements, {count}, got {correction!r}")
    apart = sub(x, mean(x, axes, keepdims=True))
    return SumOp.apply(mul(apart, apart), axes=axes, shape=shape, divisor=count - correction)
