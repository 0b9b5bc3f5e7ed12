"""One flipped bit in a model's memory, as faulty memory would flip it: for `clcomm run --chaos` and the tests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from clcomm.sync.shared_space import SharedSpace


def flip_bit(array: np.ndarray, where: int) -> None:
    """Flip a bit of a contiguous array."""
    words = array.reshape(-1).view(np.uint8)
    words[where // 8 % words.size] ^= 1 << where % 8


def flip_in_space(flat: np.ndarray, space: SharedSpace, where: int, nbytes: Callable[[int], int] = int) -> str:
    """Flip a bit of one parameter's part of a flat array, and return the parameter's name.

    nbytes: returns how many bytes of the array so many of float32 take.
    """
    places = space.layout.ranges
    chosen = places[where // 1009 % len(places)]
    start = nbytes(chosen.start)
    flip_bit(flat[start : start + nbytes(chosen.nbytes)], where)
    return chosen.name


def flip_in_parameters(space: SharedSpace, where: int) -> str:
    """Flip a bit of this rank's parameters; return where, in words, or "" where it keeps only a shard of them."""
    if not space.has_parameters:
        return ""
    space.adapter.pull_parameters()
    name = flip_in_space(space.arrays.params, space, where, space.precision.nbytes)
    space.adapter.push_parameters()
    return f"parameter {name!r}"


def flip_in_mean(space: SharedSpace, where: int) -> None:
    """Flip a bit of the averaged gradients, which all ranks of a host may share."""
    if space.flat_space is not None:
        space.flat_space.device.finish()
    flip_in_space(space.arrays.reduced, space, where)
