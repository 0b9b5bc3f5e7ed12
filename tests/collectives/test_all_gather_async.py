"""All-gathers in the background: what the blocking one returns, in any company, and mismatches are errors."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError, MismatchError
from tests.helpers import one_line


def rows_of(comm, number, size, dtype):
    """Return what each rank brings, as rows."""
    rng = np.random.default_rng(number)
    return (1000 * rng.standard_normal((comm.size, size))).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.int64])
@pytest.mark.parametrize("size", [1, 7, 5000, 300_000])
def test_it_gathers_what_the_blocking_one_does(comm, size, dtype):
    rows = rows_of(comm, size, size, dtype)
    out = np.empty((comm.size, size), dtype)
    handle = comm.all_gather_async(rows[comm.rank].copy(), out=out, label="parameters", bucket=3)
    while not handle.done():
        pass
    assert handle.wait() is out
    np.testing.assert_array_equal(out, rows)
    assert comm.stats.total("all_gather", "parameters")["bytes"] == out.nbytes


def test_several_are_complete_in_any_order_with_other_collectives_between(comm):
    begun = []
    for number in range(6):
        rows = rows_of(comm, number, 10 + 1000 * number, np.float32)
        out = np.empty_like(rows)
        begun.append((comm.all_gather_async(rows[comm.rank].copy(), out=out), out, rows))
        if number == 2:
            np.testing.assert_array_equal(comm.all_reduce(np.ones(3, np.float32)), np.full(3, comm.size))
        if number == 4:
            begun.append((comm.all_reduce_async(np.ones(9, np.float32)), None, np.full(9, comm.size)))
    for handle, out, expected in begun[::-1]:
        found = handle.wait()
        np.testing.assert_array_equal(found if out is None else out, expected)


@pytest.mark.parametrize("longest", [0, 1, 100_000])
def test_rows_may_have_any_length_on_each_rank(comm, longest):
    rows = [np.arange(longest if rank == comm.size - 1 else 3 * rank, dtype=np.uint8) for rank in range(comm.size)]
    handle = comm.all_gather_rows_async(rows[comm.rank], label="rows", dtype=np.dtype(np.uint8))
    while not handle.done():
        pass
    assert not handle.failed
    for found, row in zip(handle.wait(), rows, strict=True):
        np.testing.assert_array_equal(found, row)
        assert found.ctypes.data % 8 == 0


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("differs", ["dtype", "shape", "root", "operation"])
def test_rows_are_compared_in_what_the_caller_says_of_them(several, differs):
    odd = several.rank == 1
    compared = {"dtype": np.dtype(np.float32), "shape": (-1, 2), "root": 0, "operation": "broadcast"}
    others = {"dtype": np.dtype(np.int32), "shape": (-1, 3), "root": 1, "operation": "all_gather"}
    handle = several.all_gather_rows_async(
        np.ones(8, np.uint8), **compared | ({differs: others[differs]} if odd else {})
    )
    with pytest.raises(MismatchError) as caught:
        handle.wait()
    assert handle.failed and len(set(several.all_gather_object(one_line(caught)))) == 1
    np.testing.assert_array_equal(several.all_reduce(np.ones(3, np.float32)), np.full(3, several.size))


def test_an_array_of_another_length_is_refused(comm):
    with pytest.raises(ArgumentError) as caught:
        comm.all_gather_async(np.ones(4, np.float32), out=np.empty(4 * comm.size + 1, np.float32))
    assert one_line(caught).startswith(f"out: expected a C-contiguous array of {4 * comm.size} float32, got ")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("differs", ["bucket", "length", "operation", "memory"])
@pytest.mark.parametrize("odd", [0, 1])
def test_ranks_that_gather_different_things_all_raise(several, differs, odd):
    """In "memory" the others start a sum in shared memory, where there is any, and one gathers through MPI."""
    odd = several.rank == odd
    size = 5 if differs == "length" and odd else 4
    array = several.allocate(20).view(np.float32)[:size]
    if differs == "memory" and odd:
        array = np.ones(size, np.float32)
    if (differs == "operation" and odd) or (differs == "memory" and not odd):
        handle = several.all_reduce_async(array)
    else:
        out = np.empty(size * several.size, np.float32)
        handle = several.all_gather_async(array, out=out, bucket=int(differs == "bucket" and odd))
    with pytest.raises(MismatchError):
        handle.wait()
    np.testing.assert_array_equal(several.all_reduce(np.ones(3)), np.full(3, several.size))  # in step again
