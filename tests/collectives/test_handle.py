"""All-reduces in the background."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError, MismatchError
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
        turn = before.began_s + before.seconds  # a rank that is alone is done before it begins the next
        assert after.began_s == pytest.approx(max(turn, after.began_s - after.queued_s), abs=1e-9)
        assert begin <= after.began_s - after.queued_s <= after.began_s
    assert sum(event.seconds for event in events) <= whole_s
    for event in events:
        assert event.exposed_s == pytest.approx(sum(end - begin for begin, end in event.exposed), abs=1e-9)
        for begin, end in event.exposed:
            assert event.began_s <= begin <= end <= event.began_s + event.seconds + 1e-9
    assert sum(event.exposed_s for event in events) <= whole_s - 0.01  # of the sleep nothing


def test_time_in_any_handles_call_is_exposed_time_of_the_one_in_turn(comm):
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


def begun_last_by(comm, last: int, start):
    """Begin all-reduces: rank `last` does after it heard from all others that they have; return each rank's handle."""
    handle = None if comm.rank == last else start()
    others = comm.comm.Dup() if comm.comm is not None else None
    if others is not None:  # not by the Communicator, whose blocking calls complete what has begun
        others.gather(None, last)
        others.Free()
    return start() if handle is None else handle


def test_waiting_in_the_background_is_reported_where_it_is_measured(comm):
    array, watcher = comm.allocate(40_000).view(np.float32), Recorder()
    start = comm.all_reduce_async_init(array, label="prepared")
    comm.add_observer(watcher)
    for last in range(comm.size):
        begun_last_by(comm, last, start).wait()
        begun_last_by(comm, last, lambda: comm.all_reduce_async(array, label="begun")).wait()
    for number, event in enumerate(watcher.events):
        assert event.wait_s == pytest.approx(sum(end - begin for begin, end in event.waits), abs=1e-9)
        assert event.wait_s <= event.exposed_s + 1e-9
        assert all(any(b <= begin and end <= e for b, e in event.exposed) for begin, end in event.waits)
        if comm.size > 1:
            assert event.wait_s > 0
            knows = event.label == "prepared" and comm.transport != "mpi"
            assert event.last_rank == (number // 2 if knows else -1) and event.late_s >= 0
    for label in ("prepared", "begun"):
        total = comm.stats.total("all_reduce", label)
        parts = [total[name] for name in ("wait_s", "transfer_s", "wait_unknown_s")]
        assert sum(parts) == pytest.approx(total["exposed_s"], abs=1e-9)
        assert (parts[0] > 0) == (comm.size > 1) and parts[2] == 0


def test_a_complete_all_reduce_is_reported_by_the_next_call(comm):
    watcher = Recorder()
    comm.add_observer(watcher)
    first, second = [comm.all_reduce_async(np.ones(100), bucket=bucket) for bucket in range(2)]
    second.wait()  # completes the first as well
    seen_s = time.perf_counter()
    assert [event.bucket for event in watcher.events] == [0, 1]
    assert all(event.began_s + event.seconds <= seen_s for event in watcher.events)
    first.wait()
    assert len(watcher.events) == 2


class Phases(Recorder):
    def __init__(self):
        super().__init__()
        self.phases = {}

    def phase_finished(self, phase):
        self.phases[phase.name] = phase


def test_a_phase_knows_what_of_it_was_communication(comm):
    watcher = Phases()
    comm.add_observer(watcher)
    array = np.ones(1000)
    with comm.phase("nothing"):
        pass
    with comm.phase("blocking"):
        comm.all_reduce(array)
        comm.run_as_all_reduce(lambda: comm.all_reduce(array), nbytes=array.nbytes)
    with comm.phase("beginning"):
        handle = comm.all_reduce_async(array)
    with comm.phase("waiting"):
        handle.wait()
    found = {name: phase.communication_s for name, phase in watcher.phases.items()}
    one, several, background = watcher.events
    assert found["nothing"] == 0
    assert found["blocking"] == pytest.approx(one.seconds + several.seconds, abs=1e-9)  # the parts count once
    assert found["beginning"] > 0
    assert background.exposed_s <= found["beginning"] + found["waiting"] + 1e-9
    assert all(phase.communication_s <= phase.seconds for phase in watcher.phases.values())
