"""Pooling layers, and images of other sizes. N C H W: images, channels, height, width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clcomm.base.errors import ArgumentError
from clcomm.engine import functional as F
from clcomm.engine.nn.activations import FunctionLayer
from clcomm.engine.nn.module import Module
from clcomm.engine.tensor import Tensor

Size = int | tuple[int, ...]


class MaxPool2d(FunctionLayer):
    """x [N, C, H, W] -> the largest value of each window; `stride` is `kernel_size` unless given. See F.max_pool2d.

    Raises ArgumentError for `return_indices`.
    """

    _function: Any = staticmethod(F.max_pool2d)
    _settings = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")

    def __init__(
        self, kernel_size: Size, stride: Size | None = None, padding: Size = 0, dilation: int = 1,
        return_indices: bool = False, ceil_mode: bool = False,
    ):  # fmt: skip
        if return_indices is not False:
            raise ArgumentError(f"{type(self).__name__}: return_indices: expected False, got {return_indices!r}")
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        self.dilation, self.ceil_mode = dilation, ceil_mode


class MaxPool1d(MaxPool2d):
    """x [N, C, L] -> the largest value of each window; `stride` is `kernel_size` unless given. See F.max_pool1d."""

    _function: Any = staticmethod(F.max_pool1d)


class MaxPool3d(MaxPool2d):
    """x [N, C, D, H, W] -> the largest value of each window; `stride`: by default `kernel_size`. See F.max_pool3d."""

    _function: Any = staticmethod(F.max_pool3d)


class AvgPool2d(FunctionLayer):
    """x [N, C, H, W] -> the mean of each window; `stride` is `kernel_size` unless given. See F.avg_pool2d."""

    _function: Any = staticmethod(F.avg_pool2d)
    _settings: Any = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")

    def __init__(
        self, kernel_size: Size, stride: Size | None = None, padding: Size = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ):  # fmt: skip
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        self.ceil_mode, self.count_include_pad, self.divisor_override = ceil_mode, count_include_pad, divisor_override


class AvgPool3d(AvgPool2d):
    """x [N, C, D, H, W] -> the mean of each window; `stride` is `kernel_size` unless given. See F.avg_pool3d."""

    _function: Any = staticmethod(F.avg_pool3d)


class AvgPool1d(AvgPool2d):
    """x [N, C, L] -> the mean of each window; `stride` is `kernel_size` unless given. See F.avg_pool1d."""

    _function: Any = staticmethod(F.avg_pool1d)
    _settings = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")

    def __init__(
        self, kernel_size: int, stride: int | None = None, padding: int = 0, ceil_mode: bool = False,
        count_include_pad: bool = True,
    ):  # fmt: skip
        super().__init__(kernel_size, stride, padding, ceil_mode, count_include_pad)


class AdaptiveAvgPool2d(FunctionLayer):
    """x [N, C, H, W] -> the means of windows that cover it in `output_size` rows and columns; None: as many as x's."""

    _function: Any = staticmethod(F.adaptive_avg_pool2d)
    _settings = ("output_size",)

    def __init__(self, output_size: int | tuple[int | None, ...] | None):
        self.output_size = output_size


class AdaptiveAvgPool1d(AdaptiveAvgPool2d):
    """x [N, C, L] -> the means of windows that cover it in `output_size` parts."""

    _function: Any = staticmethod(F.adaptive_avg_pool1d)


class AdaptiveMaxPool2d(AdaptiveAvgPool2d):
    """x [N, C, H, W] -> the largest elements of windows that cover it in `output_size` rows and columns."""

    _function: Any = staticmethod(F.adaptive_max_pool2d)


class AdaptiveMaxPool1d(AdaptiveAvgPool2d):
    """x [N, C, L] -> the largest elements of windows that cover it in `output_size` parts."""

    _function: Any = staticmethod(F.adaptive_max_pool1d)


class AdaptiveAvgPool3d(AdaptiveAvgPool2d):
    """x [N, C, D, H, W] -> the means of windows that cover it in `output_size` parts of each direction."""

    _function: Any = staticmethod(F.adaptive_avg_pool3d)


class AdaptiveMaxPool3d(AdaptiveAvgPool2d):
    """x [N, C, D, H, W] -> the largest elements of windows that cover it in `output_size` parts of each direction."""

    _function: Any = staticmethod(F.adaptive_max_pool3d)


class Upsample(FunctionLayer):
    """x [N, C, ...] -> x in another size. See F.interpolate."""

    _function: Any = staticmethod(F.interpolate)
    _settings = ("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor")

    def __init__(
        self, size: int | tuple[int, ...] | None = None, scale_factor: float | tuple[float, ...] | None = None,
        mode: str = "nearest", align_corners: bool | None = None, recompute_scale_factor: bool | None = None,
    ):  # fmt: skip
        self.size, self.scale_factor, self.mode, self.align_corners = size, scale_factor, mode, align_corners
        self.recompute_scale_factor = recompute_scale_factor


class PixelShuffle(FunctionLayer):
    """x [N, C * r^2, H, W] -> [N, C, H * r, W * r]. See F.pixel_shuffle."""

    _function, _settings = staticmethod(F.pixel_shuffle), ("upscale_factor",)

    def __init__(self, upscale_factor: int):
        self.upscale_factor = upscale_factor


class PixelUnshuffle(FunctionLayer):
    """x [N, C, H * r, W * r] -> [N, C * r^2, H, W]. See F.pixel_unshuffle."""

    _function, _settings = staticmethod(F.pixel_unshuffle), ("downscale_factor",)

    def __init__(self, downscale_factor: int):
        self.downscale_factor = downscale_factor


# --- Layers that pad the last dimensions, [N, C, L], [N, C, H, W] or [N, C, D, H, W]. ---


class _Padding(Module):
    """Around each of the last dimensions a number of elements: one, or before and after from the last one on."""

    dimensions, mode = 2, "constant"

    def __init__(self, padding: int | Sequence[int]):
        self.padding = (padding,) * (2 * self.dimensions) if isinstance(padding, int) else tuple(padding)

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, self.padding, self.mode)


class ZeroPad2d(_Padding):
    """Zeros around."""


class ZeroPad1d(_Padding):
    """Zeros around."""

    dimensions = 1


class ZeroPad3d(_Padding):
    """Zeros around."""

    dimensions = 3


class ReflectionPad3d(_Padding):
    """The elements mirrored at the edges, which are not repeated."""

    dimensions, mode = 3, "reflect"


class ReplicationPad3d(_Padding):
    """The edges repeated."""

    dimensions, mode = 3, "replicate"


class ReflectionPad1d(_Padding):
    """The elements mirrored at the edges, which are not repeated."""

    dimensions, mode = 1, "reflect"


class ReflectionPad2d(_Padding):
    """The elements mirrored at the edges, which are not repeated."""

    mode = "reflect"


class ReplicationPad1d(_Padding):
    """The edges repeated."""

    dimensions, mode = 1, "replicate"


class ReplicationPad2d(_Padding):
    """The edges repeated."""

    mode = "replicate"


class ConstantPad2d(_Padding):
    """A number around."""

    def __init__(self, padding: int | Sequence[int], value: float):
        super().__init__(padding)
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, self.padding, "constant", self.value)


class ConstantPad1d(ConstantPad2d):
    """A number around."""

    dimensions = 1


class ConstantPad3d(ConstantPad2d):
    """A number around."""

    dimensions = 3


class CircularPad1d(_Padding):
    """Elements from the other end around."""

    dimensions, mode = 1, "circular"


class CircularPad2d(_Padding):
    """Elements from the other end around."""

    dimensions, mode = 2, "circular"


class CircularPad3d(_Padding):
    """Elements from the other end around."""

    dimensions, mode = 3, "circular"
