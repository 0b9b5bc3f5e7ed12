"""LizarDist's calls: what its Communicator has, without its faults."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.errors import ArgumentError


def test_lizardists_names(comm):
    assert (comm.get_rank(), comm.get_world_size()) == (comm.rank, comm.size)
    data = np.full(4, comm.rank, np.float32)
    assert comm.allreduce(data).tolist() == [comm.size * (comm.size - 1) / 2] * 4
    assert (data == comm.rank).all(), "a new array is returned"
    assert comm.allreduce(data, "max").tolist() == [comm.size - 1] * 4
    assert float(comm.allreduce(np.float64(2.5))) == 2.5 * comm.size
    assert comm.allreduce(np.zeros((4, 6))[:, ::2]).shape == (4, 3)
    assert comm.bcast({"epoch": comm.rank}, 0) == {"epoch": 0}
    assert comm.gather({"rank": comm.rank}, root=0) == (
        [{"rank": r} for r in range(comm.size)] if comm.rank == 0 else None
    )
    assert comm.scatter([f"part {r}" for r in range(comm.size)], root=0) == f"part {comm.rank}"


def test_reductions_named_by_mpis_constants(comm):
    from mpi4py import MPI

    data = np.full(3, comm.rank + 1.0)
    total = comm.size * (comm.size + 1) / 2
    for op, expected in ((MPI.SUM, total), (MPI.MIN, 1), (MPI.MAX, comm.size)):
        assert comm.allreduce(data, op=op).tolist() == [expected] * 3
        assert comm.bucketed_allreduce([data], op=op)[0].tolist() == [expected] * 3
    with pytest.raises(ArgumentError, match=r"^op: expected one of sum, mean, min, max, got '.*Op"):
        comm.allreduce(data, MPI.PROD)


@pytest.mark.parametrize(
    ("bucket_size", "use_bucketing", "calls"),
    [(1, True, 5), (400, True, 5), (800, True, 4), ("1200", True, 3), ("1MiB", True, 2), ("1MiB", False, 5)],
)
def test_bucketed_allreduce_obeys_bucket_size(bucket_size, use_bucketing, calls):
    """100-float tensors, one of 2000 bytes, and one of another dtype; LizarDist's failed at a second bucket."""
    tensors = [np.full((10, 10), float(n), np.float32) for n in range(3)]
    tensors += [np.full(500, 3.0, np.float32), np.full((5, 1), 4, np.int64)]
    with Communicator(transport="solo", bucket_size=bucket_size, use_bucketing=use_bucketing) as comm:
        results = comm.bucketed_allreduce(tensors)
        assert [(r.shape, r.dtype) for r in results] == [(t.shape, t.dtype) for t in tensors]
        assert all(np.array_equal(r, t) and r is not t for r, t in zip(results, tensors, strict=True))
        assert comm.get_bucket_stats() == {
            "total_allreduce_calls": calls,
            "total_bytes_sent": 3 * 400 + 2000 + 40,
            "average_bytes_per_call": 3240 / calls,
        }


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("bucket_size", [1, 100, 1000, "1MiB"])
def test_bucketed_allreduce_over_the_ranks(bucket_size):
    with Communicator(bucket_size=bucket_size) as comm:
        tensors = [np.full((n, 7), comm.rank + n, np.float32) for n in range(12)]
        for result, n in zip(comm.bucketed_allreduce(tensors), range(12), strict=True):
            assert result.shape == (n, 7)
            assert (result == comm.size * (comm.size - 1) / 2 + n * comm.size).all()


def test_no_tensors_are_no_calls(comm):
    assert comm.bucketed_allreduce([]) == []
    assert comm.get_bucket_stats() == {
        "total_allreduce_calls": 0, "total_bytes_sent": 0, "average_bytes_per_call": 0.0,
    }  # fmt: skip


def test_the_defaults_are_lizardists():
    comm = Communicator(transport="solo")
    assert (comm.bucket_size, comm.use_bucketing) == (1 << 20, True)
