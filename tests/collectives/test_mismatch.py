"""Ranks that call different collectives: all raise before data moves, with a message that describes both sides."""

from __future__ import annotations

import time

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.base.errors import MismatchError, name_ranks
from clcomm.comm.stats.events import Call
from tests.helpers import Recorder, one_line


@pytest.fixture
def arrays(auto):
    """An array in shared memory and one elsewhere, both ones."""
    own = auto.allocate(400).view(np.float32)
    own[:] = 1
    return own, np.ones(100, np.float32)


#: Calls of which no two fit together.
CALLS = {
    "sum": lambda comm, array: comm.all_reduce(array, "sum", label="gradients", bucket=3),
    "max": lambda comm, array: comm.all_reduce(array, "max", label="gradients", bucket=3),
    "bucket": lambda comm, array: comm.all_reduce(array, "sum", label="gradients", bucket=4),
    "label": lambda comm, array: comm.all_reduce(array, "sum", label="metrics", bucket=3),
    "length": lambda comm, array: comm.all_reduce(array[:99], "sum", label="gradients", bucket=3),
    "shape": lambda comm, array: comm.all_reduce(array.reshape(4, 25), "sum", label="gradients", bucket=3),
    "dtype": lambda comm, array: comm.all_reduce(array.view(np.int32), "sum", label="gradients", bucket=3),
    "root 0": lambda comm, array: comm.broadcast(array, 0),
    "root 1": lambda comm, array: comm.broadcast(array, 1),
    "all_gather": lambda comm, array: comm.all_gather(array),
    "in place": lambda comm, array: comm.all_gather_in_place(array[: 4 * comm.size]),
    "reduce_scatter": lambda comm, array: comm.reduce_scatter(array[: 4 * comm.size]),
    "gather": lambda comm, array: comm.gather(array),
    "scatter": lambda comm, array: comm.scatter(list(range(comm.size))),
    "barrier": lambda comm, array: comm.barrier(),
    "object": lambda comm, array: comm.broadcast_object("x"),
    "objects": lambda comm, array: comm.all_gather_object("x"),
    "stats": lambda comm, array: comm.merged_stats(),
    "allocate": lambda comm, array: comm.allocate(64),
    "prepare": lambda comm, array: comm.all_reduce_init(array, "sum", label="gradients", bucket=3),
    "finalize": lambda comm, array: comm.finalize(),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("where", [0, 1], ids=["shared", "elsewhere"])
def test_every_rank_raises_before_data_moves(auto, arrays, where) -> None:
    array = arrays[where]
    others = name_ranks([rank for rank in range(auto.size) if rank != 1])
    expected = rf"got {others} in all_reduce 'gradients' #\d+ \(sum of 100 float32, bucket 3.*; rank 1 in "
    for other in CALLS:
        if other == "sum":
            continue
        with pytest.raises(MismatchError, match=expected) as caught:
            CALLS[other if auto.rank == 1 else "sum"](auto, array)
        assert (array == 1).all(), other
        assert len(set(auto.all_gather_object(one_line(caught)))) == 1  # and the Communicator works on
    assert (auto.all_reduce(array) == auto.size).all()


#: Collectives that take arrays of any shape.
OF_SHAPES = {
    "all_reduce": lambda comm, array: comm.all_reduce(array),
    "all_reduce_init": lambda comm, array: comm.all_reduce_init(array),
    "all_reduce_async": lambda comm, array: comm.all_reduce_async(array).wait(),
    "by algorithm": lambda comm, array: comm.all_reduce(array, algorithm="ring"),
    "broadcast": lambda comm, array: comm.broadcast(array),
    "all_gather": lambda comm, array: comm.all_gather(array),
    "all_gather_async": lambda comm, array: comm.all_gather_async(array, out=np.empty(comm.size * 100, "f4")).wait(),
    "reduce_scatter": lambda comm, array: comm.reduce_scatter(array[None].repeat(comm.size, 0)),
    "bucketed_allreduce": lambda comm, array: comm.bucketed_allreduce([array, np.ones(7, np.float32)]),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("where", [0, 1], ids=["shared", "elsewhere"])
def test_arrays_of_one_length_and_two_shapes_do_not_match(auto, arrays, where) -> None:
    """The same memory, last in another shape: what was planned for that is not used for this one."""
    flat = arrays[where]
    for name, call in OF_SHAPES.items():
        flat[:] = 1
        call(auto, flat.reshape(4, 25))
        before = flat.copy()
        with pytest.raises(MismatchError, match=r"4, 25\].*; rank 1 in .*25, 4\]"):
            call(auto, flat.reshape((25, 4) if auto.rank == 1 else (4, 25)))
        assert (flat == before).all(), name
        auto.barrier()


@pytest.mark.mpi(min_size=2)
def test_ranks_in_different_memory_do_not_match(auto, arrays) -> None:
    with pytest.raises(MismatchError, match="100 float32, in other memory"):
        auto.all_reduce(arrays[1 if auto.rank == 1 else 0])


@pytest.mark.mpi(min_size=2)
def test_roots_that_differ_are_reported(auto, arrays) -> None:
    with pytest.raises(MismatchError, match=r"broadcast #1 \(100 float32, root 0.*broadcast #1 \(100 float32, root 1"):
        auto.broadcast(arrays[0], root=int(auto.rank == 1))


@pytest.mark.mpi(min_size=2)
def test_a_call_that_one_rank_left_out_is_found_at_the_next(auto, arrays) -> None:
    auto.all_reduce(arrays[0], bucket=0)
    with pytest.raises(MismatchError, match=r"#2 \(sum of 100 float32, bucket 1\); rank 1 in .* bucket 2\)"):
        auto.all_reduce(arrays[0], bucket=2 if auto.rank == 1 else 1)
    auto.barrier()


@pytest.mark.mpi(min_size=2)
def test_checks_are_off_where_all_ranks_say_so(monkeypatch) -> None:
    recorder = Recorder()
    monkeypatch.setenv("CLCOMM_CHECKS", "off")
    with Communicator(observers=[recorder]) as comm:
        array = comm.allocate(4 * comm.size).view(np.float32)
        array[:] = comm.rank
        comm.all_reduce(array, "sum" if comm.rank else "max", label=f"rank {comm.rank}")
        comm.barrier()
    assert [(event.wait_s, event.last_rank) for event in recorder.events] == [(None, -1)] * 2


@pytest.mark.mpi(min_size=2)
def test_checks_stay_on_where_some_rank_wants_them(monkeypatch, auto) -> None:
    monkeypatch.setenv("CLCOMM_CHECKS", "on" if auto.rank == 0 else "off")
    with Communicator() as comm:
        with pytest.raises(MismatchError):
            comm.broadcast_object(1, root=comm.rank)
        comm.barrier()


@pytest.mark.mpi(min_size=2)
def test_without_shared_memory_ranks_compare_through_mpi() -> None:
    with Communicator(transport="mpi") as comm:
        with pytest.raises(MismatchError, match=r"'rank 0' #1 \(sum of 4 float64, through MPI\); rank 1 in "):
            comm.all_reduce(np.ones(4), label=f"rank {comm.rank}")
        assert comm.all_reduce(np.ones(4)).tolist() == [comm.size] * 4


@pytest.mark.mpi(min_size=2)
def test_the_last_rank_and_the_others_waiting_time(arrays, auto) -> None:
    recorder = Recorder()
    auto.add_observer(recorder)
    own, elsewhere = arrays
    last = auto.size - 1
    for move in (lambda: auto.all_reduce(own), lambda: auto.broadcast(elsewhere), auto.barrier):
        auto.barrier()
        if auto.rank == last:
            deadline = recorder.events[-1].began_s + recorder.events[-1].seconds + 0.15
            while time.perf_counter() < deadline:
                pass
        move()
    events = recorder.events[1::2]
    began = np.array(auto.all_gather_object([event.began_s for event in events]))
    for event, by_rank in zip(events, began.T, strict=True):
        # The one that means to be, unless a busy machine has held up another even longer.
        assert by_rank[event.last_rank] > by_rank.max() - 0.1
        assert event.late_s > 0
        assert 0 <= event.wait_s <= event.seconds
        if auto.rank != event.last_rank:
            assert event.wait_s >= event.late_s * 0.999


# --- words ---


def test_calls_in_words() -> None:
    call = Call("all_reduce", "gradients", "shared", op="sum", count=1000, dtype=np.dtype("float32"), bucket=3)
    assert call.describe(12) == "all_reduce 'gradients' #12 (sum of 1,000 float32, bucket 3)"
    assert Call("barrier", "", "shared").describe(5) == "barrier #5"
    assert Call("finalize", "", "mpi", is_counted=False).describe(5) == "finalize after #5"
    assert Call("broadcast_object", "", "mpi", through_mpi=True, root=2).describe(5) == "broadcast_object #5 (root 2)"
