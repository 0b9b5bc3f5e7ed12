"""Connectionist temporal classification: the loss of sequences of labels of which the places are not known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.ops.casts import to_float
from clcomm.engine.ops.comparisons import equal_to, masked_fill
from clcomm.engine.ops.elementwise import div
from clcomm.engine.ops.functions import clamp
from clcomm.engine.ops.reduce import mean, sum
from clcomm.engine.ops.shape import reshape, unsqueeze
from clcomm.engine.targets import require_below
from clcomm.engine.tensor import INT32, Tensor, empty, float_tensor

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
