"""The hash of parameters: equal to its formula, and sensitive to every bit and position."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.base.host.arrays import hash_words

MASK = (1 << 64) - 1


def by_the_formula(words: list[int], first: int = 0) -> int:
    """Return the hash in whole numbers of any size."""
    total = 0
    for index, word in enumerate(words, first + 1):
        z = (word + index * 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        total += z ^ (z >> 31)
    return total & MASK


def as_bytes(words: list[int]) -> np.ndarray:
    return np.array(words, np.uint64).view(np.uint8)


@given(words=st.lists(st.integers(0, MASK), max_size=20), first=st.integers(0, 1 << 40))
def test_is_the_formula(words, first):
    assert hash_words(as_bytes(words), first) == by_the_formula(words, first)


@pytest.mark.parametrize("count", [4095, 4096, 4097, 10_000])
def test_parts_add_up_to_the_whole(count):
    words = np.random.default_rng(count).integers(0, MASK, count, np.uint64, endpoint=True)
    data, middle = words.view(np.uint8), count // 3
    whole = hash_words(data)
    assert whole == by_the_formula(words.tolist())
    assert whole == (hash_words(data[: 8 * middle]) + hash_words(data[8 * middle :], middle)) & MASK


@given(data=st.data(), count=st.integers(2, 300))
def test_a_flipped_bit_and_swapped_values_show(data, count):
    values = np.random.default_rng(count).normal(size=2 * count).astype(np.float32)
    before = hash_words(values.view(np.uint8))
    changed = values.copy()
    changed.view(np.uint32)[data.draw(st.integers(0, 2 * count - 1))] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
    assert hash_words(changed.view(np.uint8)) != before
    one, other = data.draw(st.lists(st.integers(0, 2 * count - 1), min_size=2, max_size=2, unique=True))
    swapped = values.copy()
    swapped[[one, other]] = swapped[[other, one]]
    assert hash_words(swapped.view(np.uint8)) != before


def test_zeros_at_another_place_are_another_hash():
    assert hash_words(np.zeros(64, np.uint8)) != hash_words(np.zeros(72, np.uint8)) != 0
