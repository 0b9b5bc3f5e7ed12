"""Adasum against the published formula, written down another way, for any number of ranks, which are threads here."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from clcomm.sync import hooks as module
from clcomm.sync.hooks import adasum
from tests.sync.adaptive_sum import adaptive_sum


class Rank:
    """What `adasum` needs of a Communicator, for a thread; counts the bytes that it sends to others."""

    def __init__(self, rank: int, desk: list, barrier: threading.Barrier):
        self.rank, self.size, self.sent_nbytes, self.gathered_nbytes = rank, len(desk), 0, 0
        self._desk, self._barrier = desk, barrier

    def _exchanged(self, own):
        self._desk[self.rank] = own
        self._barrier.wait(60)
        found = list(self._desk)
        self._barrier.wait(60)
        return found

    def all_gather(self, array, *, label="", operation=""):
        self.gathered_nbytes += array.nbytes if operation else 0
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


@pytest.fixture(params=["gathered", "halved"])
def way(request, monkeypatch) -> str:
    """How vectors that are as small as those of most tests are combined."""
    if request.param == "halved":
        monkeypatch.setattr(module, "SMALL_BYTES", -1)
    return request.param


def compare(everyone: list[list[np.ndarray]], found: list[list[np.ndarray]]) -> None:
    """Compare with the formula in float64, and the ranks as bits."""
    for index, own in enumerate(everyone[0]):
        expected = adaptive_sum([row[index] for row in everyone])
        limit = {2: 4e-3, 4: 1e-6, 8: 1e-13}[own.itemsize]
        scale = max(np.abs(row[index]).max(initial=0) for row in everyone)  # vectors may cancel
        np.testing.assert_allclose(found[0][index], expected, rtol=limit, atol=limit * scale)
        assert all(row[index].tobytes() == found[0][index].tobytes() for row in found)


@pytest.mark.parametrize("ranks", range(1, 18))
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("lengths", [[1], [2], [33], [1000, 1, 0, 7], [40_000, 3]])
def test_any_number_of_ranks_vectors_and_lengths(monkeypatch, ranks, dtype, lengths):
    monkeypatch.setattr(module, "SMALL_BYTES", -1)
    everyone = drawn(ranks, lengths, dtype, ranks * 10_000 + sum(lengths))
    found, counted, returned = run(everyone)
    compare(everyone, found)
    nbytes = sum(each.nbytes for each in everyone[0])
    paired = 1 << (ranks.bit_length() - 1)
    products = 24 * len(lengths) * (paired.bit_length() - 1)
    assert [each.sent_nbytes + products for each in counted] == returned
    most = 2 * nbytes * (1 - 1 / paired) + nbytes * (ranks > paired) + 4 * dtype().nbytes * len(lengths) * paired
    assert max(each.sent_nbytes for each in counted) <= most


@pytest.mark.parametrize("ranks", range(1, 18))
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("most", [64, 4096])
def test_small_vectors_are_gathered_beside_large_ones(monkeypatch, ranks, dtype, most):
    """In batches, in one message each, where all ranks' are no longer than the limit together."""
    monkeypatch.setattr(module, "SMALL_BYTES", most * np.dtype(dtype).itemsize)
    monkeypatch.setattr(module, "_GATHERED_BYTES", 700)
    lengths = [7, 3000, 1, 0, 40, 64, 65, 500, 1000, most // ranks, most // ranks + 1]
    everyone = drawn(ranks, lengths, dtype, ranks + most)
    found, counted, returned = run(everyone)
    compare(everyone, found)
    small, large = ([n for n in lengths if (n * ranks <= most) == wanted] for wanted in (True, False))
    itemsize = np.dtype(dtype).itemsize
    assert {each.gathered_nbytes for each in counted} == {sum(small) * itemsize}
    products = 24 * len(large) * ((1 << (ranks.bit_length() - 1)).bit_length() - 1)
    assert [each.sent_nbytes + each.gathered_nbytes + products for each in counted] == returned


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_a_vectors_result_does_not_depend_on_the_others(monkeypatch, ranks):
    monkeypatch.setattr(module, "SMALL_BYTES", 4 * 70 * ranks)  # the last one is large
    everyone = drawn(ranks, [70, 3, 1000], np.float32, ranks)
    together, *_ = run(everyone)
    for index in range(3):
        alone, *_ = run([[own[index]] for own in everyone])
        assert alone[0][0].tobytes() == together[0][index].tobytes()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_of_parallel_vectors_it_is_the_mean_and_of_orthogonal_ones_the_sum(way, ranks):
    same = np.arange(1.0, 6.0)
    np.testing.assert_allclose(run([[same]] * ranks)[0][0][0], same, rtol=1e-14)
    found, *_ = run([[row] for row in np.eye(ranks)])
    np.testing.assert_array_equal(found[0][0], np.ones(ranks))


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_zeros_add_nothing(way, ranks, dtype):
    vectors = [[np.zeros(4, dtype)] for _ in range(ranks)]
    assert not run(vectors)[0][0][0].any()
    vectors[ranks // 2] = [np.array([1, -2, 3, 0.5], dtype)]
    np.testing.assert_array_equal(run(vectors)[0][0][0], vectors[ranks // 2][0])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_reaches_every_rank(way, value):
    found, *_ = run([[np.array([1.0, value if rank == 1 else 2.0])] for rank in range(3)])
    assert all(not np.isfinite(own[0]).all() for own in found)
