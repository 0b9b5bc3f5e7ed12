"""Losses as layers."""

from __future__ import annotations

from clcomm.engine import functional as F
from clcomm.engine.nn.activations import FunctionLayer
from clcomm.engine.tensor import Tensor


class CrossEntropyLoss(FunctionLayer):
    """Cross-entropy of logits [rows, classes] against integer classes [rows]; see ops.class_losses.cross_entropy."""

    _function, _settings = staticmethod(F.cross_entropy), ("reduction", "weight", "ignore_index", "label_smoothing")

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


class NLLLoss(FunctionLayer):
    """Negative log-likelihood of log-probabilities [rows, classes]; see ops.class_losses.nll_loss."""

    _function, _settings = staticmethod(F.nll_loss), ("reduction", "weight", "ignore_index")

    def __init__(self, *, reduction: str = "mean", weight: Tensor | None = None, ignore_index: int | None = None):
        self.reduction, self.weight, self.ignore_index = reduction, weight, ignore_index


class CTCLoss(FunctionLayer):
    """Loss of sequences of labels whose places are not known; see ops.ctc.ctc_loss."""

    _function, _settings = staticmethod(F.ctc_loss), ("blank", "reduction", "zero_infinity")

    def __init__(self, blank: int = 0, reduction: str = "mean", zero_infinity: bool = False):
        self.blank, self.reduction, self.zero_infinity = blank, reduction, zero_infinity


class BCEWithLogitsLoss(FunctionLayer):
    """Binary cross-entropy of sigmoid(logits); see ops.loss.binary_cross_entropy_with_logits."""

    _function, _settings = staticmethod(F.binary_cross_entropy_with_logits), ("reduction", "weight", "pos_weight")

    def __init__(self, *, reduction: str = "mean", weight: Tensor | None = None, pos_weight: Tensor | None = None):
        self.reduction, self.weight, self.pos_weight = reduction, weight, pos_weight


class SmoothL1Loss(FunctionLayer):
    """Squared for small errors, absolute for large ones; see ops.loss.smooth_l1_loss."""

    _function, _settings = staticmethod(F.smooth_l1_loss), ("reduction", "beta")

    def __init__(self, *, reduction: str = "mean", beta: float = 1.0):
        self.reduction, self.beta = reduction, beta


class MSELoss(FunctionLayer):
    """Squared error of two tensors of one shape; see ops.loss.mse_loss."""

    _function, _settings = staticmethod(F.mse_loss), ("reduction",)

    def __init__(self, *, reduction: str = "mean"):
        self.reduction = reduction


class L1Loss(FunctionLayer):
    """Absolute error of two tensors of one shape; see ops.composed.l1_loss."""

    _function, _settings = staticmethod(F.l1_loss), ("reduction",)

    def __init__(self, *, reduction: str = "mean"):
        self.reduction = reduction


class HuberLoss(FunctionLayer):
    """Squared for errors below delta, absolute for larger ones; see ops.composed.huber_loss."""

    _function, _settings = staticmethod(F.huber_loss), ("reduction", "delta")

    def __init__(self, reduction: str = "mean", delta: float = 1.0):
        self.reduction, self.delta = reduction, delta


class BCELoss(FunctionLayer):
    """Binary cross-entropy of probabilities; see ops.composed.binary_cross_entropy."""

    _function, _settings = staticmethod(F.binary_cross_entropy), ("reduction",)

    def __init__(self, *, reduction: str = "mean"):
        self.reduction = reduction


class KLDivLoss(FunctionLayer):
    """Divergence of log-probabilities from probabilities; see ops.composed.kl_div."""

    _function, _settings = staticmethod(F.kl_div), ("reduction", "log_target")

    def __init__(self, *, reduction: str = "mean", log_target: bool = False):
        self.reduction, self.log_target = reduction, log_target
