"""Layers that pad the last dimensions, [N, C, L], [N, C, H, W] or [N, C, D, H, W]."""

from __future__ import annotations

from collections.abc import Sequence

from clcomm.engine import functional as F
from clcomm.engine.nn.module import Module
from clcomm.engine.tensor import Tensor


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
