"""All-reduces through a stage in shared memory: the bits of the Communicator's own, in pieces too."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from clcomm.comm.tensors import background  # noqa: E402
from clcomm.comm.tensors.arrays import array_of  # noqa: E402
from clcomm.comm.tensors.background import Staging  # noqa: E402

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.complex64)
#: Lengths up to one piece of 1 KiB of float32, a whole number of pieces, and others.
LENGTHS = (0, 1, 7, 256, 257, 1024, 1500)


def values_of(rank, length, dtype):
    generator = torch.Generator().manual_seed(rank)
    return (10 * torch.randn(length, generator=generator)).to(dtype)


@pytest.fixture
def staged(auto, monkeypatch):
    """A Communicator that shares memory, and a Staging on it of at most 1 KiB."""
    if not auto.shares_memory:
        pytest.skip("the ranks share no memory")
    monkeypatch.setattr(background, "LEAST_BYTES", 128)
    monkeypatch.setattr(background, "MOST_BYTES", 1024)
    return auto, Staging(auto)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_wide", [False, True])
def test_the_bits_are_those_of_the_communicator(staged, dtype, is_wide):
    comm, stage = staged
    summed = torch.float32 if is_wide and dtype.itemsize == 2 else dtype
    for length in LENGTHS:
        source, target = values_of(comm.rank, length, dtype), torch.zeros(length, dtype=dtype)
        kept, expected = source.clone(), source.to(summed, copy=True)
        comm.all_reduce(array_of(expected), "sum")
        stage.all_reduce(source, target, "sum", summed=summed)
        assert target.equal(expected.to(dtype)), length
        assert source.equal(kept), length
        stage.all_reduce(source, source, "sum", summed=summed)
        assert source.equal(target), length


@pytest.mark.mpi(min_size=2)
def test_what_is_longer_than_the_memory_is_counted_once(staged):
    comm, stage = staged
    for length in LENGTHS[1:]:
        before = comm.get_bucket_stats()
        stage.all_reduce(torch.ones(length), torch.zeros(length), "sum", summed=torch.float32, label="counted")
        after = comm.get_bucket_stats()
        assert after["total_allreduce_calls"] - before["total_allreduce_calls"] == 1
        assert after["total_bytes_sent"] - before["total_bytes_sent"] == 4 * length
