"""Events of collectives, as the stats and other observers receive them."""

from __future__ import annotations

import time

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.base.errors import ArgumentError
from clcomm.comm.stats.comm_stats import Phase
from tests.helpers import Recorder


def test_every_operation_is_counted_with_nccl_tests_sizes(comm):
    array = np.zeros((comm.size, 10), np.float32)
    row, n = array.nbytes, comm.size
    comm.barrier()
    comm.all_reduce(array)
    comm.all_reduce_async(array).wait()
    comm.broadcast(array)
    comm.all_gather(array)
    comm.reduce_scatter(array)
    comm.gather(array)
    comm.scatter(array)
    comm.broadcast_object(1)
    expected = {
        "barrier": (1, 0), "all_reduce": (2, 2 * row), "broadcast": (1, row), "all_gather": (1, n * row),
        "reduce_scatter": (1, row), "gather": (1, n * row), "scatter": (1, row), "broadcast_object": (1, 0),
    }  # fmt: skip
    for operation, (calls, nbytes) in expected.items():
        total = comm.stats.total(operation)
        assert (total["calls"], total["bytes"], total["failures"]) == (calls, nbytes, 0), operation
        assert total["seconds"] > 0


def test_labels_and_own_sizes_are_what_is_counted(comm):
    array = np.zeros(128, np.float32)
    comm.all_reduce(array, label="gradients", nbytes=100)
    comm.all_reduce_async(array, label="gradients", nbytes=50).wait()
    comm.broadcast(array, label="parameters", nbytes=7)
    comm.all_reduce(array)
    assert comm.stats.total("all_reduce", "gradients")["bytes"] == 150
    assert comm.stats.total("all_reduce", "")["bytes"] == 512
    assert comm.stats.total("broadcast", "parameters")["bytes"] == 7


def test_observers_see_every_collective_in_order():
    recorder = Recorder()
    with Communicator(transport="solo", observers=[recorder]) as comm:
        comm.barrier()
        handle = comm.all_reduce_async(np.zeros(4), label="a")
        comm.broadcast(np.zeros(2))
        handle.wait()
        handle.wait()
    kinds = [(e.operation, e.label, e.nbytes, e.transport, e.sequence, e.failed) for e in recorder.events]
    assert kinds == [
        ("barrier", "", 0, "solo", 1, False),
        ("all_reduce", "a", 32, "solo", 2, False),
        ("broadcast", "", 16, "solo", 3, False),
    ]


@pytest.mark.mpi(min_size=2)
def test_the_transport_is_shared_for_allocated_memory_alone():
    recorder = Recorder()
    with Communicator(observers=[recorder]) as comm:
        own, other = comm.allocate(64), np.zeros(64, np.uint8)
        comm.all_reduce(own)
        comm.all_reduce(other)
        comm.all_reduce(own, out=other)
        comm.all_reduce(other, out=own)
        comm.all_reduce(own[:0])
        comm.all_reduce_async(own[3:50]).wait()
        comm.broadcast(own)
        comm.all_gather(own)
        comm.reduce_scatter(own[: 4 * comm.size])
    assert [e.transport for e in recorder.events] == ["shared", *["staged"] * 4, *["shared"] * 4]


def test_failed_collectives_are_counted(comm, monkeypatch):
    def broken(*args):
        raise RuntimeError("the network is gone")

    monkeypatch.setattr(comm.world.blocking_for(np.zeros(5)), "all_reduce", broken)
    with pytest.raises(RuntimeError, match="the network is gone"):
        comm.all_reduce(np.zeros(5))
    total = comm.stats.total("all_reduce")
    assert (total["calls"], total["bytes"], total["failures"]) == (0, 0, 1)
    with pytest.raises(ArgumentError):
        comm.all_reduce(np.zeros(5), "avg")
    assert comm.stats.total("all_reduce")["failures"] == 1, "what was refused never began"


@pytest.mark.mpi(min_size=1)
def test_merged_stats_are_those_of_a_rank(auto):
    for _ in range(3):
        auto.all_reduce(np.zeros(25, np.float32))
    merged = auto.merged_stats()
    total = merged.total("all_reduce")
    assert (merged.ranks, total["calls"], total["bytes"]) == (auto.size, 3, 300)
    assert auto.all_gather_object(merged.as_dict()) == [merged.as_dict()] * auto.size


def test_buckets_and_times_reach_the_observers():
    recorder = Recorder()
    with Communicator(transport="solo", observers=[recorder]) as comm:
        begin = time.perf_counter()
        comm.all_reduce(np.zeros(4), bucket=3)
        comm.all_reduce_init(np.zeros(4), bucket=4)()
        comm.all_reduce_async(np.zeros(4), bucket=5).wait()
        comm.run_as_all_reduce(comm.barrier, nbytes=8, bucket=6)
        comm.barrier()
        end = time.perf_counter()
    assert [event.bucket for event in recorder.events] == [3, 4, 5, 6, -1]
    began = [event.began_s for event in recorder.events]
    assert begin <= began[0] and began == sorted(began) and began[-1] <= end


def test_phases_reach_the_observers_that_want_them():
    class WithPhases(Recorder):
        def phase_finished(self, phase):
            self.events.append(phase)

    without, given, added = Recorder(), WithPhases(), WithPhases()
    phase = Phase("pack", time.perf_counter(), 0.25, bucket=2)
    with Communicator(transport="solo", observers=[without, given]) as comm:
        comm.add_observer(added)
        comm.notify_phase(phase)
        comm.remove_observer(given)
        comm.remove_observer(without)
        comm.notify_phase(phase)
        comm.barrier()
    assert without.events == [] and given.events == [phase]
    assert added.events[:2] == [phase, phase] and added.events[2].operation == "barrier"
