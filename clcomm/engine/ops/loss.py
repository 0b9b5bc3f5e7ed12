"""Cross-entropy and losses of pairs of elements."""

from __future__ import annotations

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.ops.reduce import ROW_BLOCK, sum_over
from clcomm.engine.ops.types import broadcast_shape, expand
from clcomm.engine.tensor import INT32, Tensor, empty, float_tensor, is_one, whole_rows, wrap
from clcomm.engine.tensor_methods import OUTSIDE, note_of, require_below

_BLOCK = 4096  # elements that one work unit of the squared error sums
_REDUCTIONS = ("mean", "sum", "none")


class CrossEntropy(Op):
    """Cross-entropy of logits [rows, classes] against class indices [rows].

    The forward kernel also writes the gradient for a loss that counts once, as backward() of a loss has it.
    """

    @staticmethod
    def forward(ctx: Context, logits: Tensor, *, targets: Tensor, reduction: str) -> Tensor:
        device = logits.device
        rows, columns = logits.shape
        losses, dx = empty(device, (rows,)), empty(device, logits.shape)
        divisor = rows if reduction == "mean" else 1.0
        grid = device.row_grid(rows, columns)
        sums_losses = reduction != "none" and device.is_cpu and grid[0] == (1,) and rows <= ROW_BLOCK
        total = empty(device, ()) if sums_losses else losses
        sizes = divisor, rows, columns, int(sums_losses)
        kernel, outside = device.kernel("softmax", "cross_entropy"), note_of(device)
        device.launch(kernel, *grid, losses, total, dx, logits, targets, outside, *sizes)
        ctx.save(dx)
        ctx.divisor = divisor
        if reduction == "none" or sums_losses:
            return total
        return wrap(device, sum_over(losses, (0,), divisor).buffer, ())

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
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
    def forward(ctx: Context, prediction: Tensor, target: Tensor, *, reduction: str) -> Tensor:
        device, count = prediction.device, prediction.numel()
        ctx.save(prediction, target)
        ctx.divisor = count if reduction == "mean" else 1.0
        ctx.g_step = 1 if reduction == "none" else 0
        if reduction == "none":
            out = empty(device, prediction.shape)
            kernel = device.kernel("loss", "squared_difference")
            device.launch(kernel, *device.grid(count), out, prediction, target, count)
            return out
        blocks = -(-count // _BLOCK)
        partial, divisor = empty(device, (blocks,)), ctx.divisor if blocks == 1 else 1.0
        kernel = device.kernel("loss", "squared_error")
        grid = device.row_grid(blocks, min(count, _BLOCK))
        device.launch(kernel, *grid, partial, prediction, target, count, _BLOCK, blocks, divisor)
        total = partial if blocks == 1 else sum_over(partial, (0,), ctx.divisor)
        return wrap(device, total.buffer, ())

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        prediction, target = ctx.saved
        device, count = prediction.device, prediction.numel()
        kernel = device.kernel("loss", "squared_error_grad")
        grads: list[Tensor | None] = []
        for index, (x, y) in enumerate(((prediction, target), (target, prediction))):
            if ctx.needs[index]:
                dx = ctx.out(index)
                device.launch(kernel, *device.grid(count), dx, grad, x, y, ctx.g_step, 1.0 / ctx.divisor, count)
                grads.append(dx)
            else:
                grads.append(None)
        return tuple(grads)


def cross_entropy(logits: Tensor, targets: Tensor | np.ndarray, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy of logits against integer classes.

    Args:
        logits: float32 [rows, classes].
        targets: a class for each row, in an int32 tensor or an integer array of shape [rows].
        reduction: "mean" or "sum", with a result of shape (); "none": [rows].

    Raises:
        ArgumentError: shapes or dtypes do not fit, or a target is not a class; for one that only the device knows, when
            the loss, NaN, is read, or its gradients are used by `step` or `sync_gradients`, which wait for it then.
    """
    float_tensor("cross_entropy", logits)
    whole_rows("cross_entropy", logits)
    if logits.ndim != 2:
        raise ArgumentError(f"cross_entropy: expected logits of shape (rows, classes), got {logits.shape}")
    check_reduction("cross_entropy", reduction)
    targets = target_tensor("cross_entropy", logits, targets)
    return CrossEntropy.apply(logits, targets=targets, reduction=reduction)


def target_tensor(name: str, x: Tensor, targets: object, ignore_index: int | None = None) -> Tensor:
    """Return the classes of x's rows on its device; raises ArgumentError as `cross_entropy` does."""
    rows, classes = x.shape
    if not isinstance(targets, Tensor):
        array = np.asarray(targets)
        if array.dtype.kind not in "iu":
            raise ArgumentError(f"{name}: expected integer targets, got {array.dtype}")
        require_below(f"{name}: {OUTSIDE}", array, classes, ignore_index)
        _check_rows(name, rows, array.shape)
        return Tensor(array, x.device)
    if targets.dtype != INT32:
        raise ArgumentError(f"{name}: expected int32 targets, got {targets.dtype}")
    _check_rows(name, rows, targets.shape)
    require_below(f"{name}: {OUTSIDE}", targets, classes, ignore_index, scores=x)
    return targets


def _check_rows(name: str, rows: int, shape: tuple[int, ...]) -> None:
    if shape != (rows,):
        raise ArgumentError(f"{name}: expected {rows} targets, one for each row of logits, got shape {shape}")


class _ElementLoss(Op):
    """A loss of each element of x and y, averaged, summed or not; `<kernel_name>_grad` is the gradient's kernel.

    `settings` are the kernels' arguments between the arrays and the count.
    """

    kernel_name: str

    @classmethod
    def forward(cls, ctx: Context, x: Tensor, y: Tensor, *, settings: tuple[object, ...], reduction: str) -> Tensor:
        device, count = x.device, x.numel()
        losses = empty(device, x.shape)
        kernel = device.kernel("loss", cls.kernel_name)
        device.launch(kernel, *device.grid(count), losses, x, y, *settings, count)
        ctx.save(x, y)
        ctx.settings, ctx.divisor = settings, count if reduction == "mean" else 1.0
        ctx.is_reduced = reduction != "none"
        if reduction == "none":
            return losses
        return wrap(device, sum_over(losses.alias((count,)), (0,), ctx.divisor).buffer, ())

    @classmethod
    def backward(cls, ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved
        device, kernel = x.device, x.device.kernel("loss", f"{cls.kernel_name}_grad")
        g_step = int(grad.numel() == x.numel())

        def gradient(index: int, *pair: Tensor) -> Tensor | None:
            if not ctx.needs[index]:
                return None
            out, size = ctx.out(index), x.numel()
            device.launch(kernel, *device.grid(size), out, grad, *pair, g_step, 1.0 / ctx.divisor, *ctx.settings, size)
            return out

        return gradient(0, x, y), gradient(1, y, x)  # of functions of x - y, whichever way round


class SmoothL1(_ElementLoss):
    """(x - y)^2 / (2 beta) where |x - y| < beta, else |x - y| - beta / 2, times a factor."""

    kernel_name = "smooth_l1"


class LogitsBinaryCrossEntropy(_ElementLoss):
    """-(p y log(sigmoid(x)) + (1 - y) log(1 - sigmoid(x))) times a weight, p the weight of positive targets."""

    kernel_name = "bce_with_logits"


def mse_loss(prediction: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """Return the squared error of two float32 tensors of one shape.

    `reduction` is "mean" or "sum", with a result of shape (), or "none": an error for each element.
    Raises ArgumentError if the shapes differ.
    """
    check_pair("mse_loss", prediction, target, reduction)
    return SquaredError.apply(prediction, target, reduction=reduction)


def smooth_l1_loss(prediction: Tensor, target: Tensor, *, reduction: str = "mean", beta: float = 1.0) -> Tensor:
    """Return d^2 / (2 beta) where the difference d of two tensors of one shape is below `beta`, else |d| - beta / 2.

    Source: Girshick, "Fast R-CNN", 2015.

    Args:
        prediction, target: float32 of any one shape.
        reduction: "mean" or "sum", with a result of shape (); "none": a loss for each element.
        beta: from 0, with which it is |d|.

    Raises ArgumentError if the shapes differ, and for a negative `beta`.
    """
    check_pair("smooth_l1_loss", prediction, target, reduction)
    if not beta >= 0:
        raise ArgumentError(f"smooth_l1_loss: expected beta of at least 0, got {beta!r}")
    return SmoothL1.apply(prediction, target, settings=(float(beta), 1.0), reduction=reduction)


def binary_cross_entropy_with_logits(
    logits: Tensor,
    target: Tensor,
    *,
    reduction: str = "mean",
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
) -> Tensor:
    """Return the binary cross-entropy of sigmoid(logits) against probabilities of the same shape, as PyTorch's.

    Args:
        logits: float32 of any shape.
        target: float32 of the same shape, from 0 to 1; it gets no gradient.
        reduction: "mean" or "sum", with a result of shape (); "none": a loss for each element.
        weight: float32, of each loss; its shape broadcasts to that of the logits. None: 1.
        pos_weight: float32, of the targets' positive part; its shape broadcasts too. None: 1.

    Raises ArgumentError if the shapes do not fit, and for a target or weight that needs a gradient.
    """
    name = "binary_cross_entropy_with_logits"
    check_pair(name, logits, target, reduction)
    weights: list[Tensor] = []
    for argument, given in (("target", target), ("weight", weight), ("pos_weight", pos_weight)):
        if given is not None and float_tensor(f"{name}: {argument}", given).requires_grad:
            raise ArgumentError(f"{name}: {argument}: expected one that needs no gradient; detach() it")
    for each in (weight, pos_weight):
        shape = logits.shape if each is None else broadcast_shape(name, logits.shape, each.shape)
        if shape != logits.shape:
            raise ArgumentError(f"{name}: expected weights that broadcast to {logits.shape}, got one for {shape}")
        weights.append(logits if each is None else each if each.shape == shape else expand(each, shape))
    settings = (*weights, int(weight is not None), int(pos_weight is not None))
    return LogitsBinaryCrossEntropy.apply(logits, target, settings=settings, reduction=reduction)


def check_pair(name: str, x: Tensor, y: Tensor, reduction: str) -> None:
    float_tensor(name, x)
    float_tensor(name, y)
    if x.shape != y.shape:
        raise ArgumentError(f"{name}: expected two tensors of one shape, got {x.shape} and {y.shape}")
    check_reduction(name, reduction)


def check_reduction(name: str, reduction: str) -> None:
    if not isinstance(reduction, str) or reduction not in _REDUCTIONS:
        raise ArgumentError(f"{name}: expected reduction 'mean', 'sum' or 'none', got {reduction!r}")
