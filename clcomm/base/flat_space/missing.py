"""Gradients that no rank has, found in their mean: the optimizers skip these, as one process would.

A missing gradient enters the sum as -0.0, which changes no other number, and one that is there never begins with -0.0.
So a mean of -0.0 alone is that of a gradient which no rank has: all ranks see the same bits, and need no message.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from clcomm.base.flat_space.parameters import ParameterRange

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
