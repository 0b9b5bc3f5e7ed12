"""Layers that few models have; each is a function of `functional` with its settings."""

from __future__ import annotations

from clcomm.engine import functional as F
from clcomm.engine.nn.activations import Activation, Softmax
from clcomm.engine.nn.module import Module
from clcomm.engine.nn.pools import Upsample
from clcomm.engine.tensor import Tensor


class SELU(Activation):
    """The scaled ELU; inplace: x itself gets it. See `functional.selu`."""

    def of(self, x: Tensor) -> Tensor:
        return F.selu(x)


class CELU(Activation):
    """The ELU with a continuous slope; inplace: x itself gets it. See `functional.celu`."""

    def __init__(self, alpha: float = 1.0, inplace: bool = False):
        super().__init__(inplace)
        self.alpha = alpha

    def of(self, x: Tensor) -> Tensor:
        return F.celu(x, self.alpha)


class Softsign(Module):
    """x / (1 + |x|)"""

    def forward(self, x: Tensor) -> Tensor:
        return F.softsign(x)


class Tanhshrink(Module):
    """x - tanh(x)"""

    def forward(self, x: Tensor) -> Tensor:
        return F.tanhshrink(x)


class Hardshrink(Module):
    """x, or 0 where it is at most `lambd` from 0."""

    def __init__(self, lambd: float = 0.5):
        self.lambd = lambd

    def forward(self, x: Tensor) -> Tensor:
        return F.hardshrink(x, self.lambd)


class Softshrink(Module):
    """x brought nearer to 0 by `lambd`."""

    def __init__(self, lambd: float = 0.5):
        self.lambd = lambd

    def forward(self, x: Tensor) -> Tensor:
        return F.softshrink(x, self.lambd)


class Softmin(Module):
    """The softmax of -x along a dimension."""

    def __init__(self, dim: int | None = None):
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return F.softmin(x, self.dim)


class Softmax2d(Softmax):
    """The softmax over the channels of [N, C, H, W]."""

    def __init__(self) -> None:
        super().__init__(1)


class AlphaDropout(Module):
    """Dropout that keeps mean 0 and variance 1 behind SELU. See `functional.alpha_dropout`."""

    def __init__(self, p: float = 0.5):
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.alpha_dropout(x, self.p, self.training)


class LocalResponseNorm(Module):
    """x divided by a power of its neighbouring channels' squares. See `functional.local_response_norm`."""

    def __init__(self, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0):
        self.settings = size, alpha, beta, k

    def forward(self, x: Tensor) -> Tensor:
        return F.local_response_norm(x, *self.settings)


class LPPool2d(Module):
    """The norm of each window of [N, C, H, W]. See `functional.lp_pool2d`."""

    def __init__(
        self, norm_type: float, kernel_size: int | tuple[int, int], stride: int | tuple[int, int] | None = None,
        ceil_mode: bool = False,
    ):  # fmt: skip
        self.settings = norm_type, kernel_size, stride, ceil_mode

    def forward(self, x: Tensor) -> Tensor:
        return F.lp_pool2d(x, *self.settings)


class Fold(Module):
    """Images from columns of their windows. See `functional.fold`."""

    def __init__(
        self, output_size: int | tuple[int, int], kernel_size: int | tuple[int, int],
        dilation: int | tuple[int, int] = 1, padding: int | tuple[int, int] = 0, stride: int | tuple[int, int] = 1,
    ):  # fmt: skip
        self.settings = output_size, kernel_size, dilation, padding, stride

    def forward(self, x: Tensor) -> Tensor:
        return F.fold(x, *self.settings)


class Unfold(Module):
    """The windows of images as columns. See `functional.unfold`."""

    def __init__(
        self, kernel_size: int | tuple[int, int], dilation: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0, stride: int | tuple[int, int] = 1,
    ):  # fmt: skip
        self.settings = kernel_size, dilation, padding, stride

    def forward(self, x: Tensor) -> Tensor:
        return F.unfold(x, *self.settings)


class ChannelShuffle(Module):
    """The channels of groups in turn. See `functional.channel_shuffle`."""

    def __init__(self, groups: int):
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        return F.channel_shuffle(x, self.groups)


class UpsamplingNearest2d(Upsample):
    """x [N, C, H, W] -> x in another size, each element the nearest one."""

    def __init__(
        self, size: int | tuple[int, ...] | None = None, scale_factor: float | tuple[float, ...] | None = None
    ):
        super().__init__(size, scale_factor)


class UpsamplingBilinear2d(Upsample):
    """x [N, C, H, W] -> x in another size, between four elements, the corners where they were."""

    def __init__(
        self, size: int | tuple[int, ...] | None = None, scale_factor: float | tuple[float, ...] | None = None
    ):
        super().__init__(size, scale_factor, "bilinear", align_corners=True)


class PairwiseDistance(Module):
    """The distance of rows. See `functional.pairwise_distance`."""

    def __init__(self, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False):
        self.settings = p, eps, keepdim

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:  # type: ignore[override]
        return F.pairwise_distance(x1, x2, *self.settings)


class MarginRankingLoss(Module):
    """See `functional.margin_ranking_loss`."""

    def __init__(self, margin: float = 0.0, *, reduction: str = "mean"):
        self.margin, self.reduction = margin, reduction

    def forward(self, x1: Tensor, x2: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return F.margin_ranking_loss(x1, x2, target, self.margin, reduction=self.reduction)


class CosineEmbeddingLoss(MarginRankingLoss):
    """See `functional.cosine_embedding_loss`."""

    def forward(self, x1: Tensor, x2: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return F.cosine_embedding_loss(x1, x2, target, self.margin, reduction=self.reduction)


class HingeEmbeddingLoss(Module):
    """See `functional.hinge_embedding_loss`."""

    def __init__(self, margin: float = 1.0, *, reduction: str = "mean"):
        self.margin, self.reduction = margin, reduction

    def forward(self, x: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return F.hinge_embedding_loss(x, target, self.margin, reduction=self.reduction)


class SoftMarginLoss(Module):
    """See `functional.soft_margin_loss`."""

    def __init__(self, *, reduction: str = "mean"):
        self.reduction = reduction

    def forward(self, x: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return F.soft_margin_loss(x, target, reduction=self.reduction)


class MultiMarginLoss(Module):
    """See `functional.multi_margin_loss`."""

    def __init__(self, p: int = 1, margin: float = 1.0, *, reduction: str = "mean"):
        self.p, self.margin, self.reduction = p, margin, reduction

    def forward(self, x: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return F.multi_margin_loss(x, target, self.p, self.margin, reduction=self.reduction)


class TripletMarginLoss(Module):
    """See `functional.triplet_margin_loss`."""

    def __init__(
        self, margin: float = 1.0, p: float = 2.0, eps: float = 1e-6, swap: bool = False, *, reduction: str = "mean"
    ):
        self.settings, self.reduction = (margin, p, eps, swap), reduction

    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:  # type: ignore[override]
        return F.triplet_margin_loss(anchor, positive, negative, *self.settings, reduction=self.reduction)


class PoissonNLLLoss(Module):
    """See `functional.poisson_nll_loss`."""

    def __init__(self, log_input: bool = True, full: bool = False, *, eps: float = 1e-8, reduction: str = "mean"):
        self.log_input, self.full, self.eps, self.reduction = log_input, full, eps, reduction

    def forward(self, x: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return F.poisson_nll_loss(x, target, self.log_input, self.full, eps=self.eps, reduction=self.reduction)


class GaussianNLLLoss(Module):
    """See `functional.gaussian_nll_loss`."""

    def __init__(self, *, full: bool = False, eps: float = 1e-6, reduction: str = "mean"):
        self.full, self.eps, self.reduction = full, eps, reduction

    def forward(self, x: Tensor, target: Tensor, var: Tensor) -> Tensor:  # type: ignore[override]
        return F.gaussian_nll_loss(x, target, var, self.full, self.eps, reduction=self.reduction)
