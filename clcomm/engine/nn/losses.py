"""Losses as modules."""

from __future__ import annotations

import numpy as np

from clcomm.engine import functional as F
from clcomm.engine.nn.module import Module
from clcomm.engine.tensor import Tensor


class CrossEntropyLoss(Module):
    """Cross-entropy of logits [rows, classes] against integer classes [rows]; see ops.loss.cross_entropy."""

    def __init__(self, reduction: str = "mean"):
        self.reduction = reduction

    def forward(self, logits: Tensor, targets: Tensor | np.ndarray) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(logits, targets, self.reduction)


class MSELoss(Module):
    """Squared error of two tensors of one shape; see ops.loss.mse_loss."""

    def __init__(self, reduction: str = "mean"):
        self.reduction = reduction

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return F.mse_loss(prediction, target, self.reduction)
