"""A rank's part of a model, as a DistributedOptimizer uses it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from clcomm.base.flat_space.missing import is_missing
from clcomm.comm.communicator import Communicator
from clcomm.sync.agreement import CHECKS
from clcomm.sync.clipping import clip_coefficient, global_norm, scale
from clcomm.sync.shared_space import SharedSpace


class Update(ABC):
    """This rank's part of a model, with what reduces its gradients and gathers its parameters.

    Attributes:
        gradients: the device's buffer of the averaged gradients.
        params: that of the parameters; None: the flat space's.
    """

    gradients: Any
    params: Any = None

    def __init__(self, comm: Communicator, space: SharedSpace):
        self.comm, self.space = comm, space

    @abstractmethod
    def memory(self) -> tuple[int, int, int]:
        """Return the bytes of parameters, of gradients, and in flight: see MemoryUse."""

    @abstractmethod
    def reduce(self, weight: float) -> None:
        """Average the gradients of this rank's part into `gradients`; its own count `weight` times."""

    @abstractmethod
    def named_parts(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield what this rank has of each parameter's averaged gradient, by name."""

    def missing(self) -> frozenset[str]:
        """Return the parameters of which this rank has a part, and no rank a gradient."""
        return frozenset(name for name, mean in self.named_parts() if is_missing(mean))

    @abstractmethod
    def upload(self) -> None:
        """Copy the averaged gradients to the device, where its memory is separate."""

    @abstractmethod
    def is_finite(self) -> bool:
        """Return whether this rank's part of the mean holds neither NaN nor Inf."""

    @abstractmethod
    def raise_non_finite(self) -> NoReturn:
        """Raise NonFiniteError on every rank, as some rank's part of the mean holds NaN or Inf; collective."""

    @abstractmethod
    def begin_update(self, is_clipped: bool) -> None:
        """Wait until this rank may change its parameters."""

    @abstractmethod
    def gather(self) -> None:
        """Let all ranks have all updated parameters."""

    @abstractmethod
    def follow(self, completed: Sequence[str]) -> None:
        """Note in which order backward completes gradients."""

    def require_finite(self) -> None:
        """Raise NonFiniteError on every rank, if any rank's part of the mean holds NaN or Inf; collective."""
        if not self.comm.all_gather(np.array([self.is_finite()]), label=CHECKS).all():
            self.raise_non_finite()

    def scale(self, coefficient: float) -> None:
        """Multiply this rank's part by the coefficient."""
        for _, values in self.named_parts():  # not the padding, in which 0 times NaN would stay
            scale(values, coefficient)
        self.upload()

    def norm(self) -> float:
        """Return the norm of the whole mean; collective."""
        return global_norm(self.comm, self.space, self.named_parts())

    def clip(self, max_norm: float) -> float:
        """Scale this rank's part so that the norm of the whole mean is at most `max_norm`; return the norm before."""
        norm = self.norm()
        coefficient = clip_coefficient(norm, max_norm)
        if coefficient != 1.0:
            self.scale(coefficient)
        return norm
