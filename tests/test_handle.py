"""All-reduces that go on while their caller does something else."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from clcomm.errors import ArgumentError, MismatchError
from tests.helpers import Recorder, one_line


def test_started_all_reduces(comm):
    arrays = [comm.allocate(4 * n).view(np.float32) for n in (1, 100, 20_000)]
    arrays += [np.zeros((7, n), np.float32) for n in (1, 100, 5000)]
    for array in arrays:
        array[...] = comm.rank
    handles = [comm.all_reduce_async(array, "sum") for array in arrays]
    order = np.random.default_rng(comm.rank).permutation(len(handles))
    for index in order:
        assert handles[index].wait() is arrays[index]
        assert (arrays[index] == comm.size * (comm.size - 1) / 2).all()
        assert handles[index].done()


def test_ranks_may_wait_before_and_after_a_blocking_call(comm):
    """The second phase of a started all-reduce needs all ranks: one that blocks first must not hold it up."""
    for array in (np.ones(50_000, np.float32), comm.allocate(4 * 50_000).view(np.float32)):
        for blocking in (comm.barrier, lambda: comm.all_gather_object(None), lambda: comm.allocate(8)):
            array[:] = 1
            handle = comm.all_reduce_async(array)
            if comm.rank % 2:
                handle.wait()
            blocking()
            assert (handle.wait() == comm.size).all()


def test_a_started_all_reduce_needs_contiguous_arrays(comm):
    strided = np.zeros((4, 4))[:, ::2]
    for kwargs, name in (({}, "array"), ({"out": strided}, "out")):
        with pytest.raises(ArgumentError) as caught:
            comm.all_reduce_async(strided if name == "array" else np.zeros((4, 2)), **kwargs)
        assert one_line(caught) == f"{name}: expected a C-contiguous array for a non-blocking all-reduce"


def test_prepared_all_reduces_are_started_again_and_again(comm):
    sources = [comm.allocate(4 * n).view(np.float32) for n in (1, 5000, 20_000)]
    targets = [comm.allocate_common(source.nbytes).view(np.float32) for source in sources]
    pairs = [*zip(sources, targets, strict=True), (np.zeros(3000), np.zeros(3000))]
    starts = [comm.all_reduce_async_init(source, "mean", out=target) for source, target in pairs]
    for step in range(5):
        for source, _ in pairs:
            source[:] = comm.rank + step
        handles = [start() for start in starts]
        for index in np.random.default_rng(comm.rank + step).permutation(len(handles)):
            while step % 2 and not handles[index].done():
                pass
            assert handles[index].wait() is pairs[index][1]
            assert (pairs[index][1] == (comm.size - 1) / 2 + step).all()
        comm.barrier()  # common memory: the next step's results must not come before all have looked
    total = comm.stats.total("all_reduce")
    assert (total["calls"], total["bytes"]) == (5 * len(pairs), 5 * sum(source.nbytes for source, _ in pairs))
    assert 0 <= total["exposed_s"] <= total["seconds"]


def test_what_is_spent_while_a_device_computes_is_hidden(comm):
    array = comm.allocate(4000).view(np.float32)
    start = comm.all_reduce_async_init(array)
    start(lambda: True).wait()
    total = comm.stats.total("all_reduce")
    assert total["hidden_s"] == total["seconds"] > 0
    start(lambda: False).wait()
    both = comm.stats.total("all_reduce")
    assert both["hidden_s"] - total["hidden_s"] < both["seconds"] - total["seconds"]


@pytest.mark.mpi(min_size=2)
def test_a_started_all_reduce_that_fails_is_counted_once(auto):
    memory = auto.allocate(64)
    handle = auto.all_reduce_async(memory[: 32 if auto.rank == 0 else 48])
    for _ in range(2):
        with pytest.raises(MismatchError):
            handle.wait()
    assert auto.stats.total("all_reduce")["failures"] == 1
    auto.barrier()


def test_those_in_flight_together_take_turns_in_the_stats(comm):
    watcher = Recorder()
    comm.add_observer(watcher)
    arrays = [comm.allocate(40_000).view(np.float32) for _ in range(4)]
    begin = time.perf_counter()
    handles = [comm.all_reduce_async(array, bucket=number) for number, array in enumerate(arrays)]
    time.sleep(0.01)
    for handle in handles:
        handle.wait()
    whole_s = time.perf_counter() - begin
    events = watcher.events
    assert [event.bucket for event in events] == [0, 1, 2, 3]
    for before, after in itertools.pairwise(events):
        assert after.began_s == pytest.approx(before.began_s + before.seconds, abs=1e-9)
        assert begin <= after.began_s - after.queued_s <= after.began_s
    assert sum(event.seconds for event in events) <= whole_s
    for event in events:
        assert event.exposed_s == pytest.approx(sum(end - begin for begin, end in event.exposed), abs=1e-9)
        for begin, end in event.exposed:
            assert event.began_s <= begin <= end <= event.began_s + event.seconds + 1e-9
    assert sum(event.exposed_s for event in events) <= whole_s - 0.01  # of the sleep nothing


def test_what_a_rank_spends_on_another_is_exposed_of_the_one_whose_turn_it_is(comm):
    watcher = Recorder()
    arrays = [comm.allocate(4000).view(np.float32) for _ in range(2)]
    comm.add_observer(watcher)
    first, second = [comm.all_reduce_async(array, bucket=number) for number, array in enumerate(arrays)]
    came_s = time.perf_counter()
    while not second.done():
        pass
    went_s = time.perf_counter()
    comm.barrier()  # completes what is pending
    first.wait()
    by_bucket = {event.bucket: event for event in watcher.events if event.bucket >= 0}
    assert sum(end - begin for begin, end in by_bucket[1].exposed if end > came_s) <= went_s - came_s
    for event in by_bucket.values():
        ends = [end for _, end in event.exposed]
        assert ends == sorted(ends) and max(ends) == pytest.approx(event.began_s + event.seconds, abs=1e-9)
