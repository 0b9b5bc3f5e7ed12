"""Adasum against the published formula, written down another way, for any number of ranks, which are threads here."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from clcomm.sync.adasum import adasum
from tests.horovod.values import adaptive_sum


class Rank:
    """What `adasum` needs of a Communicator, for a thread; counts the bytes that it sends to others."""

    def __init__(self, rank: int, desk: list, barrier: threading.Barrier):
        self.rank, self.size, self.sent_nbytes = rank, len(desk), 0
        self._desk, self._barrier = desk, barrier

    def _exchanged(self, own):
        self._desk[self.rank] = own
        self._barrier.wait(60)
        found = list(self._desk)
        self._barrier.wait(60)
        return found

    def all_gather(self, array, *, label=""):
        return np.stack(self._exchanged(array.copy()))

    def all_to_all(self, sends, receives, *, label="", operation=""):
        assert not sends[self.rank].size and not receives[self.rank].size
        self.sent_nbytes += sum(each.nbytes for each in sends)
        for target, theirs in zip(receives, self._exchanged([each.copy() for each in sends]), strict=True):
            assert target.shape == theirs[self.rank].shape and target.dtype == theirs[self.rank].dtype
            target[...] = theirs[self.rank]


def run(everyone: list[list[np.ndarray]]) -> tuple[list[list[np.ndarray]], list[Rank], list[int]]:
    """Return all ranks' results of `everyone[rank]`, the ranks, and the bytes that `adasum` returned."""
    desk, barrier = [None] * len(everyone), threading.Barrier(len(everyone))
    ranks = [Rank(number, desk, barrier) for number in range(len(everyone))]
    results = [[each.copy() for each in own] for own in everyone]
    with ThreadPoolExecutor(len(everyone)) as pool:
        returned = list(pool.map(lambda rank, own: adasum(rank, own, "Adasum", "x"), ranks, results))
    return results, ranks, returned


def drawn(ranks: int, lengths: list[int], dtype, seed: int) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    scales = [2.0 ** rng.integers(-4, 4, len(lengths)) for _ in range(ranks)]
    return [[(rng.normal(size=n) * s).astype(dtype) for n, s in zip(lengths, own, strict=True)] for own in scales]


@pytest.mark.parametrize("ranks", range(1, 18))
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("lengths", [[1], [2], [33], [1000, 1, 0, 7], [40_000, 3]])
def test_any_number_of_ranks_vectors_and_lengths(ranks, dtype, lengths):
    everyone = drawn(ranks, lengths, dtype, ranks * 10_000 + sum(lengths))
    found, counted, returned = run(everyone)
    for index in range(len(lengths)):
        expected = adaptive_sum([own[index] for own in everyone])
        limit = {np.float16: 4e-3, np.float32: 1e-6, np.float64: 1e-13}[dtype]
        scale = max(np.abs(own[index]).max(initial=0) for own in everyone)  # vectors may cancel
        np.testing.assert_allclose(found[0][index], expected, rtol=limit, atol=limit * scale)
        assert all(own[index].tobytes() == found[0][index].tobytes() for own in found)
    nbytes = sum(each.nbytes for each in everyone[0])
    paired = 1 << (ranks.bit_length() - 1)
    products = 24 * len(lengths) * (paired.bit_length() - 1)
    assert [each.sent_nbytes + products for each in counted] == returned
    most = 2 * nbytes * (1 - 1 / paired) + nbytes * (ranks > paired) + 4 * dtype().nbytes * len(lengths) * paired
    assert max(each.sent_nbytes for each in counted) <= most


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_a_vectors_result_does_not_depend_on_the_others(ranks):
    everyone = drawn(ranks, [70, 3, 1000], np.float32, ranks)
    together, *_ = run(everyone)
    for index in range(3):
        alone, *_ = run([[own[index]] for own in everyone])
        assert alone[0][0].tobytes() == together[0][index].tobytes()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_of_parallel_vectors_it_is_the_mean_and_of_orthogonal_ones_the_sum(ranks):
    same = np.arange(1.0, 6.0)
    np.testing.assert_allclose(run([[same]] * ranks)[0][0][0], same, rtol=1e-14)
    found, *_ = run([[row] for row in np.eye(ranks)])
    np.testing.assert_array_equal(found[0][0], np.ones(ranks))


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_zeros_add_nothing(ranks, dtype):
    vectors = [[np.zeros(4, dtype)] for _ in range(ranks)]
    assert not run(vectors)[0][0][0].any()
    vectors[ranks // 2] = [np.array([1, -2, 3, 0.5], dtype)]
    np.testing.assert_array_equal(run(vectors)[0][0][0], vectors[ranks // 2][0])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_reaches_every_rank(value):
    found, *_ = run([[np.array([1.0, value if rank == 1 else 2.0])] for rank in range(3)])
    assert all(not np.isfinite(own[0]).all() for own in found)
