"""What every collective goes through: observers, sequence numbers, the collective a rank is in, and refusals."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError, MismatchError
from clcomm.comm.collectives import all_reduce, runner
from clcomm.comm.stats.events import Phase
from tests.helpers import Recorder, one_line


class PhaseRecorder(Recorder):
    """An observer that is notified of phases too."""

    def phase_finished(self, phase: Phase) -> None:
        self.events.append(phase)


def test_observers_come_and_go(comm):
    first, second, never = Recorder(), PhaseRecorder(), Recorder()
    comm.add_observer(first)
    comm.barrier()
    comm.add_observer(second)
    with comm.phase("step"):
        comm.barrier()
    comm.remove_observer(never)  # was never added
    comm.remove_observer(first)
    comm.remove_observer(first)
    comm.barrier()
    names = [[getattr(event, "operation", "phase") for event in observer.events] for observer in (first, second)]
    assert names == [["barrier"] * 2, ["barrier", "phase", "barrier"]] and not never.events
    assert comm.stats.total("barrier")["calls"] >= 3


def test_a_phase_is_reported_with_its_figures_when_its_block_raises(comm):
    watcher = PhaseRecorder()
    comm.add_observer(watcher)
    with pytest.raises(ZeroDivisionError), comm.phase("work", "label", 3, step=7):
        comm.barrier()
        _ = 1 / 0
    collective, phase = watcher.events
    assert (phase.name, phase.label, phase.bucket, phase.figures) == ("work", "label", 3, (("step", 7),))
    assert phase.began_s <= collective.began_s and phase.seconds >= phase.communication_s >= collective.seconds


@pytest.mark.mpi(min_size=2)
def test_current_is_the_collective_that_moves_data(several, monkeypatch):
    seen, gather = [], several.world.allgather

    def watched(own):
        seen.append(several.current)
        return gather(own)

    monkeypatch.setattr(several.world, "allgather", watched)
    assert several.current is None
    assert several.all_gather_object("one", label="watched") == ["one"] * several.size
    ((call, sequence, began_s),) = seen
    assert call.describe(sequence).startswith("all_gather_object 'watched' #") and began_s > 0
    assert several.current is None


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("odd", [0, 1])
def test_after_a_mismatch_ranks_count_and_communicate_alike(several, odd):
    """A rank with fewer counted calls continues with the others' number."""
    watcher = Recorder()
    several.add_observer(watcher)
    for _ in range(3):
        several.barrier()
        with pytest.raises(MismatchError) as caught:
            several.barrier() if several.rank == odd else several.all_gather_object(several.rank)
        assert "expected the same one" in one_line(caught) and several.current is None
    several.barrier()
    numbers = [event.sequence for event in watcher.events]
    assert several.all_gather_object(numbers) == [numbers] * several.size
    assert [event.failed for event in watcher.events[:-1]] == [False, True] * 3 + [False]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("meets", ["barrier", "all_reduce", "all_gather_object", "refuse"])
def test_one_ranks_refusal_is_every_ranks_error(several, meets):
    array = np.ones(10)
    calls = {
        "barrier": several.barrier, "all_reduce": lambda: several.all_reduce(array),
        "all_gather_object": lambda: several.all_gather_object(1), "refuse": lambda: several.runner.refuse("mine too"),
    }  # fmt: skip
    for rank in range(several.size):
        with pytest.raises(ArgumentError) as caught:
            several.runner.refuse(f"reason of {rank}") if several.rank == rank else calls[meets]()
        message = one_line(caught)
        if meets == "refuse":
            assert "reason of" in message or "mine too" in message
        else:
            assert message == f"reason of {rank} (on rank {rank})"
        assert (several.all_reduce(np.ones(3)) == several.size).all()


def test_different_calls_take_bounded_memory(comm, monkeypatch):
    """Both caches, of calls and of planned all-reduces, are emptied when full, and results stay right."""
    monkeypatch.setattr(runner, "KEPT_CALLS", 8)
    monkeypatch.setattr(all_reduce, "KEPT_CALLS", 8)
    array = np.zeros(5)
    for number in range(60):
        array[:] = comm.rank + number
        comm.all_reduce(array, label=f"label {number % 20}")
        assert (array == comm.size * (comm.size - 1) / 2 + comm.size * number).all()
        assert len(comm.runner.calls) <= 8 and len(comm.plans.of) <= 8
    assert comm.stats.total("all_reduce", "label 3")["calls"] == 3


def test_a_started_all_reduce_is_complete_before_a_blocking_call_runs(comm):
    watcher = Recorder()
    comm.add_observer(watcher)
    handles = [comm.all_reduce_async(np.full(100, comm.rank), label=str(number)) for number in range(3)]
    comm.barrier()
    assert [event.label for event in watcher.events] == ["0", "1", "2", ""]
    for handle in handles:
        assert handle.done() and (handle.wait() == comm.size * (comm.size - 1) // 2).all()
    assert len(watcher.events) == 4
