"""Layer norm with its gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from clcomm.engine.autograd import Op
from clcomm.engine.ops.reduce import sum_over
from clcomm.engine.tensor import Tensor, empty, float_tensor, wrap
from clcomm.errors import ArgumentError

#: Rows that one work unit sums; a constant, so that results do not depend on the device.
_ROW_BLOCK = 256


class LayerNorm(Op):
    """(x - mean) / sqrt(variance + eps) * weight + bias, in rows of `columns` elements."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, *, columns: int, eps: float) -> Tensor:
        device, rows = x.device, x.size // columns
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, means, scales = ctx.saved
        device, rows = x.device, means.size
        columns, dx = x.size // rows, None
        if ctx.needs[0]:
            dx = ctx.out(0)
            device.launch(
                device.kernel("layer_norm", "layer_norm_grad"), *device.row_grid(rows, columns),
                dx, grad, x, means, scales, x if weight is None else weight, ctx.parameters, rows, columns,
            )  # fmt: skip
        if not (ctx.needs[1] or ctx.needs[2]):
            return dx, None, None
        blocks = -(-rows // _ROW_BLOCK)
        sums = [empty(device, (blocks, columns)) for _ in range(2)]
        grid = device.row_grid(blocks, rows * columns) if device.is_cpu else device.grid(blocks * columns)
        kernel = device.kernel("layer_norm", "layer_norm_parameter_grads")
        device.launch(kernel, *grid, *sums, grad, x, means, scales, rows, columns, _ROW_BLOCK, blocks)
        totals = [_total(ctx, index, each) if ctx.needs[index] else None for index, each in enumerate(sums, 1)]
        return dx, *totals


def _total(ctx: Any, index: int, sums: Tensor) -> Tensor:
    """Return the sum of the blocks' sums, as the gradient of input `index`."""
    out = ctx.out(index)
    flat = wrap(out.device, out.buffer, (1, out.size))
    sum_over(sums, (0,), out=flat)
    return out


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
        normalized_shape: those last dimensions.
        weight: of that shape; None: 1.
        bias: of that shape, with a weight only; None: 0.
        eps: is added to the variance, the mean of the squared differences from the mean.

    Raises ArgumentError for other shapes, for a bias without a weight, and for an `eps` that is negative.
    """
    float_tensor("layer_norm", x)
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
    return LayerNorm.apply(x, weight, bias, columns=math.prod(shape), eps=float(eps))
