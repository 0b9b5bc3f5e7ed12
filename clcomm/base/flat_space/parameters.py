"""Trainable parameters by name, and the place of each in the flat space."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class ParameterSpec:
    """A trainable parameter's name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """The parameter's own bytes, without padding."""
        return self.size * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class ParameterRange:
    """A parameter's place in the flat space: bytes [start, stop)."""

    spec: ParameterSpec
    start: int

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> str:
        return self.spec.dtype

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes

    @property
    def stop(self) -> int:
        return self.start + self.spec.nbytes
