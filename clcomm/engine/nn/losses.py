"""Losses as layers."""

from __future__ import annotations

import numpy as np

from clcomm.engine import functional as F
from clcomm.engine.nn.module import Module
from clcomm.engine.ops.class_losses import Lengths
from clcomm.engine.tensor import Tensor


class CrossEntropyLoss(Module):
    """Cross-entropy of logits [rows, classes] against integer classes [rows]; see ops.class_losses.cross_entropy."""

    def __init__(
        self,
        *,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
    ):
        self.reduction, self.weight = reduction, weight
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing

    def forward(self, logits: Tensor, targets: Tensor | np.ndarray) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(
            logits, targets, reduction=self.reduction, weight=self.weight, ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )  # fmt: skip


class NLLLoss(Module):
    """Negative log-likelihood of log-probabilities [rows, classes]; see ops.class_losses.nll_loss."""

    def __init__(self, *, reduction: str = "mean", weight: Tensor | None = None, ignore_index: int | None = None):
        self.reduction, self.weight, self.ignore_index = reduction, weight, ignore_index

    def forward(self, log_probabilities: Tensor, targets: Tensor | np.ndarray) -> Tensor:  # type: ignore[override]
        return F.nll_loss(
            log_probabilities, targets, reduction=self.reduction, weight=self.weight, ignore_index=self.ignore_index
        )


class CTCLoss(Module):
    """Loss of sequences of labels whose places are not known; see ops.ctc.ctc_loss."""

    def __init__(self, blank: int = 0, reduction: str = "mean", zero_infinity: bool = False):
        self.blank, self.reduction, self.zero_infinity = blank, reduction, zero_infinity

    def forward(  # type: ignore[override]
        self, log_probs: Tensor, targets: Tensor | np.ndarray, input_lengths: Lengths, target_lengths: Lengths
    ) -> Tensor:
        given = self.blank, self.reduction, self.zero_infinity
        return F.ctc_loss(log_probs, targets, input_lengths, target_lengths, *given)


class BCEWithLogitsLoss(Module):
    """Binary cross-entropy of sigmoid(logits); see ops.loss.binary_cross_entropy_with_logits."""

    def __init__(self, *, reduction: str = "mean", weight: Tensor | None = None, pos_weight: Tensor | None = None):
        self.reduction, self.weight, self.pos_weight = reduction, weight, pos_weight

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return F.binary_cross_entropy_with_logits(
            logits, target, reduction=self.reduction, weight=self.weight, pos_weight=self.pos_weight
        )


class SmoothL1Loss(Module):
    """Squared for small errors, absolute for large ones; see ops.loss.smooth_l1_loss."""

    def __init__(self, *, reduction: str = "mean", beta: float = 1.0):
        self.reduction, self.beta = reduction, beta

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return F.smooth_l1_loss(prediction, target, reduction=self.reduction, beta=self.beta)


class MSELoss(Module):
    """Squared error of two tensors of one shape; see ops.loss.mse_loss."""

    def __init__(self, *, reduction: str = "mean"):
        self.reduction = reduction

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return F.mse_loss(prediction, target, reduction=self.reduction)


class L1Loss(Module):
    """Absolute error of two tensors of one shape; see ops.composed.l1_loss."""

    def __init__(self, *, reduction: str = "mean"):
        self.reduction = reduction

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return F.l1_loss(prediction, target, reduction=self.reduction)


class HuberLoss(Module):
    """Squared for errors below delta, absolute for larger ones; see ops.composed.huber_loss."""

    def __init__(self, reduction: str = "mean", delta: float = 1.0):
        self.reduction, self.delta = reduction, delta

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return F.huber_loss(prediction, target, self.reduction, self.delta)


class BCELoss(Module):
    """Binary cross-entropy of probabilities; see ops.composed.binary_cross_entropy."""

    def __init__(self, *, reduction: str = "mean"):
        self.reduction = reduction

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return F.binary_cross_entropy(prediction, target, reduction=self.reduction)


class KLDivLoss(Module):
    """Divergence of log-probabilities from probabilities; see ops.composed.kl_div."""

    def __init__(self, *, reduction: str = "mean", log_target: bool = False):
        self.reduction, self.log_target = reduction, log_target

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return F.kl_div(prediction, target, reduction=self.reduction, log_target=self.log_target)
