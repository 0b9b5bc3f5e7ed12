"""The Communicator: results by rank formula, memory, fallbacks and its end."""

from __future__ import annotations

import gc
import logging
import os

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.base.errors import ArgumentError
from clcomm.comm.transport import host_memory as memory_module
from clcomm.comm.transport import mpi_communicators
from clcomm.comm.transport.mpi_runtime import world
from tests.helpers import Recorder, one_line


def test_alone_without_mpiexec():
    with Communicator() as comm:
        assert (comm.rank, comm.size, comm.world_size, comm.local_rank, comm.local_size) == (0, 1, 1, 0, 1)
        assert comm.cores == len(os.sched_getaffinity(0))
        assert comm.all_reduce(np.full(3, 7.0), "mean").tolist() == [7.0] * 3


@pytest.mark.mpi(min_size=1)
def test_rank_and_world_are_mpis(auto):
    mpi = world()
    assert (auto.rank, auto.size, auto.world_size) == (mpi.Get_rank(), mpi.Get_size(), mpi.Get_size())
    assert auto.comm != mpi, "traffic runs on a private duplicate"
    assert (auto.local_rank, auto.local_size) == (auto.rank, auto.size)


@pytest.mark.mpi(min_size=1)
def test_ranks_share_the_cores_out(auto):
    cores = len(os.sched_getaffinity(0))
    assert auto.cores == max(1, cores // auto.size)


@pytest.mark.mpi(min_size=2)
def test_a_given_communicator_is_used_and_left_alone():
    parent = world().Split(color=world().Get_rank() % 2, key=-world().Get_rank())
    with Communicator(parent) as comm:
        assert (comm.rank, comm.size) == (parent.Get_rank(), parent.Get_size())
        array = np.full(5, float(world().Get_rank()))
        comm.all_reduce(array, "sum")
        assert (array == sum(r for r in range(world().Get_size()) if r % 2 == world().Get_rank() % 2)).all()
    assert parent.allreduce(1) == parent.Get_size()
    parent.Free()


@pytest.mark.mpi(min_size=1)
def test_a_communicator_of_one_among_many():
    from mpi4py import MPI

    with Communicator(MPI.COMM_SELF) as comm:
        assert (comm.rank, comm.size) == (0, 1)
        assert comm.all_reduce(np.array([world().Get_rank()])).tolist() == [world().Get_rank()]
        assert comm.allocate(16).shape == (16,)


@pytest.mark.parametrize(("given", "nbytes"), [("4MiB", 4 << 20), (1, 1), ("256KiB", 256 << 10), (1 << 20, 1 << 20)])
def test_bucket_size_in_bytes_or_text(given, nbytes):
    assert Communicator(transport="solo", bucket_size=given).bucket_size == nbytes


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max"])
def test_all_reduce_over_the_ranks(comm, op):
    expected = {"sum": comm.size * (comm.size - 1) / 2, "mean": (comm.size - 1) / 2, "min": 0, "max": comm.size - 1}[op]
    for shape in ((), (1,), (3, 4), (2, 0, 3), (50, 41, 7)):
        array = np.full(shape, comm.rank, np.float32)
        result = comm.all_reduce(array, op)
        assert result is array
        assert (result == expected).all()
        source = np.full(shape, comm.rank, np.float32)
        out = np.empty_like(source)
        assert comm.all_reduce(source, op, out=out) is out
        assert (out == expected).all()
        assert (source == comm.rank).all()


def test_arrays_need_not_be_contiguous(comm):
    base = np.zeros((6, 8), np.float64)
    for view in (base.T, base[::2, 1::3], np.asfortranarray(base), base[::-1]):
        view[...] = np.arange(view.size).reshape(view.shape) * (comm.rank + 1)
        before = view.copy()
        factor = sum(range(1, comm.size + 1)) / (comm.rank + 1)
        out = np.zeros(view.shape[::-1]).T
        comm.all_reduce(view, out=out)
        assert np.allclose(out, before * factor)
        assert np.array_equal(view, before)
        assert comm.all_reduce(view) is view
        assert np.allclose(view, before * factor)
        view[...] = comm.rank
        comm.broadcast(view, comm.size - 1)
        assert (view == comm.size - 1).all()
        view[...] = comm.rank
        assert (comm.all_gather(view) == np.arange(comm.size)[:, None, None]).all()


def test_slices_of_allocated_memory(comm):
    memory = comm.allocate(4096).view(np.float32)
    common = comm.allocate_common(4096).view(np.float32)
    memory[:] = comm.rank
    assert not common.any()
    comm.all_reduce(memory[100:300], "mean", out=common[100:300])
    assert (common[100:300] == (comm.size - 1) / 2).all()
    comm.barrier()
    assert not common[:100].any()
    assert not common[300:].any()
    comm.all_reduce(memory[7 + comm.rank : 20 + comm.rank], "max")  # at another place on every rank
    assert (memory[7 + comm.rank : 20 + comm.rank] == comm.size - 1).all()


def test_common_memory_takes_results_of_ordinary_arrays(comm):
    """Several ranks then write the same memory at once: they may only ever write what is final."""
    out = comm.allocate_common(4 * 100_000).view(np.float32)
    for size in (10, 3000, 100_000):
        for _ in range(20):
            comm.all_reduce(np.full(size, comm.rank, np.float32), "mean", out=out[:size])
            assert (out[:size] == (comm.size - 1) / 2).all()
            comm.barrier()


def test_broadcast_from_each_root(comm):
    for root in range(comm.size):
        for array in (np.full((3, 5), comm.rank, np.int16), np.array(float(comm.rank))):
            assert comm.broadcast(array, root) is array
            assert (array == root).all()


def test_all_gather_stacks(comm):
    gathered = comm.all_gather(np.full((2, 3), comm.rank, np.int32))
    assert gathered.shape == (comm.size, 2, 3)
    assert (gathered == np.arange(comm.size)[:, None, None]).all()
    assert comm.all_gather(np.array(comm.rank)).tolist() == list(range(comm.size))


def test_reduce_scatter_blocks(comm):
    array = np.arange(comm.size * 3 * 2, dtype=np.float64).reshape(comm.size * 3, 2) * (comm.rank + 1)
    block = comm.reduce_scatter(array)
    factor = comm.size * (comm.size + 1) / 2
    assert np.array_equal(block, (array / (comm.rank + 1) * factor)[comm.rank * 3 :][:3])


def test_gather_of_different_kinds(comm):
    gathered = comm.gather(np.zeros(comm.rank), 0)  # of another length on every rank
    if comm.rank == 0:
        assert [len(a) for a in gathered] == list(range(comm.size))
    for data in ({"rank": comm.rank}, np.array([comm.rank, None], object), [comm.rank]):
        gathered = comm.gather(data, comm.size - 1)
        if comm.rank == comm.size - 1:
            assert str(gathered[0]) == str(data).replace(str(comm.rank), "0")
    mixed = comm.gather(np.array([None], object) if comm.rank == 0 else "text", 0)
    if comm.rank == 0:
        assert mixed[1:] == ["text"] * (comm.size - 1)


@pytest.mark.mpi(min_size=2)
def test_too_little_shared_memory_falls_back_with_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(memory_module, "_free_shared_memory", lambda: 2 << 20)
    recorder = Recorder()
    with caplog.at_level(logging.WARNING, "clcomm"), Communicator(observers=[recorder]) as comm:
        large = comm.allocate(4 << 20).view(np.float32)
        common = comm.allocate_common(4 << 20).view(np.float32)
        small = comm.allocate(1024).view(np.float32)
        large[:], small[:] = comm.rank, comm.rank
        assert (comm.all_reduce(large, "mean", out=common) == (comm.size - 1) / 2).all()
        assert (comm.all_reduce(small, "mean") == (comm.size - 1) / 2).all()
    assert [event.transport for event in recorder.events] == ["staged", "shared"]
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == ([] if comm.rank else [
        f"/dev/shm has no room for 4 MiB a rank on {comm.size} ranks: reducing with more copies instead; enlarge it "
        "(docker run --shm-size=1g) for faster synchronisation"
    ])  # fmt: skip


@pytest.mark.mpi(min_size=2)
def test_an_mpi_without_shared_memory_warns_once_and_reduces_itself(monkeypatch, caplog):
    from mpi4py import MPI

    def refused(comm, nbytes):
        raise MPI.Exception(MPI.ERR_INTERN)

    monkeypatch.setattr(mpi_communicators, "shared_window", refused)
    recorder = Recorder()
    with caplog.at_level(logging.WARNING, "clcomm"), Communicator(observers=[recorder]) as comm:
        array = comm.allocate(1 << 16).view(np.float32)
        array[:] = comm.rank
        assert (comm.all_reduce(array, "mean") == (comm.size - 1) / 2).all()
    assert [event.transport for event in recorder.events] == ["mpi"]
    assert caplog.text.count("MPI offers its ranks no shared memory") == (comm.rank == 0)


def test_memory_without_a_window_suits_opencl_too(comm):
    for memory in (comm.allocate(1000), comm.allocate_common(70_000)):
        assert memory.__array_interface__["data"][0] % 4096 == 0
        assert memory.dtype == np.uint8
        assert not memory.any()


def test_after_finalize_every_call_is_refused(comm):
    comm.all_reduce(np.zeros(3))
    handle = comm.all_reduce_async(np.ones(70_000))
    comm.finalize()
    assert (handle.wait() == comm.size).all(), "what was started was completed"
    comm.finalize()
    for call in (
        comm.barrier,
        lambda: comm.all_reduce(np.zeros(3)),
        lambda: comm.all_reduce_async(np.zeros(3)),
        lambda: comm.broadcast_object(1),
        lambda: comm.scatter([1] * comm.size),
        lambda: comm.allocate(8),
        comm.merged_stats,
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert one_line(caught) == ("Communicator: expected an open one, but finalize() was called; make a new one")
    assert comm.stats.total("all_reduce")["calls"] == 2


def test_communicators_come_and_go(comm):
    for _ in range(3):
        with Communicator(transport="solo" if comm.comm is None else "auto") as other:
            memory = other.allocate(1 << 16)
            memory[:] = other.rank
            assert (other.all_reduce(memory, "max") == other.size - 1).all()
            assert (comm.all_reduce(np.ones(9)) == comm.size).all()


@pytest.mark.mpi(min_size=2)
def test_arrays_may_be_used_after_finalize():
    comm = Communicator()
    array = comm.allocate(1 << 20)
    comm.finalize()
    array[:] = 7
    assert int(array.astype(np.int64).sum()) == 7 << 20


@pytest.mark.mpi(min_size=2)
def test_windows_of_dropped_arrays_are_freed(auto):
    regions = []  # some may be windows of earlier tests' models, which devices keep until they are used again
    for _ in range(5):
        auto.allocate(1 << 20)
        regions.append(len(auto.world.shared.memory.regions))
    assert regions[-1] <= regions[0]


def mapped_windows() -> int:
    with open("/proc/self/maps") as maps:
        return sum("/dev/shm/" in line for line in maps)


@pytest.mark.mpi(min_size=2)
def test_windows_that_outlive_their_communicator_are_freed_by_the_next_ones():
    mapped, array = [], None
    for _ in range(5):
        with Communicator() as comm:
            array = comm.allocate(1 << 20)
            array[:] = comm.rank
        assert (array == comm.rank).all()
        mapped.append(mapped_windows())
    assert mapped[-1] <= mapped[1]


class Holder:
    """Refers to itself, so that only Python's garbage collector frees what it holds."""

    def __init__(self, comm: Communicator, nbytes: int):
        self.memory, self.itself = comm.allocate(nbytes), self


def held_bytes(comm: Communicator) -> int:
    """Return the bytes of all windows, those of earlier tests' models that something still keeps among them."""
    return comm.world.shared.memory.held_bytes()


@pytest.fixture
def no_collection_by_chance():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.mpi(min_size=2)
def test_windows_that_garbage_holds_are_found_when_there_are_many(auto, monkeypatch, no_collection_by_chance):
    monkeypatch.setattr(memory_module, "_GARBAGE_BYTES", auto.size << 20)
    left, sizes = held_bytes(auto), []
    for _ in range(10):
        Holder(auto, 1 << 18)
        sizes.append(held_bytes(auto))
    assert max(sizes) <= 2 * left + auto.size * ((1 << 20) + 2 * (1 << 18))


@pytest.mark.mpi(min_size=2)
def test_windows_that_garbage_holds_are_freed_before_memory_counts_as_short(auto, monkeypatch, no_collection_by_chance):
    left = held_bytes(auto)

    def room() -> int:
        return left + (3 << 20) * auto.size - held_bytes(auto)

    monkeypatch.setattr(memory_module, "_free_shared_memory", room)
    for _ in range(3):
        assert auto.world.shared.holds(Holder(auto, 1 << 20).memory)
