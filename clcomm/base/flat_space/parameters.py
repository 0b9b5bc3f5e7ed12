"""Trainable parameters by name: the place of each in the flat space, its precision, the mark of a missing gradient."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from clcomm.base.errors import ArgumentError


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


# --- Gradients that no rank has, found in their mean: the optimizers skip these, as one process would. ---
# A missing gradient enters the sum as -0.0, which changes no other number, and one that is there never begins with
# -0.0. So a mean of -0.0 alone is that of a gradient which no rank has: all ranks see the same bits, and need no
# message.

#: What a missing gradient enters the sum as.
MISSING = -0.0


def is_missing(mean: np.ndarray) -> bool:
    """Return whether a mean, or a part of one that `Beginnings` has marked, is that of a gradient which no rank has."""
    flat = mean.reshape(-1)
    return bool(flat.size and not flat[0] and not flat.any() and np.signbit(flat).all())


class Beginnings:
    """Where some gradients begin in a flat array, and where the parts begin that ranks read apart.

    Args:
        places: the gradients'.
        cuts: bytes of the flat space at which parts begin.
        origin: the byte of the flat space at which the arrays begin.
    """

    def __init__(self, places: Iterable[ParameterRange], cuts: Sequence[int] = (), origin: int = 0):
        self._origin = origin
        self._places = [place for place in places if place.nbytes]
        at: dict[np.dtype, list[tuple[int, str]]] = {}
        for place in self._places:
            starts = [each - origin for each in {place.start, *cuts} if place.start <= each < place.stop]
            own = at.setdefault(_real(place), [])
            own += [(start // _real(place).itemsize, place.name) for start in starts]
        self._found = [
            (kind, np.array([index for index, _ in pairs]), [name for _, name in pairs]) for kind, pairs in at.items()
        ]

    def mark(self, flat: np.ndarray, missing: Collection[str] = ()) -> None:
        """Let no gradient in `flat`, uint8, begin with -0.0 but those that are missing."""
        for kind, where, names in self._found:
            if missing:
                where = where[[name not in missing for name in names]]
            flat.view(kind)[where] += kind.type(0)

    def missing(self, flat: np.ndarray) -> frozenset[str]:
        """Return the names of the gradients that no rank has, by their mean in `flat`, uint8."""
        for kind, where, _ in self._found:
            first = flat.view(kind)[where]
            if (np.signbit(first) & (first == 0)).any():
                whole = ((each, flat[each.start - self._origin :][: each.nbytes]) for each in self._places)
                return frozenset(each.name for each, mean in whole if is_missing(mean.view(_real(each))))
        return frozenset()


def _real(place: ParameterRange) -> np.dtype:
    """Return the dtype of a gradient's real numbers, of which a complex one has pairs."""
    return np.empty(0, place.dtype).real.dtype


# --- The precisions in which parameters are stored; kernels compute in float32, and gradients are float32. ---


@dataclass(frozen=True)
class Precision:
    """A format of stored parameters: its name, and bytes of an element."""

    name: str
    itemsize: int

    @property
    def is_full(self) -> bool:
        """Whether it is float32, in which kernels read parameters as they are."""
        return self.itemsize == 4

    @property
    def dtype(self) -> np.dtype:
        """The dtype in which the stored bits are moved."""
        return np.dtype(np.float32 if self.is_full else np.uint16)

    def nbytes(self, nbytes: int) -> int:
        """Return the bytes that take `nbytes` as float32; so do offsets in the flat space."""
        return nbytes * self.itemsize // 4

    def __reduce__(self) -> tuple[object, ...]:
        return parse_precision, (self.name,)  # copies are the precision itself

    def __str__(self) -> str:
        return self.name


FLOAT32, BF16, FP16 = Precision("float32", 4), Precision("bf16", 2), Precision("fp16", 2)
#: The names of all precisions.
PRECISIONS = {each.name: each for each in (FLOAT32, BF16, FP16)}


def parse_precision(value: Precision | str) -> Precision:
    """Return the precision of a name; ArgumentError for another name."""
    found = PRECISIONS.get(str(value))
    if found is None:
        raise ArgumentError(f"precision: expected one of {', '.join(PRECISIONS)}, got {value!r}")
    return found
