"""The random words of dropout in NumPy: Philox4x32-10 (Salmon, Moraes, Dror and Shaw, 2011)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_LOW = np.uint64(0xFFFFFFFF)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_INCREMENTS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_HALF = np.uint64(32)


def philox(counter: Sequence[int | np.ndarray], key: Sequence[int]) -> list[np.ndarray]:
    """Return the four words of a counter of four words and a key of two."""
    words, keys = [np.asarray(word, np.uint64) for word in counter], [np.uint64(word) for word in key]
    for _ in range(10):
        products = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            (products[1] >> _HALF) ^ words[1] ^ keys[0], products[1] & _LOW,
            (products[0] >> _HALF) ^ words[3] ^ keys[1], products[0] & _LOW,
        ]  # fmt: skip
        keys = [(word + more) & _LOW for word, more in zip(keys, _INCREMENTS, strict=True)]
    return words


def halves(value: int) -> tuple[int, int]:
    """Return the low and the high 32 bits."""
    return value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF


def random_words(seed: int, rank: int, draws: int, count: int) -> np.ndarray:
    """Return the words of so many elements, in the use of a rank's stream that has `draws` before it."""
    i = np.arange(count)
    blocks, same = i // 32 * 8 + i % 8, np.zeros(count, np.uint64)
    low, high = halves(draws)
    words = philox([blocks, same + np.uint64(low), same + np.uint64(high), same + np.uint64(rank)], halves(seed))
    return np.choose(i % 32 // 8, words)
