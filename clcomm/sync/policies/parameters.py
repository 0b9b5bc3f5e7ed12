"""A model's parameters as flat arrays, whole or in fragments, for what works on them between steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.layout import FlatLayout

_FLOATS = ("float32", "float64")


class ModelParameters:
    """A model's parameters, in one flat array of one dtype; the padding between them is zero on all ranks.

    Args:
        layout: their places in it, in bytes.
        flat: returns the array's memory, uint8, which may move.
        pull: copies the model's parameters there.
        push: copies them back.

    Raises ArgumentError for parameters that are not all float32, or all float64.
    """

    def __init__(
        self, layout: FlatLayout, flat: Callable[[], np.ndarray], pull: Callable[[], None], push: Callable[[], None]
    ):
        dtypes = sorted({spec.dtype for spec in layout.specs})
        if len(dtypes) != 1 or dtypes[0] not in _FLOATS:
            raise ArgumentError(f"policy: expected parameters that are all float32 or float64, got {', '.join(dtypes)}")
        self.dtype = np.dtype(dtypes[0])
        self._layout, self._flat, self._pull, self._push = layout, flat, pull, push
        self.size = layout.span // self.dtype.itemsize
        #: 1 for parameters, 0 for the padding between them, which stays zero.
        self.mask = np.zeros(self.size, self.dtype)
        for place in layout.ranges:
            self.mask[place.start // self.dtype.itemsize : place.stop // self.dtype.itemsize] = 1

    def read(self) -> np.ndarray:
        """Return the parameters as they are now, in memory that the model may share."""
        self._pull()
        return self._flat().view(self.dtype)

    def write(self, values: np.ndarray, part: slice = slice(None)) -> None:
        """Set a part of the parameters, which were just read."""
        self._flat().view(self.dtype)[part] = values
        self._push()

    def fragments(self, count: int) -> list[slice]:
        """Return `count` parts, or fewer of a model with fewer parameters, of whole parameters and about equal size."""
        step, item = -(-self._layout.span // count), self.dtype.itemsize
        starts = [0]
        for place in self._layout.ranges:
            if place.start >= len(starts) * step:
                starts.append(place.start)
        return [slice(a // item, b // item) for a, b in zip(starts, [*starts[1:], self._layout.span], strict=True)]
