"""Adasum against the published formula, written down another way, for any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from clcomm.horovod.adasum import adasum


def published(vectors: list[np.ndarray]) -> np.ndarray:
    """Equation 4 of Maleki et al. (2021) over a tree: the first 2^k vectors, 2^k < n, then the others."""
    if len(vectors) == 1:
        return vectors[0].astype(np.longdouble)
    half = 1 << ((len(vectors) - 1).bit_length() - 1)
    a, b = published(vectors[:half]), published(vectors[half:])
    dot, of_a, of_b = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return (1 - dot / (2 * of_a) if of_a else 1) * a + (1 - dot / (2 * of_b) if of_b else 1) * b


@pytest.mark.parametrize("ranks", range(1, 18))
@pytest.mark.parametrize("length", [1, 2, 33, 1000])
def test_any_number_of_ranks(ranks, length):
    rng = np.random.default_rng(ranks * 10_000 + length)
    vectors = [rng.normal(size=length) * 10.0 ** rng.integers(-6, 6) for _ in range(ranks)]
    np.testing.assert_allclose(adasum(vectors), published(vectors).astype(np.float64), rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_of_parallel_vectors_it_is_the_mean_and_of_orthogonal_ones_the_sum(ranks):
    same = np.arange(1.0, 6.0)
    np.testing.assert_allclose(adasum([same] * ranks), same, rtol=1e-14)
    np.testing.assert_array_equal(adasum(list(np.eye(ranks))), np.ones(ranks))


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_zeros_add_nothing(ranks, dtype):
    vectors = [np.zeros(4, dtype) for _ in range(ranks)]
    assert not adasum(vectors).any()
    vectors[ranks // 2] = np.array([1, -2, 3, 0.5], dtype)
    np.testing.assert_array_equal(adasum(vectors), vectors[ranks // 2].astype(np.float64))


def test_the_operands_are_kept():
    vectors = [np.ones(3), np.full(3, 2.0)]
    adasum(vectors)
    assert vectors[0].tolist() == [1.0] * 3 and vectors[1].tolist() == [2.0] * 3
