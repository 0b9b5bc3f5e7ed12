"""Losses against class indices with weights of classes, label smoothing and ignored targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.ops import loss
from clcomm.engine.ops.elementwise import add, mul
from clcomm.engine.ops.reduce import sum, sum_over
from clcomm.engine.ops.shape import reshape, transpose
from clcomm.engine.ops.softmax import log_softmax
from clcomm.engine.targets import note_of
from clcomm.engine.tensor import Tensor, empty, float_tensor, whole_rows, wrap

NONE_IGNORED = -(2**31)
_IGNORED = -100  # PyTorch's default


class ClassLoss(Op):
    """A loss for each row, reduced; a mean is weighted by the rows' classes."""

    @staticmethod
    def reduced(ctx: Context, losses: Tensor, weights: Tensor, reduction: str) -> Tensor:
        """Return the reduced losses, and save the gradient's divisor."""
        ctx.divides, ctx.total = reduction == "mean", losses
        if reduction == "none":
            return losses
        device, summed = losses.device, sum_over(losses, (0,))
        if not ctx.divides:
            return wrap(device, summed.buffer, ())
        ctx.total, mean = sum_over(weights, (0,)), empty(device, ())
        device.launch(device.kernel("elementwise", "div"), *device.grid(1), mean, summed, ctx.total, 1)
        return mean


class SmoothedCrossEntropy(ClassLoss):
    """Cross-entropy of logits [rows, classes] against classes mixed with a uniform distribution."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, *, targets: Tensor, weight: Tensor | None, smoothing: float, ignored: int,
        reduction: str,
    ) -> Tensor:  # fmt: skip
        device, (rows, columns) = x.device, x.shape
        losses, weights, tops, logs = (empty(device, (rows,)) for _ in range(4))
        own = (x if weight is None else weight, int(weight is not None), smoothing, ignored, rows, columns)
        kernel, outside = device.kernel("class_losses", "smoothed_losses"), note_of(device)
        device.launch(kernel, *device.row_grid(rows, columns), losses, weights, tops, logs, x, targets, outside, *own)
        ctx.targets, ctx.own = targets, own
        ctx.save(x, tops, logs)
        return ClassLoss.reduced(ctx, losses, weights, reduction)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, tops, logs = ctx.saved
        weight, has_weight, *rest = ctx.own
        device, dx = x.device, ctx.out(0)
        device.launch(
            device.kernel("class_losses", "smoothed_losses_grad"), *device.row_grid(*x.shape),
            dx, grad, ctx.total, tops, logs, x, ctx.targets, weight, grad.ndim, int(ctx.divides), has_weight, *rest,
        )  # fmt: skip
        return (dx,)


class NegativeLogLikelihood(ClassLoss):
    """The negated log-probability of each row's class."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, *, targets: Tensor, weight: Tensor | None, ignored: int, reduction: str
    ) -> Tensor:
        device, (rows, columns) = x.device, x.shape
        losses, weights = empty(device, (rows,)), empty(device, (rows,))
        own = (x if weight is None else weight, int(weight is not None), ignored, rows, columns)
        kernel = device.kernel("class_losses", "picked_losses")
        device.launch(kernel, *device.grid(rows), losses, weights, x, targets, note_of(device), *own)
        ctx.targets, ctx.own = targets, own
        return ClassLoss.reduced(ctx, losses, weights, reduction)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), dx = ctx.inputs, ctx.out(0)
        weight, *rest = ctx.own
        device = x.device
        device.launch(
            device.kernel("class_losses", "picked_losses_grad"), *device.row_grid(*x.shape),
            dx, grad, ctx.total, ctx.targets, weight, grad.ndim, int(ctx.divides), *rest,
        )  # fmt: skip
        return (dx,)


def cross_entropy(
    logits: Tensor,
    targets: Tensor | np.ndarray,
    reduction: str = "mean",
    *,
    weight: Tensor | None = None,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross-entropy of logits against integer classes, as PyTorch's.

    Args:
        logits: float32 [rows, classes], or [N, classes, ...].
        targets: a class for each row, in an int32 tensor or an integer array of shape [rows], or [N, ...]; or float32
            shares of the classes, in the logits' shape.
        reduction: "mean", weighed by the rows' classes, or "sum", with a result of shape (); "none": [rows].
        weight: float32 [classes]; None: 1.
        ignore_index: a target whose rows count nothing; None: -100 where the host knows that there is one.
        label_smoothing: the share, from 0 to 1, of a uniform distribution in the targets'; Szegedy et al., "Rethinking
            the Inception architecture for computer vision", 2016.

    Raises:
        ArgumentError: shapes, dtypes or the share do not fit, or a target is not a class; for one that only the device
            knows, when the loss, NaN, is read, or its gradients are used by `step` or `sync_gradients`.
    """
    if isinstance(targets, Tensor) and targets.dtype == np.float32 and targets.shape == logits.shape:
        return _against_shares(logits, targets, reduction, weight, label_smoothing)
    if getattr(logits, "ndim", 2) > 2:
        named = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
        return _of_places(cross_entropy, logits, targets, reduction, named)
    ignore_index = _ignored(targets) if ignore_index is None else ignore_index
    if weight is None and ignore_index is None and label_smoothing == 0:
        return loss.cross_entropy(logits, targets, reduction)
    check_smoothing(label_smoothing)
    settings = _settings("cross_entropy", logits, targets, reduction, weight, ignore_index)
    return SmoothedCrossEntropy.apply(logits, smoothing=float(label_smoothing), **settings)


def nll_loss(
    log_probabilities: Tensor,
    targets: Tensor | np.ndarray,
    reduction: str = "mean",
    *,
    weight: Tensor | None = None,
    ignore_index: int | None = None,
) -> Tensor:
    """Return the negative log-likelihood of log-probabilities [rows, classes], as PyTorch's; see `cross_entropy`.

    log_probabilities: float32 [rows, classes]; the others and the result are as there.
    """
    if getattr(log_probabilities, "ndim", 2) > 2:
        return _of_places(
            nll_loss, log_probabilities, targets, reduction, {"weight": weight, "ignore_index": ignore_index}
        )
    ignore_index = _ignored(targets) if ignore_index is None else ignore_index
    settings = _settings("nll_loss", log_probabilities, targets, reduction, weight, ignore_index)
    return NegativeLogLikelihood.apply(log_probabilities, **settings)


def _ignored(targets: Tensor | np.ndarray) -> int | None:
    def rule(known: tuple[int, ...]) -> int | None:
        return _IGNORED if known and min(known) == _IGNORED else None

    if isinstance(targets, Tensor):
        return targets.decided(rule)
    given = np.asarray(targets)
    return rule((int(given.min()),)) if given.size and given.dtype.kind in "iu" else None


def _of_places(
    function: Callable[..., Tensor], logits: Tensor, targets: Tensor | np.ndarray, reduction: str, named: dict[str, Any]
) -> Tensor:
    """Return a loss of logits [N, classes, ...], with a target for each place."""
    places = (logits.shape[0], *logits.shape[2:])
    if tuple(targets.shape) != places:
        raise ArgumentError(
            f"{function.__name__}: expected targets of shape {places} for logits {logits.shape}, got {targets.shape}"
        )
    rows = reshape(transpose(logits, (0, *range(2, logits.ndim), 1)), (-1, logits.shape[1]))
    losses = function(rows, targets.reshape(-1), reduction, **named)
    return reshape(losses, places) if reduction == "none" else losses


def _against_shares(
    logits: Tensor, targets: Tensor, reduction: str, weight: Tensor | None, label_smoothing: float
) -> Tensor:
    """Return the cross-entropy against shares of the classes."""
    loss.check_pair("cross_entropy", logits, targets, reduction)
    check_smoothing(label_smoothing)
    if logits.ndim < 2:
        raise ArgumentError(f"cross_entropy: expected logits [rows, classes, ...], got shape {logits.shape}")
    shares = add(mul(targets, 1.0 - label_smoothing), label_smoothing / logits.shape[1])
    if weight is not None:
        shares = mul(shares, reshape(weight, (-1, *[1] * (logits.ndim - 2))))
    losses = mul(sum(mul(shares, log_softmax(logits, 1)), 1), -1.0)
    if reduction == "none":
        return losses
    return mul(sum(losses), 1.0 / losses.numel()) if reduction == "mean" else sum(losses)


def check_smoothing(label_smoothing: float) -> None:
    """Raise ArgumentError unless a share of a uniform distribution is from 0 to 1."""
    if not isinstance(label_smoothing, (int, float)) or not 0 <= label_smoothing <= 1:
        raise ArgumentError(f"cross_entropy: expected label_smoothing from 0 to 1, got {label_smoothing!r}")


def _settings(
    name: str, x: Tensor, targets: Tensor | np.ndarray, reduction: str, weight: Tensor | None, ignore_index: int | None
) -> dict[str, Any]:
    """Return the checked arguments of a loss."""
    if float_tensor(name, x).ndim != 2:
        raise ArgumentError(f"{name}: expected rows of classes, (rows, classes), got {x.shape}")
    whole_rows(name, x)
    loss.check_reduction(name, reduction)
    if weight is not None:
        if float_tensor(f"{name}: weight", weight).shape != x.shape[1:]:
            raise ArgumentError(f"{name}: expected weight of shape {x.shape[1:]}, got {weight.shape}")
        if weight.requires_grad:
            raise ArgumentError(f"{name}: weight: expected one that needs no gradient; detach() it")
    if ignore_index is not None and not -(2**31) <= ignore_index < 2**31:
        raise ArgumentError(f"{name}: expected ignore_index to fit int32, got {ignore_index!r}")
    return {
        "targets": loss.target_tensor(name, x, targets, ignore_index), "weight": weight, "reduction": reduction,
        "ignored": NONE_IGNORED if ignore_index is None else int(ignore_index),
    }  # fmt: skip
