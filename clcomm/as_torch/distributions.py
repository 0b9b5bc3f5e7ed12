"""Distributions under the names of `torch.distributions`, as far as policies and variational models use them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine import Tensor
from clcomm.engine import functional as F
from clcomm.engine.creation import multinomial, randn

__all__ = ["Categorical", "Normal"]


class Categorical:
    """Numbers of classes.

    Args:
        probs: [classes] or [N, classes], weights from 0 up, which are divided by their sum.
        logits: logarithms of weights, in place of them.
    """

    def __init__(self, probs: Tensor | None = None, logits: Tensor | None = None):
        if (probs is None) == (logits is None):
            raise ArgumentError("Categorical: expected probs or logits, got both or none")
        if probs is not None:
            self.probs = probs / F.sum(probs, -1, keepdims=True)
            self.logits = F.log(F.clamp(self.probs, _LEAST, 1.0 - _LEAST))
        elif logits is not None:
            self.logits = F.log_softmax(logits, -1)
            self.probs = F.exp(self.logits)

    def sample(self) -> Tensor:
        """Return a class, or one of each row; not PyTorch's numbers."""
        drawn = multinomial(self.probs.detach(), 1)
        return F.reshape(drawn, self.probs.shape[:-1])

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the logarithm of the probability of classes, [N] or a single one."""
        index = F.reshape(value, (*self.probs.shape[:-1], 1))
        return F.reshape(F.gather(self.logits, -1, index), self.probs.shape[:-1])

    def entropy(self) -> Tensor:
        """Return the entropy, in nats."""
        return F.sum(self.logits * self.probs, -1) * -1.0


class Normal:
    """The normal distribution; loc, scale: numbers or tensors of one shape."""

    def __init__(self, loc: Any, scale: Any):
        self.loc, self.scale = [each if isinstance(each, Tensor) else Tensor(float(each)) for each in (loc, scale)]

    def rsample(self) -> Tensor:
        """Return a sample of loc's shape, through which gradients of loc and scale pass."""
        return self.loc + self.scale * randn(self.loc.shape, device=self.loc.device)

    def sample(self) -> Tensor:
        """Return a sample of loc's shape."""
        return self.rsample().detach()

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the logarithm of the density."""
        apart = (value - self.loc) / self.scale
        return apart * apart * -0.5 - F.log(self.scale) - 0.5 * math.log(2 * math.pi)


_LEAST = float(np.finfo(np.float32).eps)
