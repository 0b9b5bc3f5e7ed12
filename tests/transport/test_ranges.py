"""Ranges that do not fit: an error on every rank before any byte moves, and the next reduction is right."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.errors import MismatchError
from tests.helpers import one_line
from tests.transport.references import drawn, folded, same_bits

pytestmark = pytest.mark.mpi(min_size=2)
SIZE = 9000

#: What the last rank gives for elements [100, 8100) of float32: (start byte, stop byte, dtype).
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


@pytest.mark.parametrize("offset", [1, 2, 3, 7])
def test_a_range_that_starts_between_two_elements_has_the_same_bits(several, offset):
    """NumPy reads and writes it like any other; the last rank's alone is misaligned."""
    start = offset if several.rank == several.size - 1 else 0
    rows = [drawn(rank, SIZE, "float32", offset) for rank in range(several.size)]
    memory, out = several.allocate(4 * SIZE + 8), several.allocate_common(4 * SIZE)
    array, target = memory[start : start + 4 * SIZE].view(np.float32), out.view(np.float32)
    array[:] = rows[several.rank]
    several.barrier()
    reduce = several.all_reduce_init(array, "mean", out=target)
    for call in (reduce, lambda: several.all_reduce(array, "mean", out=target)):
        call()
        assert same_bits(target.copy(), folded(rows, "mean"))
        several.barrier()


@pytest.mark.parametrize("way", ["all_reduce", "all_reduce_init", "all_reduce_async"])
def test_memory_that_only_some_ranks_share_is_refused_on_all_of_them(auto, way):
    shared, own = auto.allocate(4 * SIZE).view(np.float32), np.zeros(SIZE, np.float32)
    with pytest.raises(MismatchError) as caught:
        call = getattr(auto, way)(own if auto.rank == auto.size - 1 else shared)
        call.wait()
    texts = auto.all_gather_object(one_line(caught))
    assert len(set(texts)) == 1, texts
    assert (auto.all_reduce(shared) == 0).all()
