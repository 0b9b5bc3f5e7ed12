"""mpi4py's names and buffers on a Communicator: the values that mpi4py's own calls have, on the same ranks."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from tests.helpers import one_line

pytestmark = pytest.mark.mpi(min_size=1)


@pytest.fixture(params=["ours", "mpi4py"])
def calls(request, auto):
    """Our Communicator, and mpi4py's, which shows what is expected."""
    from mpi4py import MPI

    return auto if request.param == "ours" else MPI.COMM_WORLD


def test_ranks_and_reductions(calls):
    from mpi4py import MPI

    rank, size = calls.Get_rank(), calls.Get_size()
    own, out = np.arange(5.0) + rank, np.zeros(5)
    total = size * np.arange(5.0) + size * (size - 1) / 2
    calls.Barrier()
    calls.Allreduce(own, out)
    assert np.array_equal(out, total)
    calls.Allreduce([own, MPI.DOUBLE], [out, 5, MPI.DOUBLE], op=MPI.MAX)
    assert np.array_equal(out, np.arange(5.0) + size - 1)
    twice = own.copy()
    calls.Allreduce(MPI.IN_PLACE, twice, op=MPI.SUM)
    assert np.array_equal(twice, total)
    out[...] = -1
    calls.Reduce(own, out if rank == size - 1 else None, op=MPI.SUM, root=size - 1)
    assert np.array_equal(out, total if rank == size - 1 else np.full(5, -1.0))
    calls.Scan(own, out)
    assert np.array_equal(out, (rank + 1) * np.arange(5.0) + rank * (rank + 1) / 2)
    out[...] = -1
    calls.Exscan(own, out)
    assert np.array_equal(out, rank * np.arange(5.0) + rank * (rank - 1) / 2 if rank else np.full(5, -1.0))
    blocks, block = np.arange(2.0 * size), np.empty(2)
    calls.Reduce_scatter_block(blocks, block)
    assert np.array_equal(block, size * blocks[2 * rank : 2 * rank + 2])
    calls.Bcast([own, MPI.DOUBLE], root=0)
    assert np.array_equal(own, np.arange(5.0))
    assert calls.allreduce(rank, op=MPI.SUM) == size * (size - 1) // 2
    assert calls.allgather(rank) == list(range(size))


def test_blocks_of_equal_and_other_lengths(calls):
    from mpi4py import MPI

    rank, size = calls.Get_rank(), calls.Get_size()
    own, everyone = np.full(2, rank, np.int32), np.repeat(np.arange(size, dtype=np.int32), 2)
    out = np.empty((size, 2), np.int32)
    calls.Allgather(own, out)
    assert np.array_equal(out.reshape(-1), everyone)
    out[...] = -1
    calls.Gather(own, out if rank == 0 else None, root=0)
    assert np.array_equal(out.reshape(-1), everyone) if rank == 0 else (out == -1).all()
    own[...] = -1
    calls.Scatter([out, MPI.INT] if rank == 0 else None, own, root=0)
    assert (own == rank).all()
    counts = [each + 1 for each in range(size)]
    starts = [each * (each + 1) // 2 for each in range(size)]
    long, part = np.zeros(sum(counts)), np.full(rank + 1, float(rank))
    calls.Allgatherv(part, [long, counts, starts, MPI.DOUBLE])
    assert np.array_equal(long, np.repeat(np.arange(size), counts))
    gathered = np.zeros(sum(counts))
    calls.Gatherv(part, (gathered, (counts, starts)) if rank == size - 1 else None, root=size - 1)
    assert np.array_equal(gathered, long if rank == size - 1 else np.zeros(sum(counts)))
    part[...] = -1
    calls.Scatterv([long, np.array(counts), starts, MPI.DOUBLE] if rank == 0 else None, part, root=0)
    assert (part == rank).all()
    pairs = np.empty(size)
    calls.Alltoall(rank * 10.0 + np.arange(size), pairs)
    assert np.array_equal(pairs, 10.0 * np.arange(size) + rank)
    received = np.empty(size * (rank + 1))
    calls.Alltoallv([long, counts, starts, MPI.DOUBLE], [received, [rank + 1] * size, None, MPI.DOUBLE])
    assert (received == rank).all()


def test_messages(calls):
    from mpi4py import MPI

    rank, size = calls.Get_rank(), calls.Get_size()
    before, after = (rank - 1) % size, (rank + 1) % size
    got = np.empty(3)
    calls.Sendrecv(np.full(3, float(rank)), dest=after, sendtag=4, recvbuf=got, source=before, recvtag=4)
    assert (got == before).all()
    handle = calls.Irecv([got, MPI.DOUBLE], source=before, tag=9)
    calls.Isend(np.full(3, 10.0 * rank), dest=after, tag=9).Wait()
    handle.Wait()
    assert handle.Test() and (got == 10 * before).all()
    if rank == 0 and size > 1:
        calls.Send(got, dest=1, tag=2)
    elif rank == 1:
        calls.Recv(got, source=MPI.ANY_SOURCE, tag=2)
        assert (got == 10 * (size - 1)).all()
    calls.Send(got, MPI.PROC_NULL)


def test_what_a_buffer_lists_has_to_be_true(auto):
    from mpi4py import MPI

    x, ones, last = np.ones(4, np.float32), [1] * auto.size, auto.rank == auto.size - 1
    for call, text in {
        lambda: auto.Bcast([x, MPI.DOUBLE] if last else x): "buf: expected MPI's type of float32, got that of float64",
        lambda: auto.Bcast([x, 3, MPI.FLOAT] if last else x): "buf: expected counts of 4 elements in blocks one after",
        lambda: auto.Allgatherv(x[:1], [np.ones(auto.size), ones, [7] * auto.size]): "recvbuf: expected counts of",
        lambda: auto.Allreduce(x, x.copy(), op=MPI.MAXLOC): "op: expected one of sum",
        lambda: auto.Allreduce(x, x.copy(), op=MPI.Op.Create(lambda *_: None)): "op: expected one of sum",
    }.items():
        with pytest.raises(ArgumentError) as caught:
            call()
        assert one_line(caught).startswith(text)
        auto.Barrier()
