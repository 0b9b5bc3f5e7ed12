"""All-reduces in the background: any number of them, waited for in any order, on any mix of transports."""

from __future__ import annotations

import random
import time
import weakref
from collections import deque
from functools import partial

import numpy as np
import pytest

from clcomm.comm.transport.mpi_runtime import world
from clcomm.comm.transport.pending import Pending
from tests.transport.conftest import make_bench
from tests.transport.references import LAYOUTS, drawn, same_bits

LENGTHS = (0, 1, 17, 1000, 40_001)


def _start(bench, seed: int, length: int, op: str = "mean"):
    """Start an all-reduce of drawn values; return it with its result's array and the expected values."""
    rows = [drawn(rank, length, "float32", seed) for rank in range(bench.size)]
    source = bench.array(rows[bench.rank])
    out = bench.array(np.zeros(length, np.float32)) if seed % 2 else source
    return bench.transport.start_all_reduce(source, out, op), out, bench.folded(rows, op)


def test_a_started_all_reduce_has_the_bits_of_a_blocking_one(bench):
    for seed, length in enumerate(LENGTHS):
        pending, out, expected = _start(bench, seed, length)
        pending.wait()
        assert pending.finished
        assert all(begin <= end <= pending.finished_s for begin, end in pending.waits)  # all meet before data moves
        assert len(pending.waits) == (bench.size > 1 or bench.transport.name != "solo")
        assert pending.done()
        pending.wait()  # a second wait does nothing
        assert same_bits(out, expected), f"{length} elements"


def test_ranks_may_wait_in_different_orders(bench):
    for round_number in range(5):
        started = [_start(bench, seed, length) for seed, length in enumerate(LENGTHS * 2)]
        order = list(range(len(started)))
        random.Random(100 * round_number + bench.rank).shuffle(order)  # another order on each rank
        for index in order:
            pending, out, expected = started[index]
            pending.wait()
            assert same_bits(out, expected)


def test_done_makes_progress_until_it_is_true(bench):
    pending, out, expected = _start(bench, 1, 40_001)
    deadline = time.monotonic() + 60
    while not pending.done():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert same_bits(out, expected)


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("other", ["shared", *LAYOUTS])
def test_transports_that_share_a_queue_may_be_mixed(other):
    comm, queue = world().Dup(), deque()
    benches = [make_bench("mpi", comm, queue), make_bench(other, comm, queue)]
    for round_number in range(5):
        started = [_start(benches[seed % 3 // 2], seed, length) for seed, length in enumerate(LENGTHS * 2)]
        order = list(range(len(started)))
        random.Random(100 * round_number + comm.Get_rank()).shuffle(order)
        for index in order:
            pending, out, expected = started[index]
            pending.wait()
            assert same_bits(out, expected)
    assert not queue
    for bench in benches:
        bench.close()
    comm.Free()


class _Failing:
    def Wait(self):
        raise RuntimeError("the network is gone")

    Test = Wait


def test_a_failure_belongs_to_its_own_handle():
    queue: deque[Pending] = deque()
    first = Pending(queue, _Failing(), lambda: None)
    second = Pending(queue, None, lambda: None)
    second.wait()  # it is behind the failed one, but does not fail itself
    assert not queue
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the network is gone"):
            first.wait()


class _Open:
    complete = False

    def Test(self):
        return self.complete


def test_what_a_phase_refers_to_stays_until_its_request_is_complete():
    array, request = np.zeros(4), _Open()
    alive = weakref.ref(array)
    pending = Pending(deque(), None, partial(lambda array, request: request, array, request))
    del array
    assert not pending.done() and alive() is not None  # MPI may read it now
    request.complete = True
    assert pending.done() and alive() is None
