"""Normalisation layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clcomm.engine import functional as F
from clcomm.engine.device import Device
from clcomm.engine.nn.module import Module
from clcomm.engine.parameter import Parameter
from clcomm.engine.tensor import Tensor
from clcomm.errors import ArgumentError


class LayerNorm(Module):
    """x [..., *normalized_shape] -> the same, normalised over those dimensions, times `weight` plus `bias`.

    The weight begins as ones, the bias as zeros, as PyTorch's.

    Args:
        normalized_shape: the last dimensions of x; one number for one dimension.
        eps: is added to the variance.
        elementwise_affine: whether the layer has a weight and a bias.
        bias: whether it has a bias beside the weight.
        device: where its parameters are; by default `default_device()`.

    Raises ArgumentError for dimensions below 1.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        device: Device | str | None = None,
    ):
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if not shape or any(not isinstance(n, int) or n < 1 for n in shape):
            raise ArgumentError(f"normalized_shape: expected whole numbers of at least 1, got {normalized_shape!r}")
        self.normalized_shape, self.eps = shape, eps
        self.weight = self.bias = None
        if elementwise_affine:
            self.weight = Parameter(np.ones(shape, np.float32), device)
            if bias:
                self.bias = Parameter(np.zeros(shape, np.float32), self.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
