"""Host arrays that start where an OpenCL device can use them in place."""

from __future__ import annotations

import math

import numpy as np

#: A page: more than any OpenCL device asks of memory that it is to use where it lies.
PAGE = 4096


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
    """Return an uninitialised C-contiguous array that starts at a page."""
    kind = np.dtype(dtype)
    nbytes = math.prod(shape) * kind.itemsize
    raw = np.empty(nbytes + PAGE, np.uint8)
    start = -raw.ctypes.data % PAGE
    return raw[start : start + nbytes].view(kind).reshape(shape)


def aligned_zeros(nbytes: int) -> np.ndarray:
    """Return zeroed bytes that start at a page."""
    array = aligned_empty((nbytes,), np.uint8)
    array[...] = 0
    return array
