"""The rendezvous: no rank leaves before all have arrived, and all writes are visible."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from clcomm.comm.transport.rendezvous import UNKNOWN, DifferentOperations, HostRendezvous, last_of

RANKS = 3


def on_threads(body, ranks: int = RANKS) -> list:
    """Run `body(point, rank)` on as many threads as ranks, over one memory, and return results or exceptions."""
    memory = np.zeros(HostRendezvous.nbytes(ranks), np.uint8)
    results: list = [None] * ranks

    def run(rank: int) -> None:
        point = HostRendezvous(memory, rank, ranks, fence=lambda: None, progress=lambda: None)
        try:
            results[rank] = body(point, rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a rank still waits"
    return results


def test_nobody_leaves_before_all_have_come() -> None:
    board = np.zeros(RANKS, np.int64)

    def body(point: HostRendezvous, rank: int) -> bool:
        seen = True
        for turn in range(1, 300):
            board[rank] = turn
            point.barrier()
            seen &= bool((board >= turn).all())
        return seen

    assert on_threads(body) == [True] * RANKS


@pytest.mark.parametrize("count", [1, 8, 14])
def test_words_of_every_rank_in_every_turn(count: int) -> None:
    def body(point: HostRendezvous, rank: int) -> bool:
        right = True
        for turn in range(300):
            everyone = point.exchange([1000 * turn + 10 * rank + i for i in range(count)])
            expected = [[1000 * turn + 10 * r + i for i in range(count)] for r in range(RANKS)]
            right &= everyone.tolist() == expected
        return right

    assert on_threads(body) == [True] * RANKS


def test_ranks_that_come_for_different_things_all_learn_of_it() -> None:
    def body(point: HostRendezvous, rank: int) -> list[bool]:
        refused = []
        for tag, kind in ((7 if rank == 1 else 4, 0), (4, 40 + rank // 2), (4, 40)):
            point.announce(tag)
            try:
                point.barrier(kind)
                refused.append(False)
            except DifferentOperations:
                refused.append(True)
        return refused

    assert on_threads(body) == [[True, True, False]] * RANKS


@pytest.mark.parametrize("seed", range(50))
def test_the_last_rank_and_how_late_it_was(seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrivals = [int(each) for each in rng.integers(0, 1_000 if seed % 2 else 5, rng.integers(2, 9))]
    last, late_s = last_of(arrivals)
    assert all(each <= arrivals[last] for each in arrivals)
    assert late_s == pytest.approx(min(arrivals[last] - each for i, each in enumerate(arrivals) if i != last) * 1e-9)


def test_the_last_rank_and_the_others_waiting_time() -> None:
    def body(point: HostRendezvous, rank: int) -> tuple[tuple[int, float], int]:
        point.announce(1)
        assert point.last == UNKNOWN
        time.sleep(0.05 if rank == 2 else 0.0)
        point.barrier()
        first = point.last
        point.barrier()
        assert point.last is first, "the first rendezvous after the announcement counts"
        return first, point.waited_ns

    last, waited_ns = zip(*on_threads(body), strict=True)
    assert last[0] == last[1] == last[2]
    rank, late_s = last[0]
    assert rank == 2
    assert 0 < late_s * 1e9 <= min(waited_ns[:2]) + 1


def test_parity_alternates_with_the_rendezvous() -> None:
    point = HostRendezvous(
        np.zeros(HostRendezvous.nbytes(1), np.uint8), 0, 1, fence=lambda: None, progress=lambda: None
    )
    seen = []
    for _ in range(4):
        seen.append(point.parity)
        point.barrier()
    assert seen in ([0, 1, 0, 1], [1, 0, 1, 0])
