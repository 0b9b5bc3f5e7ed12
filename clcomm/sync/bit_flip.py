"""One flipped bit in a model's memory, as faulty memory would flip it: for `clcomm run --chaos` and the tests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from clcomm.base.flat_space.parameters import ParameterRange
from clcomm.sync.shared_space import SharedSpace

#: The places of a flip in an averaging.
OWN, MEAN = "own gradient", "mean"


def flip_bit(array: np.ndarray, where: int) -> None:
    """Flip a bit of a contiguous array."""
    words = array.reshape(-1).view(np.uint8)
    words[where // 8 % words.size] ^= 1 << where % 8


def _chosen(space: SharedSpace, where: int) -> ParameterRange:
    return space.layout.ranges[where // 1009 % len(space.layout.ranges)]


def flip_in_space(flat: np.ndarray, space: SharedSpace, where: int, nbytes: Callable[[int], int] = int) -> str:
    """Flip a bit of one parameter's part of a flat array, and return the parameter's name.

    nbytes: returns how many bytes of the array so many of float32 take.
    """
    chosen = _chosen(space, where)
    start = nbytes(chosen.start)
    flip_bit(flat[start : start + nbytes(chosen.nbytes)], where)
    return chosen.name


class PlannedFlip:
    """A bit to flip in a model's next averaging, or in its parameters at once.

    Args:
        space: the model's flat space.
        where: chooses the place and the bit.

    Attributes:
        place: MEAN, or OWN, this rank's gradients, of models whose flat space kernels read; else "".
        said: which memory has the bit, in words; "": this rank keeps only a shard of the parameters.
    """

    def __init__(self, space: SharedSpace, where: int):
        self._space, self._where = space, where // 3
        flat = space.flat_space
        self.place = "" if flat is None or flat.is_staged or space.shards is not None else (MEAN, OWN, "")[where % 3]
        name = _chosen(space, self._where).name
        self.said = f"the {self.place} of {name!r}" if self.place else f"parameter {name!r}" * space.has_parameters
        if not self.place and space.has_parameters:
            space.adapter.pull_parameters()
            flip_in_space(space.arrays.params, space, self._where, space.precision.nbytes)
            space.adapter.push_parameters()

    def flip(self, flat: np.ndarray) -> None:
        """Flip it in the gradients, which kernels may still be writing."""
        if self._space.flat_space is not None:
            self._space.flat_space.device.finish()
        flip_in_space(flat, self._space, self._where)
