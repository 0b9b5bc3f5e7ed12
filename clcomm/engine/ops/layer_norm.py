"""Layer norm with its gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.tensor import Shape, Tensor, empty, float_tensor, whole_rows

#: Rows that one work unit sums; a constant, so that results do not depend on the device.
_ROW_BLOCK = 64


class LayerNormOp(Op):
    """(x - mean) / sqrt(variance + eps) * weight + bias, in rows of `columns` elements."""

    @classmethod
    def shape_of_none(cls, x: Tensor, *parameters: Tensor | None, **attrs: Any) -> Shape | None:
        return x.shape

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
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and float_tensor(f"layer_norm: {name}", parameter).shape != shape:
            raise ArgumentError(f"layer_norm: expected {name} of shape {shape}, got {parameter.shape}")
    if bias is not None and weight is None:
        raise ArgumentError("layer_norm: expected a weight with the bias, got none")
    if not eps >= 0:
        raise ArgumentError(f"layer_norm: expected eps of at least 0, got {eps!r}")
    return LayerNormOp.apply(x, weight, bias, columns=math.prod(shape), eps=float(eps))
