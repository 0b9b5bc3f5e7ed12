"""Prepared all-reduces: the results of ordinary ones, call after call, and no silence when ranks mix them up."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.base.errors import ArgumentError, DeviceError, MismatchError
from clcomm.base.host.arrays import HANDED_OUT
from clcomm.comm.stats.events import Collective
from clcomm.engine import fold
from clcomm.engine.device import Device
from clcomm.engine.fold import DeviceFold

#: Elements of float32: through slots up to 2,048, or 8,192 of 4 ranks that share cores; by shards above.
SIZES = (1, 17, 2048, 2049, 8192, 8193, 70_001)


def rows(size: int, ranks: int, turn: int) -> list[np.ndarray]:
    return [np.random.default_rng([size, rank, turn]).standard_normal(size).astype(np.float32) for rank in range(ranks)]


def mean_in_rank_order(values: list[np.ndarray]) -> np.ndarray:
    total = values[0].copy()
    for row in values[1:]:
        total = total + row
    return total / np.float32(len(values))


@pytest.mark.parametrize("size", SIZES)
def test_each_call_reduces_what_the_memory_holds_then(comm: Communicator, size: int) -> None:
    own = comm.allocate(4 * size).view(np.float32)
    mean = comm.allocate_common(4 * size).view(np.float32)
    reduce = comm.all_reduce_init(own, "mean", out=mean, label="prepared", nbytes=3)
    for turn in range(5):
        values = rows(size, comm.size, turn)
        own[:] = values[comm.rank]
        reduce()
        assert mean.tobytes() == mean_in_rank_order(values).tobytes()
        assert own.tobytes() == values[comm.rank].tobytes()
        comm.barrier()  # before anyone's next values
    total = comm.stats.total("all_reduce", "prepared")
    assert (total["calls"], total["bytes"]) == (5, 15)


def test_prepared_and_ordinary_calls_mix(comm: Communicator) -> None:
    first, second = (comm.allocate(4 * size).view(np.float32) for size in (100, 9000))
    reductions = [comm.all_reduce_init(array, "sum") for array in (first, second)]
    expected = comm.size * (comm.size + 1) / 2
    for _ in range(50):
        for array, reduce in zip((first, second), reductions, strict=True):
            array[:] = comm.rank + 1
            reduce()
            assert (array == expected).all()
        assert (comm.all_reduce(np.full(5000, comm.rank + 1.0)) == expected).all()


def test_memory_from_elsewhere_is_reduced_too(comm: Communicator) -> None:
    array = np.full(3000, comm.rank, np.float64)
    reduce = comm.all_reduce_init(array, "max")
    reduce()
    assert (array == comm.size - 1).all()


def test_arrays_that_cannot_be_prepared_are_refused(comm: Communicator) -> None:
    with pytest.raises(ArgumentError, match="array: expected a C-contiguous array for a prepared all-reduce"):
        comm.all_reduce_init(np.zeros((4, 4))[:, 1])


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("size", [10, 10_000])
def test_ranks_in_different_orders_all_get_an_error(auto: Communicator, size: int) -> None:
    arrays = [auto.allocate(4 * size).view(np.float32) for _ in range(2)]
    reductions = [auto.all_reduce_init(array, "sum") for array in arrays]
    mine = reductions[1] if auto.rank == 1 else reductions[0]
    with pytest.raises(MismatchError, match=r"number 1\);? .*rank 1 in .* number 2\)"):
        mine()
    reductions[0]()  # the ranks are in step again
    with pytest.raises(MismatchError):
        reductions[0]() if auto.rank == 0 else auto.all_reduce(arrays[0])


def test_blocks_are_gathered_in_place_again_and_again(comm: Communicator) -> None:
    memories = (comm.allocate(8 * comm.size), comm.allocate_common(8 * comm.size), np.zeros(8 * comm.size, np.uint8))
    arrays = [memory.view(np.int64) for memory in memories]
    gathers = [comm.all_gather_in_place_init(array, label="blocks", nbytes=5) for array in arrays]
    for turn in range(4):
        for array, gather in zip(arrays, gathers, strict=True):
            array[comm.rank] = 10 * turn + comm.rank
            gather()
            assert array.tolist() == [10 * turn + rank for rank in range(comm.size)]
            comm.barrier()  # before anyone's next values
    total = comm.stats.total("all_gather", "blocks")
    assert (total["calls"], total["bytes"]) == (12, 60)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("prepare", ["all_reduce_init", "all_reduce_async_init"])
def test_a_prepared_call_keeps_the_memory_that_it_works_on(auto: Communicator, prepare: str) -> None:
    own = auto.allocate(80_000).view(np.float32)
    own[:] = auto.rank + 1
    run = getattr(auto, prepare)(own)
    del own
    for _ in range(3):
        auto.allocate(80_000)  # frees unreferenced memory
    handle = run()
    if handle is not None:
        assert (handle.wait() == auto.size * (auto.size + 1) / 2).all()


@pytest.mark.mpi(min_size=2)
def test_the_latest_fold_reduces(auto: Communicator) -> None:
    asked = []

    def fold(rows, out, divisor):
        asked.append(len(rows))

    arrays = [auto.allocate(4 * size).view(np.float32) for size in (100, 9000)]
    for array in arrays:
        auto.all_reduce(array)
    auto.fold_with(fold)
    for array in arrays:
        auto.all_reduce(array)
    assert set(asked) == ({auto.size} if auto.size > 1 else set())
    auto.fold_with(None)
    asked.clear()
    for array in arrays:
        auto.all_reduce(array)
    assert not asked


class Watcher:
    """Keeps the events."""

    def __init__(self) -> None:
        self.events: list[Collective] = []
        self.collective_finished = self.events.append


class Memory:
    """A device's memory whose values backward has kept: what is written there is counted."""

    def __init__(self, nbytes: int):
        self.nbytes, self.writes = nbytes, 0

    def note_write(self) -> None:
        self.writes += 1


def on_this_device(comm: Communicator) -> bool:
    """Sum on this rank's device from now on; return whether prepared all-reduces are then one kernel on each rank."""
    fold = DeviceFold.on(Device.select("cpu", local_rank=comm.local_rank, local_size=comm.local_size, cores=1))
    comm.fold_with(fold)
    return fold is not None and comm.size > 1


def is_one_kernel(reduce: Callable[[], None]) -> bool:
    """Return whether a prepared all-reduce is one kernel."""
    return getattr(reduce, "__qualname__", "") == "OneKernelAllReduce.run"


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("size", [*SIZES, 3, 64, 4099])
def test_one_kernel_has_the_bits_and_the_counts_of_python(auto: Communicator, size: int, op: str) -> None:
    """Ranks arrive together or late, so that the kernel completes the all-reduce, or Python after it."""
    own, out = auto.allocate(4 * size).view(np.float32), auto.allocate_common(4 * size).view(np.float32)
    is_fused = on_this_device(auto)
    reduce = auto.all_reduce_init(own, op, out=out, label="fused")
    assert is_one_kernel(reduce) == is_fused
    memory = HANDED_OUT[out.__array_interface__["data"][0]] = Memory(out.nbytes)
    watcher = Watcher()
    auto.add_observer(watcher)
    for turn in range(12):
        values = rows(size, auto.size, turn)
        own[:] = values[auto.rank]
        late = turn % (auto.size + 1)
        auto.barrier()
        is_late = turn % 3 == 2
        if is_late and auto.rank == late:
            time.sleep(0.05)
        reduce()
        assert memory.writes > turn
        factor = np.float32(auto.size if op == "sum" else 1)
        if op == "mean" or auto.size & (auto.size - 1) == 0:
            assert out.tobytes() == (mean_in_rank_order(values) * factor).tobytes()
        event = next(event for event in reversed(watcher.events) if event.label)
        assert (event.operation, event.label, event.nbytes, event.failed) == ("all_reduce", "fused", 4 * size, False)
        assert 0 <= (event.wait_s or 0) <= event.seconds + 1e-6
        if is_late and late < auto.size and is_fused:
            assert event.last_rank == late and event.late_s > 0.005
            assert event.wait_s > 0.005 or auto.rank == late
        auto.barrier()
    assert auto.stats.total("all_reduce", "fused")["calls"] == 12


@pytest.mark.mpi(min_size=1)
def test_one_kernel_on_some_ranks_is_none(auto: Communicator) -> None:
    """Ranks may sum in different ways; what they prepare is then of one kind all the same."""
    own, out = auto.allocate(400).view(np.float32), auto.allocate_common(400).view(np.float32)
    on_this_device(auto)
    if auto.rank == 0:
        auto.fold_with(None)
    reduce = auto.all_reduce_init(own, "sum", out=out)
    assert auto.size == 1 or not is_one_kernel(reduce)
    own[:] = auto.rank + 1
    reduce()
    assert (out == auto.size * (auto.size + 1) / 2).all()


@pytest.mark.mpi(min_size=2)
def test_one_kernel_finds_out_that_others_are_elsewhere(auto: Communicator) -> None:
    own, out = auto.allocate(400).view(np.float32), auto.allocate_common(400).view(np.float32)
    on_this_device(auto)
    first, second = (auto.all_reduce_init(own, op, out=out) for op in ("sum", "mean"))
    for turn in range(6):
        with pytest.raises(MismatchError, match="rank 1 in"):
            if auto.rank != 1:
                first()
            elif turn % 3 == 0:
                second()
            elif turn % 3 == 1:
                auto.barrier()
            else:
                auto.broadcast(np.zeros(3))
        own[:] = 1
        first()
        assert (out == auto.size).all()


@pytest.mark.mpi(min_size=2)
def test_preparing_opens_the_cpu_for_sums_unless_they_are_chosen(monkeypatch):
    opened = []

    def fold_of_rank(*place):
        opened.append(place)
        return lambda rows, out, divisor: None

    monkeypatch.setattr(fold, "fold_of_rank", fold_of_rank)
    for chosen in (False, True):
        with Communicator() as comm:
            if chosen:
                comm.fold_with(None)
            array = comm.allocate(64).view(np.float32)
            comm.all_reduce(array)
            assert comm.sums == "numpy" and not opened
            for start in (comm.all_reduce_init, comm.all_reduce_async_init):
                start(array)
            assert comm.sums == ("numpy" if chosen else "device")
            assert opened == ([] if chosen else [(comm.local_rank, comm.local_size, comm.cores)])
            opened.clear()


def test_the_cpu_sums_where_kernels_run_in_the_calling_thread(monkeypatch):
    assert fold.fold_of_rank.__wrapped__(0, 1, 2) is None, "several cores have worker threads"
    asked = []

    def select(spec, **place):
        asked.append(spec)
        raise DeviceError("none")

    monkeypatch.setattr(fold.Device, "select", select)
    for name in ("", "no such device"):
        monkeypatch.setenv("CLCOMM_DEVICE", name)
        assert fold.fold_of_rank.__wrapped__(0, 1, 1) is None
    assert asked == ["cpu", None]
