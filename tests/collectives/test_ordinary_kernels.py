"""Ordinary all-reduces of small arrays, which one kernel of each rank does once there were many of a kind."""

from __future__ import annotations

import time

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.base.errors import MismatchError
from clcomm.base.host.arrays import HANDED_OUT
from clcomm.comm.transport import staged
from clcomm.engine import fold
from tests.collectives.test_prepared import Memory, on_this_device

#: Of one kind, before ranks look for a kernel.
USES = 16
KINDS = ("f4", "f8", "i4", "u4", "i8", "u8")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "USES_BEFORE_KERNEL", USES)


def planned_kernels(comm: Communicator) -> int:
    return sum("_planned.<locals>.reduce" in each.__qualname__ for each in comm.plans.of.values())


def drawn(kind: str, size: int, rank: int, turn: int) -> np.ndarray:
    rng = np.random.default_rng([size, rank, turn])
    if kind[0] == "f":
        return (rng.standard_normal(size) * 10.0 ** rng.integers(-2, 3, size)).astype(kind)
    limits = np.iinfo(kind)  # sums of these wrap
    return rng.integers(limits.min, limits.max, size, kind, endpoint=True)


def in_rank_order(values: list[np.ndarray], op: str) -> np.ndarray:
    total = values[0].copy()
    with np.errstate(over="ignore"):
        for row in values[1:]:
            total = np.maximum(total, row) if op == "max" else total + row
    return total / total.dtype.type(len(values)) if op == "mean" else total


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("kind", [*KINDS, "f2", "i2"])
def test_the_bits_are_those_of_numpy_before_and_after(auto: Communicator, kind: str) -> None:
    """Same arrays and new ones, in place and not, of ranks that come together or late."""
    fused, rng = on_this_device(auto), np.random.default_rng(len(kind) + ord(kind[0]))
    for size in (1, 3, 1000, 64 * 1024 // int(kind[1]), 70_001):
        op = rng.choice(["sum", "mean", "max"] if kind in ("f4", "f8") else ["sum", "max"])
        array, out = np.empty(size, kind), np.empty(size, kind)
        for turn in range(USES + 8):
            values = [drawn(kind, size, rank, turn) for rank in range(auto.size)]
            array[:] = values[auto.rank]
            if turn % 7 == 6 and auto.rank == turn % auto.size:
                time.sleep(0.005)
            if turn % 3 == 2:
                auto.all_reduce(array, op, label="ours")
                found = array
            else:
                found = auto.all_reduce(array, op, out=out if turn % 3 else np.empty(size, kind), label="ours")
            assert found.tobytes() == in_rank_order(values, op).tobytes(), (kind, size, op, turn)
        takes = fused and kind in KINDS and op != "max" and array.nbytes <= 64 << 10
        assert (planned_kernels(auto) > 0) == takes
        auto.plans.of.clear()
    assert auto.stats.total("all_reduce", "ours")["calls"] == 5 * (USES + 8)


@pytest.mark.mpi(min_size=2)
def test_shapes_strides_and_writes_are_as_before(auto: Communicator) -> None:
    on_this_device(auto)
    for turn in range(USES + 4):
        whole = np.full((6, 10), auto.rank + turn, np.float32)
        out = np.zeros((3, 20), np.float32)
        memory = HANDED_OUT[out.__array_interface__["data"][0]] = Memory(out.nbytes)
        total = auto.size * (auto.size - 1) / 2 + turn * auto.size
        assert (auto.all_reduce(whole.reshape(3, 20), out=out) == total).all() and out.shape == (3, 20)
        assert memory.writes == 1
        HANDED_OUT.clear()
        auto.all_reduce(whole[:, ::2])
        assert (whole[:, ::2] == total).all() and (whole[:, 1::2] == auto.rank + turn).all()


@pytest.mark.mpi(min_size=2)
def test_a_rank_elsewhere_is_found_out(auto: Communicator) -> None:
    on_this_device(auto)
    array = np.ones(100, np.float32)
    for _ in range(USES + 1):
        auto.all_reduce(array.copy())
    for turn in range(4):
        with pytest.raises(MismatchError, match="rank 1 in"):
            if auto.rank != 1:
                auto.all_reduce(array.copy())
            elif turn % 2:
                auto.barrier()
            else:
                auto.all_reduce(array.copy(), "max")
        with pytest.raises(MismatchError):
            auto.all_reduce(np.ones(100 + (auto.rank == 1), np.float32))
        assert (auto.all_reduce(array.copy()) == auto.size).all()


@pytest.mark.mpi(min_size=2)
def test_the_device_is_opened_for_many_of_a_kind_alone(auto: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    monkeypatch.setattr(fold, "fold_of_rank", lambda *place: opened.append(place))
    for size in range(1, 2 * USES):
        auto.all_reduce(np.ones(size, np.float32))
    assert not opened
    for use in range(1, 2 * USES):
        auto.all_reduce(np.ones(500, np.float32))
        assert len(opened) == (use > USES)
    for _ in range(2 * USES):
        auto.all_reduce(np.ones(600, np.float32))
    assert opened == [(auto.local_rank, auto.local_size, auto.cores)]


@pytest.mark.mpi(min_size=2)
def test_a_kernel_of_some_ranks_is_none(auto: Communicator) -> None:
    on_this_device(auto)
    if auto.rank == 0:
        auto.fold_with(None)
    for _ in range(USES + 4):
        array = np.full(100, auto.rank + 1.0, np.float32)
        assert (auto.all_reduce(array) == auto.size * (auto.size + 1) / 2).all()
    assert planned_kernels(auto) == 0


@pytest.mark.mpi(min_size=2)
def test_many_kinds_leave_the_ranks_in_the_same_way(auto: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's plan for its array is kept, while others come with new arrays."""
    monkeypatch.setattr(staged, "KEPT", 8)
    on_this_device(auto)
    own = np.empty(100, np.float32)
    for turn in range(4):
        for _ in range(USES + 2):
            array = own if auto.rank == 0 else np.empty(100, np.float32)
            array[:] = auto.rank + turn
            assert (auto.all_reduce(array) == auto.size * (auto.size - 1) / 2 + turn * auto.size).all()
        for size in range(turn * 20 + 1, turn * 20 + 20):
            assert (auto.all_reduce(np.ones(size, np.float32)) == auto.size).all()


@pytest.mark.mpi(min_size=2)
def test_a_kernel_on_one_rank_alone_is_an_error(auto: Communicator) -> None:
    """Its rows are elsewhere than those of Python's sum: a tag of its own lets no rank read the wrong ones."""
    is_fused = on_this_device(auto)
    for _ in range(USES + 2):
        auto.all_reduce(np.ones(100, np.float32))
    if auto.rank == 0:
        auto.world.staged._kernels.clear()
        auto.plans.of.clear()
    if is_fused:
        with pytest.raises(MismatchError):
            auto.all_reduce(np.ones(100, np.float32))
