"""Losses against class indices with weights of classes, label smoothing and ignored targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.ops import loss
from clcomm.engine.ops.comparisons import equal_to, masked_fill
from clcomm.engine.ops.elementwise import add, div, mul
from clcomm.engine.ops.functions import clamp
from clcomm.engine.ops.reduce import mean, sum, sum_over
from clcomm.engine.ops.shape import reshape, transpose, unsqueeze
from clcomm.engine.ops.softmax import log_softmax
from clcomm.engine.ops.types import to_float
from clcomm.engine.tensor import INT32, Tensor, empty, float_tensor, whole_rows, wrap
from clcomm.engine.tensor_methods import note_of, require_below

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
    *,
    reduction: str = "mean",
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
    *,
    reduction: str = "mean",
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
    losses = function(rows, targets.reshape(-1), reduction=reduction, **named)
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


# --- Connectionist temporal classification: the loss of sequences of labels of which the places are not known. ---

Lengths = Tensor | Sequence[int] | np.ndarray | int


class Ctc(Op):
    """The loss of each sample; `sizes`: stride and room of the targets, blank, steps, samples, classes, states."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, *, integers: tuple[Tensor, Tensor, Tensor], sizes: tuple[int, ...], zeroes: bool
    ) -> Tensor:
        (steps, samples, _), device = x.shape, x.device
        losses, alpha = empty(device, (samples,)), empty(device, (samples, steps, sizes[-1]))
        device.launch(device.kernel("ctc", "ctc"), *device.grid(samples), losses, alpha, x, *integers, *sizes)
        ctx.save(losses, alpha, x)
        ctx.given = integers, sizes, int(zeroes)
        return losses

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        losses, alpha, x = ctx.saved
        integers, sizes, zeroes = ctx.given
        dx, beta, device = ctx.out(0), empty(x.device, (x.shape[1], 2, sizes[-1])), x.device
        kernel = device.kernel("ctc", "ctc_grad")
        device.launch(kernel, *device.grid(x.shape[1]), dx, beta, grad, losses, alpha, x, *integers, zeroes, *sizes)
        return (dx,)


def ctc_loss(
    log_probs: Tensor, targets: Tensor | np.ndarray, input_lengths: Lengths, target_lengths: Lengths, blank: int = 0,
    reduction: str = "mean", zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """Return -log of the probability of each sample's labels, along all paths, as PyTorch's ctc_loss.

    The gradient is that of `log_probs` that are a `log_softmax`'s. Source: Graves et al., "Connectionist temporal
    classification", 2006.

    Args:
        log_probs: float32 [steps, samples, classes], or [steps, classes] of one sample.
        targets: integers [samples, longest], or those of all samples one after the other.
        input_lengths: the steps of each sample.
        target_lengths: the labels of each sample, which may be none.
        blank: the class that is no label.
        reduction: "mean" of the losses divided by the numbers of labels, "sum" or "none".
        zero_infinity: labels that do not fit into the steps have neither loss nor gradient; else an infinite loss.

    Raises ArgumentError for shapes that do not fit, and for integers known on the host outside their range; those that
    only the device knows give a loss of NaN.
    """
    x = float_tensor("ctc_loss: log_probs", log_probs)
    if x.ndim not in (2, 3) or reduction not in ("mean", "sum", "none"):
        raise ArgumentError(f"ctc_loss: expected log_probs [steps, samples, classes], got {x.shape} and {reduction!r}")
    is_one = x.ndim == 2
    x = unsqueeze(x, 1) if is_one else x
    steps, samples, classes = x.shape
    if not 0 <= blank < classes:
        raise ArgumentError(f"ctc_loss: blank: expected a class from 0 to {classes - 1}, got {blank!r}")
    labels = _integers("targets", targets, x, classes - 1)
    lengths = _integers("target_lengths", target_lengths, x, labels.shape[-1])
    counts = _integers("input_lengths", input_lengths, x, steps)
    if (counts.numel(), lengths.numel()) != (samples, samples) or labels.shape[:-1] not in ((), (samples,)):
        raise ArgumentError(
            f"ctc_loss: expected {samples} lengths and targets [{samples}, longest], got {counts.shape}, "
            f"{lengths.shape} and {labels.shape}"
        )
    stride, longest = labels.shape[1] if labels.ndim == 2 else 0, labels.shape[-1]
    if not stride:
        longest = lengths.decided(lambda known: max(*known, 1) if known else labels.shape[-1])
    sizes = stride, labels.numel(), blank, steps, samples, classes, 2 * longest + 1
    losses = Ctc.apply(x, integers=(labels, counts, lengths), sizes=sizes, zeroes=bool(zero_infinity))
    if zero_infinity:
        losses = masked_fill(losses, equal_to(losses, float("inf")), 0.0)
    if reduction == "mean":
        return mean(div(losses, clamp(to_float(reshape(lengths, (samples,))), min=1.0)))
    return sum(losses) if reduction == "sum" else reshape(losses, ()) if is_one else losses


def _integers(name: str, given: Any, like: Tensor, most: int) -> Tensor:
    """Return integers as a tensor on the device of another; ArgumentError for known ones not from 0 to `most`."""
    tensor = given if isinstance(given, Tensor) else Tensor(np.atleast_1d(np.asarray(given)), like.device)
    if tensor.dtype != INT32 or tensor.device is not like.device:
        raise ArgumentError(f"ctc_loss: {name}: expected integers on {like.device.name}, got {tensor.dtype}")
    require_below(f"ctc_loss: {name}: expected integers from 0 to {{}}, got {{}}", tensor, most + 1)
    return reshape(tensor, (1,)) if tensor.ndim == 0 else tensor
