"""A fast 64-bit hash of parameters that devices and hosts compute alike.

The sum, modulo 2^64, of each 64-bit word mixed with its position: any number of work-items may compute it, in any
order. The mixing is SplitMix64's (G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", OOPSLA
2014). It detects accidents, not attacks. clcomm/engine/kernels/hash.cl computes the same.
"""

from __future__ import annotations

import numpy as np

WORD = 8  # bytes
_STEP, _FIRST, _SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_CHUNK = 1 << 12  # words that fit into the cache


def hash_words(data: np.ndarray, first: int = 0) -> int:
    """Return the hash of a uint8 array of whole words, of which the first is at position `first`.

    Hashes of parts at their positions add up, modulo 2^64, to that of the whole.
    """
    words = data.view(np.uint64)
    total = np.uint64(0)
    positions = np.arange(1, min(_CHUNK, words.size) + 1, dtype=np.uint64) * _STEP
    for begin in range(0, words.size, _CHUNK):
        part = words[begin : begin + _CHUNK]
        offset = np.array([first + begin], np.uint64) * _STEP  # an array: wrapping around is no warning there
        total = np.add.reduce(_mixed(part + positions[: part.size] + offset), initial=total)
    return int(total)


def _mixed(z: np.ndarray) -> np.ndarray:
    z ^= z >> np.uint64(30)
    z *= _FIRST
    z ^= z >> np.uint64(27)
    z *= _SECOND
    z ^= z >> np.uint64(31)
    return z
