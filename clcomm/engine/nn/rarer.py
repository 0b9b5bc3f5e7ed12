"""Layers that few models have; each is a function of `functional` with its settings."""

from __future__ import annotations

from clcomm.engine import functional as F
from clcomm.engine.nn.activations import Activation, FunctionLayer, Softmax
from clcomm.engine.nn.pools import Upsample


class SELU(Activation):
    """The scaled ELU; inplace: x itself gets it. See `functional.selu`."""

    _function = staticmethod(F.selu)


class CELU(Activation):
    """The ELU with a continuous slope; inplace: x itself gets it. See `functional.celu`."""

    _function, _settings = staticmethod(F.celu), ("alpha",)

    def __init__(self, alpha: float = 1.0, inplace: bool = False):
        super().__init__(inplace)
        self.alpha = alpha


class Softsign(FunctionLayer):
    """x / (1 + |x|)"""

    _function = staticmethod(F.softsign)


class Tanhshrink(FunctionLayer):
    """x - tanh(x)"""

    _function = staticmethod(F.tanhshrink)


class Hardshrink(FunctionLayer):
    """x, or 0 where it is at most `lambd` from 0."""

    _function, _settings = staticmethod(F.hardshrink), ("lambd",)

    def __init__(self, lambd: float = 0.5):
        self.lambd = lambd


class Softshrink(FunctionLayer):
    """x brought nearer to 0 by `lambd`."""

    _function, _settings = staticmethod(F.softshrink), ("lambd",)

    def __init__(self, lambd: float = 0.5):
        self.lambd = lambd


class Softmin(FunctionLayer):
    """The softmax of -x along a dimension."""

    _function, _settings = staticmethod(F.softmin), ("dim",)

    def __init__(self, dim: int | None = None):
        self.dim = dim


class Softmax2d(Softmax):
    """The softmax over the channels of [N, C, H, W]."""

    def __init__(self) -> None:
        super().__init__(1)


class AlphaDropout(FunctionLayer):
    """Dropout that keeps mean 0 and variance 1 behind SELU. See `functional.alpha_dropout`."""

    _function, _settings = staticmethod(F.alpha_dropout), ("p", "training")

    def __init__(self, p: float = 0.5):
        self.p = p


class LocalResponseNorm(FunctionLayer):
    """x divided by a power of its neighbouring channels' squares. See `functional.local_response_norm`."""

    _function, _settings = staticmethod(F.local_response_norm), ("size", "alpha", "beta", "k")

    def __init__(self, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0):
        self.size, self.alpha, self.beta, self.k = size, alpha, beta, k


class LPPool2d(FunctionLayer):
    """The norm of each window of [N, C, H, W]. See `functional.lp_pool2d`."""

    _function, _settings = staticmethod(F.lp_pool2d), ("norm_type", "kernel_size", "stride", "ceil_mode")

    def __init__(
        self, norm_type: float, kernel_size: int | tuple[int, int], stride: int | tuple[int, int] | None = None,
        ceil_mode: bool = False,
    ):  # fmt: skip
        self.norm_type, self.kernel_size, self.stride, self.ceil_mode = norm_type, kernel_size, stride, ceil_mode


class Fold(FunctionLayer):
    """Images from columns of their windows. See `functional.fold`."""

    _function, _settings = staticmethod(F.fold), ("output_size", "kernel_size", "dilation", "padding", "stride")

    def __init__(
        self, output_size: int | tuple[int, int], kernel_size: int | tuple[int, int],
        dilation: int | tuple[int, int] = 1, padding: int | tuple[int, int] = 0, stride: int | tuple[int, int] = 1,
    ):  # fmt: skip
        self.output_size, self.kernel_size = output_size, kernel_size
        self.dilation, self.padding, self.stride = dilation, padding, stride


class Unfold(FunctionLayer):
    """The windows of images as columns. See `functional.unfold`."""

    _function, _settings = staticmethod(F.unfold), ("kernel_size", "dilation", "padding", "stride")

    def __init__(
        self, kernel_size: int | tuple[int, int], dilation: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0, stride: int | tuple[int, int] = 1,
    ):  # fmt: skip
        self.kernel_size, self.dilation, self.padding, self.stride = kernel_size, dilation, padding, stride


class ChannelShuffle(FunctionLayer):
    """The channels of groups in turn. See `functional.channel_shuffle`."""

    _function, _settings = staticmethod(F.channel_shuffle), ("groups",)

    def __init__(self, groups: int):
        self.groups = groups


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


class PairwiseDistance(FunctionLayer):
    """The distance of rows. See `functional.pairwise_distance`."""

    _function, _settings = staticmethod(F.pairwise_distance), ("p", "eps", "keepdim")

    def __init__(self, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False):
        self.p, self.eps, self.keepdim = p, eps, keepdim


class MarginRankingLoss(FunctionLayer):
    """See `functional.margin_ranking_loss`."""

    _function, _settings = staticmethod(F.margin_ranking_loss), ("margin", "reduction")

    def __init__(self, margin: float = 0.0, *, reduction: str = "mean"):
        self.margin, self.reduction = margin, reduction


class CosineEmbeddingLoss(MarginRankingLoss):
    """See `functional.cosine_embedding_loss`."""

    _function, _settings = staticmethod(F.cosine_embedding_loss), ("margin", "reduction")


class HingeEmbeddingLoss(FunctionLayer):
    """See `functional.hinge_embedding_loss`."""

    _function, _settings = staticmethod(F.hinge_embedding_loss), ("margin", "reduction")

    def __init__(self, margin: float = 1.0, *, reduction: str = "mean"):
        self.margin, self.reduction = margin, reduction


class SoftMarginLoss(FunctionLayer):
    """See `functional.soft_margin_loss`."""

    _function, _settings = staticmethod(F.soft_margin_loss), ("reduction",)

    def __init__(self, *, reduction: str = "mean"):
        self.reduction = reduction


class MultiMarginLoss(FunctionLayer):
    """See `functional.multi_margin_loss`."""

    _function, _settings = staticmethod(F.multi_margin_loss), ("p", "margin", "reduction")

    def __init__(self, p: int = 1, margin: float = 1.0, *, reduction: str = "mean"):
        self.p, self.margin, self.reduction = p, margin, reduction


class TripletMarginLoss(FunctionLayer):
    """See `functional.triplet_margin_loss`."""

    _function, _settings = staticmethod(F.triplet_margin_loss), ("margin", "p", "eps", "swap", "reduction")

    def __init__(
        self, margin: float = 1.0, p: float = 2.0, eps: float = 1e-6, swap: bool = False, *, reduction: str = "mean"
    ):
        self.margin, self.p, self.eps, self.swap, self.reduction = margin, p, eps, swap, reduction


class PoissonNLLLoss(FunctionLayer):
    """See `functional.poisson_nll_loss`."""

    _function, _settings = staticmethod(F.poisson_nll_loss), ("log_input", "full", "eps", "reduction")

    def __init__(self, log_input: bool = True, full: bool = False, *, eps: float = 1e-8, reduction: str = "mean"):
        self.log_input, self.full, self.eps, self.reduction = log_input, full, eps, reduction


class GaussianNLLLoss(FunctionLayer):
    """See `functional.gaussian_nll_loss`."""

    _function, _settings = staticmethod(F.gaussian_nll_loss), ("full", "eps", "reduction")

    def __init__(self, *, full: bool = False, eps: float = 1e-6, reduction: str = "mean"):
        self.full, self.eps, self.reduction = full, eps, reduction
