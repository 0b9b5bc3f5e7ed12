"""Features of the shared transport only: its memory, the location of arrays in it, and its end."""

from __future__ import annotations

import gc
import os
import time

import numpy as np
import pytest
from mpi4py import MPI

from clcomm.base.errors import MismatchError
from clcomm.comm.transport import futex
from clcomm.comm.transport import host_memory as memory_module
from clcomm.comm.transport.host_memory import HostMemory
from clcomm.comm.transport.mpi_communicators import host_of, shared_window
from clcomm.comm.transport.mpi_runtime import world
from tests.transport.conftest import Bench, make_bench
from tests.transport.references import drawn, folded, same_bits

pytestmark = pytest.mark.mpi(min_size=1)


@pytest.fixture
def shared(request):
    comm = world().Dup()
    bench = make_bench("shared", comm)
    yield bench
    if not request.node.has_failed:
        bench.transport.close()
        comm.Free()


@pytest.mark.mpi(min_size=2)
def test_memory_is_zeroed_and_starts_at_a_page(shared: Bench):
    for nbytes in (1, 4095, 4096, 100_001):
        for memory in (shared.allocate(nbytes), shared.allocate_common(nbytes)):
            assert (memory.dtype, memory.shape) == (np.uint8, (nbytes,))
            assert not memory.any()
            assert memory.__array_interface__["data"][0] % 4096 == 0
            shared.transport.barrier()
            memory[:] = 255  # the next window must not contain these values


class ShiftedWindow:
    """A window of COMM_SELF whose bytes start so far after a page's start, as the ones malloc returns may."""

    def __init__(self, comm, nbytes: int, shift: int):
        self._window, self._nbytes = shared_window(comm, nbytes + 2 * 4096), nbytes
        start = self._window.Shared_query(0)[0].address
        self._first = -start % 4096 + shift

    def Shared_query(self, rank: int):
        memory, unit = self._window.Shared_query(rank)
        return memory[self._first : self._first + self._nbytes], unit

    def __getattr__(self, name: str):
        return getattr(self._window, name)


@pytest.mark.parametrize("shifts", [(0, 16, 16), (16, 0, 4095), (0, 0, 0)])
def test_each_part_may_start_anywhere_in_a_page(monkeypatch, shifts):
    """The first one's place says nothing about the next one's: a rank alone on its host failed one time in 256."""
    left = list(shifts)
    monkeypatch.setattr(memory_module, "shared_window", lambda comm, nbytes: ShiftedWindow(comm, nbytes, left.pop(0)))
    memory = HostMemory(MPI.COMM_SELF.Dup())
    for common in (True, False):
        array = memory.allocate(3 * 4096, common)
        assert array.__array_interface__["data"][0] % 4096 == 0
        array[:] = 255
        del array
    memory.close()


def test_common_memory_is_one_and_own_memory_is_not(shared: Bench):
    common, own = shared.common(np.zeros(1, np.int64)), shared.array(np.zeros(1, np.int64))
    own[0] = shared.rank
    if shared.rank == shared.size - 1:
        common[0] = 41
    shared.transport.barrier()
    assert common[0] == 41
    assert own[0] == shared.rank


def test_it_knows_its_own_memory(shared: Bench):
    own, common = shared.allocate(64), shared.allocate_common(64)
    transport = shared.transport
    assert transport.holds(own, common, own[3:60], common[:1].view(np.int8))
    assert not transport.holds(own, np.zeros(4))
    assert not transport.holds(own[10:10]), "an empty array lies nowhere, on every rank"
    assert transport.is_common(common[8:16])
    assert not transport.is_common(own)
    assert not transport.is_common(np.zeros(4))


def test_slices_may_lie_elsewhere_on_every_rank(shared: Bench):
    length = 1000
    rows = [drawn(rank, length, "float32") for rank in range(shared.size)]
    for out_memory in (None, shared.array(np.zeros(length, np.float32)), shared.common(np.zeros(length, np.float32))):
        memory = shared.array(np.zeros(length * 2, np.float32))
        source = memory[shared.rank * 7 : shared.rank * 7 + length]
        source[:] = rows[shared.rank]
        out = source if out_memory is None else out_memory
        shared.transport.all_reduce(source, out, "sum")
        assert same_bits(out.copy(), folded(rows, "sum"))
        shared.transport.barrier()
        array = memory[shared.rank : shared.rank + 3]
        array[:] = shared.rank
        shared.transport.broadcast(array, shared.size - 1)
        assert (array == shared.size - 1).all()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("other", [np.zeros(11, np.float32), np.zeros(10, np.int32)], ids=["length", "dtype"])
def test_lengths_and_dtypes_that_differ_are_refused_on_every_rank(shared: Bench, other):
    memory = shared.allocate(64)
    array = memory[:40].view(np.float32)
    if shared.rank == 1:
        array = memory[: other.nbytes].view(other.dtype)
    with pytest.raises(MismatchError, match=r"^collective: .* equal length and dtype"):
        shared.transport.all_reduce(array, array, "sum")
    pending = shared.transport.start_all_reduce(array, array, "sum")
    with pytest.raises(MismatchError):
        pending.wait()
    shared.transport.barrier()
    good = memory[:8].view(np.float32)
    good[:] = 1
    shared.transport.all_reduce(good, good, "sum")  # it still works
    assert (good == shared.size).all()


def test_windows_are_freed_when_no_rank_uses_them(shared: Bench):
    for _ in range(3):  # what earlier tests dropped may take more than one collection
        gc.collect()
        shared.transport.memory.free_unused()
    before = len(shared.transport.memory.regions)
    keep, view = shared.allocate(4096), shared.allocate(4096)[100:200].view(np.int32)
    shared.allocate_common(4096)
    only_on_last = shared.allocate(4096)
    if shared.rank != shared.size - 1:
        del only_on_last
    gc.collect()
    assert len(shared.transport.memory.regions) == before + 4
    shared.transport.memory.free_unused()
    assert len(shared.transport.memory.regions) == before + 3, "the unused one is freed, those in use anywhere are not"
    assert shared.transport.holds(keep, view)
    array = view[:10]
    array[:] = shared.rank
    shared.transport.all_reduce(array, array, "max")  # regions have the same numbers on all ranks
    assert (array == shared.size - 1).all()


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_waits_for_a_start_sleeps_until_the_last_one_has_come(monkeypatch):
    """A lost wake-up would cost a nap, which is long here."""
    monkeypatch.setattr(futex, "NAP_NS", 20 * 10**9)
    monkeypatch.setattr(memory_module, "usable_cores", lambda: {0})
    comm = world().Dup()
    bench = make_bench("shared", comm)
    own, out = bench.array(np.full(10_000, bench.rank + 1.0)), bench.common(np.zeros(10_000))
    start, asleep = bench.transport.prepare_start(own, out, "sum"), bench.transport.rendezvous.sleepers
    for last in range(bench.size):
        bench.transport.barrier()
        began_s = time.monotonic()
        while bench.rank == last and asleep.sum() < bench.size - 1 and time.monotonic() < began_s + 60:
            time.sleep(0.001)
        start().wait()
        assert time.monotonic() - began_s < 15
        assert (out == bench.size * (bench.size + 1) / 2).all()
    bench.transport.close()
    comm.Free()


def test_arrays_outlive_the_transport():
    comm = world().Dup()
    bench = make_bench("shared", comm)
    array = bench.array(np.arange(10_000, dtype=np.float32))
    bench.transport.close()
    comm.Free()
    gc.collect()
    assert (array == np.arange(10_000)).all()
    array += 1
    assert array[-1] == 10_000


def test_memory_that_outlives_its_communicator_is_freed_beside_the_memory_of_another():
    """Where a window outlives its communicator, MPICH gives the next communicator's the same identity, and aborts."""
    comm = world().Dup()
    for before in range(3):  # windows before the rendezvous's, which is locked
        first = HostMemory(host_of(comm))
        kept = [first.allocate(8, common=False) for _ in range(3)]
        first.close()
        host = host_of(comm)
        for window in [shared_window(host, 1) for _ in range(before)]:
            window.Free()
        second = HostMemory(host)
        comm.Barrier()
        kept.clear()
        second.free_unused()
        assert not first.comm
        second.close()
    comm.Free()


def test_communicators_are_freed():
    """MPI has only about 2,000 of them."""
    from mpi4py import MPI

    comm = world().Dup()
    shared, mpi = make_bench("shared", comm).transport, make_bench("mpi", comm).transport
    shared.close()
    mpi.close()
    assert shared.memory.comm == shared.background == mpi.background == MPI.COMM_NULL
    assert comm != MPI.COMM_NULL, "a given communicator remains its owner's"
    comm.Free()


def test_room_is_asked_for_before_it_is_used(shared: Bench, monkeypatch):
    monkeypatch.setattr(memory_module, "_free_shared_memory", lambda: 10 << 20)
    assert shared.transport.fits(9 << 20, common=True)
    assert not shared.transport.fits((9 << 20) + 1, common=True)
    assert shared.transport.fits((9 << 20) // shared.size, common=False)
    assert not shared.transport.fits((9 << 20) // shared.size + 1, common=False)
    if shared.rank:  # rank 0 decides for all
        monkeypatch.setattr(memory_module, "_free_shared_memory", lambda: 0)
    assert shared.transport.fits(1, common=True)


def test_without_a_shared_memory_file_system_nothing_fits(monkeypatch):
    def missing(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "statvfs", missing)
    assert memory_module._free_shared_memory() == 0
