"""Cross-entropy and mean squared error, each with one fused kernel for each direction."""

from __future__ import annotations

from typing import Any

import numpy as np

from clcomm.engine.autograd import Op
from clcomm.engine.ops.reduce import ROW_BLOCK, sum_over
from clcomm.engine.tensor import INT32, Tensor, empty, float_tensor, is_one, wrap
from clcomm.errors import ArgumentError

_BLOCK = 4096  # elements that one work unit of the squared error sums
_REDUCTIONS = ("mean", "sum", "none")


class CrossEntropy(Op):
    """Cross-entropy of logits [rows, classes] against class indices [rows].

    The forward kernel also writes the gradient for a loss that counts once, as backward() of a loss has it.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, *, targets: Tensor, reduction: str) -> Tensor:
        device = logits.device
        rows, columns = logits.shape
        losses, dx = empty(device, (rows,)), empty(device, logits.shape)
        scale = 1.0 / rows if reduction == "mean" else 1.0
        grid = device.row_grid(rows, columns)
        sums_losses = reduction != "none" and device.is_cpu and grid[0] == (1,) and rows <= ROW_BLOCK
        total = empty(device, ()) if sums_losses else losses
        kernel = device.kernel("softmax", "cross_entropy")
        device.launch(kernel, *grid, losses, total, dx, logits, targets, scale, rows, columns, int(sums_losses))
        ctx.save(dx)
        if reduction == "none" or sums_losses:
            return total
        return wrap(device, sum_over(losses, (0,), scale).buffer, ())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (dx,) = ctx.saved
        if is_one(grad):
            return (dx,)
        device = dx.device
        rows, columns = dx.shape
        scaled = ctx.out(0)
        kernel = device.kernel("softmax", "scale_rows")
        device.launch(kernel, *device.row_grid(rows, columns), scaled, grad, dx, len(grad.shape), rows, columns)
        return (scaled,)


class SquaredError(Op):
    """(prediction - target)^2, averaged, summed or elementwise."""

    @staticmethod
    def forward(ctx: Any, prediction: Tensor, target: Tensor, *, reduction: str) -> Tensor:
        device, count = prediction.device, prediction.size
        ctx.save(prediction, target)
        ctx.scale = 1.0 / count if reduction == "mean" else 1.0
        ctx.g_step = 1 if reduction == "none" else 0
        if reduction == "none":
            out = empty(device, prediction.shape)
            kernel = device.kernel("loss", "squared_difference")
            device.launch(kernel, *device.grid(count), out, prediction, target, count)
            return out
        blocks = -(-count // _BLOCK)
        partial, scale = empty(device, (blocks,)), ctx.scale if blocks == 1 else 1.0
        kernel = device.kernel("loss", "squared_error")
        grid = device.row_grid(blocks, min(count, _BLOCK))
        device.launch(kernel, *grid, partial, prediction, target, count, _BLOCK, blocks, scale)
        total = partial if blocks == 1 else sum_over(partial, (0,), ctx.scale)
        return wrap(device, total.buffer, ())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        prediction, target = ctx.saved
        device, count = prediction.device, prediction.size
        kernel, grads = device.kernel("loss", "squared_error_grad"), []
        for index, (x, y) in enumerate(((prediction, target), (target, prediction))):
            if ctx.needs[index]:
                dx = ctx.out(index)
                device.launch(kernel, *device.grid(count), dx, grad, x, y, ctx.g_step, ctx.scale, count)
                grads.append(dx)
            else:
                grads.append(None)
        return tuple(grads)


def cross_entropy(logits: Tensor, targets: Tensor | np.ndarray, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy of logits against integer classes.

    Args:
        logits: [rows, classes].
        targets: a class for each row, in an int32 tensor or an integer array.
        reduction: "mean", "sum" or "none" (one loss for each row).

    Raises:
        ArgumentError: shapes or dtypes do not fit, or a target in an array is not a class; such a target in a tensor
            gives a loss of NaN.
    """
    float_tensor("cross_entropy", logits)
    if logits.ndim != 2:
        raise ArgumentError(f"cross_entropy: expected logits of shape (rows, classes), got {logits.shape}")
    _check_reduction("cross_entropy", reduction)
    targets = _target_tensor(logits, targets)
    return CrossEntropy.apply(logits, targets=targets, reduction=reduction)


def _target_tensor(logits: Tensor, targets: Any) -> Tensor:
    rows, classes = logits.shape
    if not isinstance(targets, Tensor):
        array = np.asarray(targets)
        if array.dtype.kind not in "iu":
            raise ArgumentError(f"cross_entropy: expected integer targets, got {array.dtype}")
        outside = array[(array < 0) | (array >= classes)]
        if outside.size:
            raise ArgumentError(f"cross_entropy: targets must be 0 to {classes - 1}, got {outside.flat[0]}")
        _check_rows(rows, array.shape)
        return Tensor(array, logits.device)
    if targets.dtype != INT32:
        raise ArgumentError(f"cross_entropy: expected int32 targets, got {targets.dtype}")
    _check_rows(rows, targets.shape)
    return targets


def _check_rows(rows: int, shape: tuple[int, ...]) -> None:
    if shape != (rows,):
        raise ArgumentError(f"cross_entropy: expected {rows} targets, one for each row of logits, got shape {shape}")


def mse_loss(prediction: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Return the squared error of two tensors of one shape.

    `reduction` is "mean", "sum" or "none" (one error for each element). Raises ArgumentError if the shapes differ.
    """
    float_tensor("mse_loss", prediction)
    float_tensor("mse_loss", target)
    if prediction.shape != target.shape:
        raise ArgumentError(f"mse_loss: expected two tensors of one shape, got {prediction.shape} and {target.shape}")
    _check_reduction("mse_loss", reduction)
    return SquaredError.apply(prediction, target, reduction=reduction)


def _check_reduction(name: str, reduction: str) -> None:
    if reduction not in _REDUCTIONS:
        raise ArgumentError(f"{name}: expected reduction 'mean', 'sum' or 'none', got {reduction!r}")
