"""The hash of clcomm/base/host/hashing.py, computed on a device by hash.cl."""

from __future__ import annotations

import numpy as np

from clcomm.base.host.hashing import WORD
from clcomm.engine.device import Device


def hash_buffer(device: Device, buffer: object, nbytes: int) -> int:
    """Return the hash of the first `nbytes` of a buffer, a multiple of WORD; waits for the device."""
    grid = device.grid(nbytes // WORD)
    (units,) = grid[0]
    partials = device.allocate(units * WORD)
    device.launch(device.kernel("hash", "hash_words"), *grid, partials, buffer, units, nbytes // WORD)
    sums = np.empty(units, np.uint64)
    device.read(partials, sums)
    return int(np.add.reduce(sums))
