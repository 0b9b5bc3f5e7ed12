"""Ranges that do not fit: an error on every rank before any byte moves, and the next reduction is right."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError, MismatchError
from clcomm.base.host.arrays import BFLOAT16
from clcomm.comm.transport.base import mismatch, require_alike
from clcomm.comm.transport.rendezvous import DifferentOperations
from tests.helpers import one_line

pytestmark = pytest.mark.mpi(min_size=2)
SIZE = 9000

#: The last rank's ranges where the others pass elements [100, 8100) of float32: (start byte, stop byte, dtype).
WRONG = {
    "shorter": (400, 32_000, "float32"),
    "out of bounds": (400 + 8000, 400 + 8000 + 32_000, "float32"),  # NumPy cuts it off at the end
    "another dtype of the same bytes": (400, 32_400, "int32"),
    "half as many of twice the size": (400, 32_400, "float64"),
    "empty": (400, 400, "float32"),
}


def part(memory, start, stop, dtype):
    return memory[start:stop].view(dtype)


@pytest.mark.parametrize("way", ["all_reduce", "all_reduce_init", "all_reduce_async", "broadcast", "reduce_scatter"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_range_that_differs_between_ranks_is_refused_on_all_of_them(several, wrong, way):
    memory, out = several.allocate(4 * SIZE), several.allocate_common(4 * SIZE)
    memory.view(np.float32)[:] = several.rank + 1
    odd = several.rank == several.size - 1
    array, target = (part(m, *(WRONG[wrong] if odd else (400, 32_400, "float32"))) for m in (memory, out))
    before = memory.tobytes(), out.tobytes()
    several.barrier()
    with pytest.raises(MismatchError) as caught:
        if way == "broadcast":
            several.broadcast(array, several.size - 1)
        elif way == "reduce_scatter":
            length = array.size - array.size % several.size
            several.reduce_scatter(array[:length])
        elif way == "all_reduce_async":
            several.all_reduce_async(array, out=target).wait()
        else:
            getattr(several, way)(array, out=target)
    texts = several.all_gather_object(one_line(caught))
    assert len(set(texts)) == 1, texts
    assert (memory.tobytes(), out.tobytes()) == before
    good = part(memory, 400, 32_400, "float32")
    assert (several.all_reduce(good) == several.size * (several.size + 1) / 2).all()


@pytest.mark.parametrize("way", ["all_reduce", "all_reduce_init", "all_reduce_async"])
@pytest.mark.parametrize("which", ["array", "out"])
@pytest.mark.parametrize("offset", [1, 2, 3, 7])
def test_a_range_that_starts_between_two_elements_on_one_rank_is_refused_on_all(several, way, which, offset):
    places = {"array": 0, "out": 0} | ({which: offset} if several.rank == several.size - 1 else {})
    memory, out = several.allocate(4 * SIZE + 8), several.allocate_common(4 * SIZE + 8)
    array, target = (
        m[start : start + 4 * SIZE].view(np.float32) for m, start in zip((memory, out), places.values(), strict=True)
    )
    array[:] = several.rank + 1
    several.barrier()
    before = memory.tobytes(), out.tobytes()
    with pytest.raises(MismatchError) as caught:
        call = getattr(several, way)(array, out=target)
        call.wait()
    texts = several.all_gather_object(one_line(caught))
    assert len(set(texts)) == 1, texts
    if way != "all_reduce_async":
        assert f"rank {several.size - 1} in all_reduce" in texts[0] and "9,000 misaligned float32" in texts[0]
    assert (memory.tobytes(), out.tobytes()) == before
    assert (several.all_reduce(memory[:32_000].view(np.float32).copy()) >= 0).all()


@pytest.mark.parametrize("way", ["all_reduce", "all_reduce_init", "all_reduce_async", "all_reduce_async_init"])
def test_a_range_that_starts_between_two_elements_on_all_ranks_is_refused(several, way):
    memory = several.allocate(4 * SIZE + 8)
    memory[:] = several.rank + 1
    before = memory.tobytes()
    with pytest.raises(ArgumentError) as caught:
        call = getattr(several, way)(memory[2 : 2 + 4 * SIZE].view(np.float32))
        call.wait()
    assert "array, out: expected to start at a multiple of float32's size" in one_line(caught)
    assert memory.tobytes() == before


@pytest.mark.parametrize("way", ["all_reduce", "all_reduce_init", "all_reduce_async"])
def test_memory_that_only_some_ranks_share_is_refused_on_all_of_them(auto, way):
    shared, own = auto.allocate(4 * SIZE).view(np.float32), np.zeros(SIZE, np.float32)
    with pytest.raises(MismatchError) as caught:
        call = getattr(auto, way)(own if auto.rank == auto.size - 1 else shared)
        call.wait()
    texts = auto.all_gather_object(one_line(caught))
    assert len(set(texts)) == 1, texts
    assert (auto.all_reduce(shared) == 0).all()


def test_arrays_of_bfloat16_that_differ_are_refused_in_words(several):
    halves = several.allocate(64).view(BFLOAT16)
    with pytest.raises(MismatchError) as caught:
        several.all_reduce(halves[: 4 + several.rank])
    assert "bfloat16" in one_line(caught) and "<u2" not in one_line(caught)
    several.barrier()


def test_a_difference_is_told_whatever_the_dtypes():
    kinds = [[8, np.dtype("float32").num], [6, BFLOAT16.num], [12, np.dtype("S4").num]]
    assert str(mismatch(kinds)).endswith(
        "got 2 float32 on rank 0, 6 bytes of dtype void on rank 1, 12 bytes of dtype bytes on rank 2"
    )


def test_what_describes_no_array_is_another_operation():
    """As where one rank is in a blocking collective."""
    words = np.array([[7, -1, 0, 40, 11]] * 2, np.int64)
    require_alike(words, arrays=1)
    words[1, 1:] = -1
    with pytest.raises(DifferentOperations):
        require_alike(words, arrays=1)
    with pytest.raises(MismatchError, match="10 float32 on rank 0, 40 bytes of dtype number 256 on rank 1"):
        raise mismatch([[40, 11], [40, 256]])
