"""Collectives of arrays of other lengths on each rank, and reductions of some of the ranks, against NumPy's."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.base.errors import ArgumentError, MismatchError
from clcomm.base.host.arrays import to_bfloat16
from tests.helpers import one_line
from tests.transport.references import same_bits

DTYPES = ("bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex64")
OPS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
SHAPES = ((), (0,), (1,), (63,), (5, 4, 3), (33_333,))


def drawn(rank: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    rng = np.random.default_rng(rank)
    return np.asarray(rng.standard_normal(shape) * (1 if np.dtype(dtype).kind in "fc" else 9)).astype(dtype)


def folded(rows, op):
    with np.errstate(all="ignore"):
        return reduce(lambda a, b: OPS[op](a, b).astype(a.dtype), rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_reductions_fold_in_rank_order(comm, dtype, op):
    for shape in SHAPES:
        rows = [drawn(rank, shape, dtype) for rank in range(comm.size)]
        own = rows[comm.rank].copy()
        for root in range(comm.size):
            whole = comm.reduce(own, op, root)
            assert whole is None if comm.rank != root else same_bits(np.asarray(whole), folded(rows, op))
        upto = comm.scan(own, op)
        assert upto.shape == shape and same_bits(upto, np.asarray(folded(rows[: comm.rank + 1], op)))
        before = comm.exscan(own, op)
        assert before is None if comm.rank == 0 else same_bits(before, np.asarray(folded(rows[: comm.rank], op)))
        assert same_bits(own, rows[comm.rank])
        assert same_bits(np.asarray(comm.all_reduce(own, op)), np.asarray(folded(rows, op)))


def test_other_reductions(comm):
    ranks = np.arange(comm.size)
    mean = comm.reduce(np.full(3, float(comm.rank)), "mean", comm.size - 1)
    assert mean is None if comm.rank < comm.size - 1 else (mean == ranks.mean()).all()
    assert (comm.scan(np.array([1 << comm.rank]), "bor") == (1 << (comm.rank + 1)) - 1).all()
    assert comm.scan(comm.rank) == comm.rank * (comm.rank + 1) // 2
    halves = [to_bfloat16(np.array([1.0 + rank / 7, -3.0])) for rank in ranks]
    whole = comm.scan(halves[comm.rank])
    assert comm.rank < comm.size - 1 or same_bits(whole, comm_sum_of_bfloat16(halves))


def comm_sum_of_bfloat16(halves):
    """Return the sum in float32, rounded once."""
    wide = [(each.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for each in halves]
    return to_bfloat16(reduce(np.add, wide))


def test_a_result_goes_where_it_is_wanted(comm):
    own, out = np.full((2, 3), comm.rank + 1.0), np.zeros((4, 3))
    total = comm.size * (comm.size + 1) / 2
    assert comm.reduce(own, out=out[::2]) is None or (out[::2] == total).all()
    assert comm.rank == 0 or not out.any()
    comm.scan(own, out=own)
    assert (own == (comm.rank + 1) * (comm.rank + 2) / 2).all()


def test_arrays_of_all_lengths_are_gathered(comm):
    """Shapes and dtypes too may differ; nothing is pickled."""
    everyone = [drawn(rank, (rank, 3), DTYPES[rank % 4 + 4])[:, ::-1] for rank in range(comm.size)]
    for root in range(comm.size):
        found = comm.gather(everyone[comm.rank], root)
        assert (found is None) == (comm.rank != root)
        for got, expected in zip(found or (), everyone, strict=False):
            assert got.shape == expected.shape and same_bits(got, np.ascontiguousarray(expected))
    for got, expected in zip(comm.all_gather_list(everyone[comm.rank]), everyone, strict=True):
        assert got.shape == expected.shape and same_bits(got, np.ascontiguousarray(expected))
    out = np.zeros((comm.size * (comm.size + 1) // 2, 2), np.int32)
    views = comm.all_gather_list(np.full((comm.rank + 1, 2), comm.rank, np.int32), out=out)
    assert np.array_equal(out, np.concatenate([np.full((rank + 1, 2), rank) for rank in range(comm.size)]))
    assert all(np.shares_memory(view, out) for view in views)
    assert comm.stats.total("gather")["calls"] == comm.size and not comm.stats.total("gather_object")["calls"]
    assert comm.all_gather_list({"rank": comm.rank}) == [{"rank": rank} for rank in range(comm.size)]


def test_arrays_of_all_lengths_are_scattered(comm):
    for root in range(comm.size):
        parts = [drawn(rank + root, (2, rank), DTYPES[rank % 4 + 4]) for rank in range(comm.size)]
        got = comm.scatter(parts if comm.rank == root else None, root)
        assert got.shape == (2, comm.rank) and same_bits(got, parts[comm.rank])
    rows = np.arange(comm.size * 6.0).reshape(comm.size, 2, 3)[:, ::-1]
    assert np.array_equal(comm.scatter(rows if comm.rank == 0 else None), rows[comm.rank])
    records = np.array([(rank, rank / 2) for rank in range(comm.size)], [("a", "i4"), ("b", "f8")])
    assert comm.scatter(records if comm.rank == 0 else None) == records[comm.rank]
    assert comm.scatter([str(rank) for rank in range(comm.size)]) == str(comm.rank)
    assert comm.stats.total("scatter")["calls"] == comm.size + 2 and comm.stats.total("scatter_object")["calls"] == 1


def test_scalars_are_arrays_without_dimensions(comm):
    rank, total = np.float32(comm.rank), comm.size * (comm.size - 1) / 2
    for found in (comm.all_reduce(rank), comm.all_reduce(rank, out=np.empty((), np.float32)), comm.allreduce(rank)):
        assert isinstance(found, np.ndarray) and found.shape == () and found.dtype == np.float32 and found == total
    assert rank == comm.rank and comm.broadcast(rank, comm.size - 1) == comm.size - 1
    assert np.array_equal(comm.all_gather(rank), np.arange(comm.size, dtype=np.float32))
    assert comm.all_reduce(rank, algorithm="ring") == total
    with pytest.raises(ArgumentError, match="array: expected a writable array, got a read-only one"):
        comm.all_reduce_async(rank)


def test_mistakes_are_raised_on_every_rank(comm):
    x, last = np.ones(3), comm.size - 1

    def mine(right, wrong):
        return wrong if comm.rank == last else right

    for call, text in {
        lambda: comm.reduce(x, root=mine(0, comm.size)): "root: expected a rank",
        lambda: comm.scan(x, mine("sum", "median")): "op: expected one of sum",
        lambda: comm.scan(x, mine("sum", max)): "op: expected one of sum",
        lambda: comm.scan(x, mine("sum", "mean")): "op: expected a reduction that scan has",
        lambda: comm.reduce(mine(x, [1.0])): "array: expected a NumPy array",
        lambda: comm.reduce(x, root=last, out=mine(None, np.ones(4))): "out: expected shape (3,)",
        lambda: comm.gather(x, last, out=mine(None, np.ones(2))): "out: expected a C-contiguous array of",
        lambda: comm.all_gather_list(x, out=mine(None, np.ones(2))): "out: expected a C-contiguous array of",
        lambda: comm.scatter(np.ones((comm.size, 2)), out=mine(None, np.ones(2, int))): "out: expected a C-contiguous",
    }.items():
        with pytest.raises(ArgumentError) as caught:
            call()
        message = one_line(caught)
        assert message.startswith(text) and " at 0x" not in message
        assert comm.size == 1 or f"on rank {last}" in message
        assert comm.scan(1) == comm.rank + 1


@pytest.mark.mpi(min_size=2)
def test_ranks_that_differ_are_named():
    with Communicator() as comm:
        last = comm.size - 1
        with pytest.raises(MismatchError, match=f"rank {last} in scan") as caught:
            comm.scan(np.ones(4 if comm.rank == last else 3))
        one_line(caught)
        assert comm.scan(1) == comm.rank + 1
