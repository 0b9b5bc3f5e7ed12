"""The shards of an array that ranks divide between them."""

from __future__ import annotations

import itertools

import numpy as np

from clcomm.base.flat_space.layout import shard_bounds

#: Shards start at multiples of two cache lines, so that OpenCL devices can use the memory in place.
SHARD_ALIGNMENT_BYTES = 128


def shards(array: np.ndarray, parts: int) -> list[slice]:
    """Return the slices of an array's `parts` shards, in order; see `shard_bounds`."""
    bounds = shard_bounds(array.size, parts, max(1, SHARD_ALIGNMENT_BYTES // array.itemsize))
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
