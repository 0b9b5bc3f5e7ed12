"""LizarDist's calls: what its Communicator has, without its faults."""

from __future__ import annotations

import importlib
import logging
import math

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.base.errors import ArgumentError
from clcomm.lizardist.utils.logger import get_logger
from tests.helpers import one_line
from tests.transport.references import same_bits


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
    for op, expected in ((MPI.SUM, total), (MPI.MIN, 1), (MPI.MAX, comm.size), (MPI.PROD, math.factorial(comm.size))):
        assert comm.allreduce(data, op=op).tolist() == [expected] * 3
        assert comm.bucketed_allreduce([data], op=op)[0].tolist() == [expected] * 3


OPS = ("SUM", "MIN", "MAX", "PROD", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR")
NO_OPS = ("MINLOC", "MAXLOC", "REPLACE", "NO_OP", "OP_NULL")


@pytest.mark.parametrize("name", OPS)
def test_every_reduction_of_mpi_gives_what_mpi_gives(comm, name):
    """By MPI itself on the same values where that has the pair; small whole numbers, so that each sum is exact."""
    from mpi4py import MPI

    op, world, tried = getattr(MPI, name), comm.comm or MPI.COMM_SELF, []
    for dtype in ("int8", "uint16", "int32", "int64", "bool", "float32", "float64", "complex64"):
        data = np.random.default_rng([comm.rank, len(name)]).integers(0, 4, 401).astype(dtype)
        expected = np.empty_like(data)
        try:
            world.Allreduce(data, expected, op=op)
        except MPI.Exception:
            continue  # it has no such pair: LAND of floats, say, or SUM of booleans
        tried.append(dtype)
        memory = comm.allocate(data.nbytes).view(dtype)
        memory[:] = data
        for source in (data, memory):
            assert same_bits(comm.allreduce(source, op), expected), dtype
        assert same_bits(comm.bucketed_allreduce([data[:17], data[17:]], op)[1], expected[17:])
        assert same_bits(comm.all_reduce_async(data.copy(), name.lower()).wait(), expected)
    assert {"int8", "uint16", "int32", "int64"} <= {*tried}


def test_reductions_that_are_not_served_are_errors_of_one_line(comm):
    from mpi4py import MPI

    listed = "sum, mean, min, max, prod, land, lor, lxor, band, bor, bxor"
    data = np.ones(3)
    for name in NO_OPS:
        with pytest.raises(ArgumentError) as caught:
            comm.allreduce(data, getattr(MPI, name))
        assert one_line(caught) == f"op: expected one of {listed}, got 'MPI.{name}'"
    own = MPI.Op.Create(lambda a, b, datatype: None)
    with pytest.raises(ArgumentError) as caught:
        comm.allreduce(data, own)
    own.Free()
    assert one_line(caught) == f'op: expected one of {listed}, got "an operation of the program\'s own"'
    for name in OPS[4:]:
        with pytest.raises(ArgumentError) as caught:
            comm.allreduce(data, getattr(MPI, name))
        assert one_line(caught) == f"op: {name.lower()!r} needs integers or booleans, got float64"


def test_every_reduction_that_mpi_names_is_tried():
    from mpi4py import MPI

    found = {name for name, value in vars(MPI).items() if isinstance(value, MPI.Op)}
    assert found == {*OPS, *NO_OPS}


@pytest.mark.parametrize(
    ("given", "named", "bucket_size", "use_bucketing"),
    [
        ((), {}, 1 << 20, True),
        ((1 << 16,), {}, 1 << 16, True),
        ((1024 * 1024, True), {}, 1 << 20, True),
        ((np.int64(4096), False), {}, 4096, False),
        ((2048,), {"use_bucketing": False}, 2048, False),
        ((None, False), {}, 1 << 20, False),
        ((), {"bucket_size": 512, "use_bucketing": False}, 512, False),
    ],
)
def test_arguments_by_position(given, named, bucket_size, use_bucketing):
    with Communicator(*given, transport="solo", **named) as made:
        assert (made.bucket_size, made.use_bucketing) == (bucket_size, use_bucketing)


@pytest.mark.parametrize(
    ("given", "named", "message"),
    [
        ((1024,), {"bucket_size": 2048}, "bucket_size: expected once, got 1024 by position and 2048 by name"),
        ((True,), {}, "comm: expected an mpi4py intracommunicator such as MPI.COMM_WORLD, got bool"),
        ((-3,), {}, "bucket_size: expected a positive number of bytes such as 1048576, '1MiB' or '256KiB', got -3"),
    ],
)
def test_arguments_by_position_that_are_refused(given, named, message):
    with pytest.raises(ArgumentError) as caught:
        Communicator(*given, **named)
    assert one_line(caught) == message


def test_counts_are_attributes_and_can_be_reset(comm):
    """A drawn sequence of calls, counted by hand; `stats` goes on through each reset."""
    rng, calls, nbytes, all_calls = np.random.default_rng(5), 0, 0, 0
    for _ in range(60):
        call, size = int(rng.integers(6)), int(rng.integers(1, 3000))
        if call == 0:
            comm.allreduce(np.ones(size, np.float32))
            calls, nbytes = calls + 1, nbytes + 4 * size
        elif call == 1:
            comm.bucketed_allreduce([np.ones(size), np.ones(size)])
            calls, nbytes = calls + 1, nbytes + 16 * size
        elif call == 2:
            comm.all_reduce_async(np.ones(size)).wait()
            calls, nbytes = calls + 1, nbytes + 8 * size
        elif call == 3:
            comm.bcast(np.ones(size))
            comm.barrier()
        elif call == 4:
            comm.stats.reset()
            calls = nbytes = all_calls = 0
        else:
            all_calls, calls, nbytes = all_calls + calls, 0, 0
            comm._reset_bucket_stats()
        assert (comm.total_allreduce_calls, comm.total_bytes_sent) == (calls, nbytes)
        assert comm.average_bytes_per_call == (nbytes / calls if calls else 0.0)
        assert comm.get_bucket_stats() == {
            "total_allreduce_calls": calls, "total_bytes_sent": nbytes,
            "average_bytes_per_call": comm.average_bytes_per_call,
        }  # fmt: skip
        assert comm.stats.total("all_reduce")["calls"] == all_calls + calls


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


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO, logging.ERROR])
@pytest.mark.parametrize("name", ["lizardist", "of_a_test"])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_logger_writes_each_message_once_with_its_rank(capsys, rank, name, level):
    for _ in range(3):  # LizarDist's writes it as often as it was asked for
        logger = get_logger(rank, name, level)
    assert logger is logging.getLogger(name) and logger.level == level
    for each in (logging.DEBUG, logging.INFO, logging.ERROR):
        logger.log(each, "step %d", 7)
    lines = capsys.readouterr().err.splitlines()
    wanted = [each for each in (logging.DEBUG, logging.INFO, logging.ERROR) if each >= level]
    assert len(lines) == len(wanted)
    for line, each in zip(lines, wanted, strict=True):
        assert line.startswith(f"[Rank {rank}] ")
        assert line.endswith(f" - {name} - {logging.getLevelName(each)} - step 7")


@pytest.mark.parametrize(
    "module, name",
    [
        ("distributed.communicator", "Communicator"),
        ("distributed.sync", "Synchronizer"),
        ("utils.logger", "get_logger"),
    ],
)
def test_lizardists_imports(module, name):
    assert callable(getattr(importlib.import_module(f"clcomm.lizardist.{module}"), name))


def test_buckets_are_counted_and_a_size_of_0_stands_for_none():
    comm = Communicator(bucket_size=0, use_bucketing=False)
    comm.bucketed_allreduce([np.ones(3, np.float32)] * 4)
    assert comm.total_buckets == 4
    comm.use_bucketing = True
    comm.bucketed_allreduce([np.ones(3, np.float32)] * 4)
    assert comm.total_buckets == 5
    with pytest.raises(ArgumentError, match="bucket_size"):
        Communicator(bucket_size=0)
