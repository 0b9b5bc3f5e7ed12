"""Memory that ranks have mapped from files of their own, adopted by a transport and reduced in place."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest

from clcomm.comm.transport.host_memory import MemoryTransport
from clcomm.comm.transport.mapped_files import MappedFile
from tests.transport.references import drawn, same_bits


class Block:
    """A rank's own mapping of a file without a name."""

    def __init__(self, nbytes: int):
        self.descriptor = os.memfd_create("block")
        os.ftruncate(self.descriptor, nbytes)
        self.memory = mmap.mmap(self.descriptor, nbytes)
        self.array, self.is_used = np.frombuffer(self.memory, np.uint8), True

    def file(self) -> MappedFile:
        return MappedFile(self.descriptor, self.array.ctypes.data, self.array.nbytes, lambda: self.is_used)


@pytest.fixture
def transport(bench):
    if not isinstance(bench.transport, MemoryTransport):
        pytest.skip("a transport without shared memory")
    return bench.transport


@pytest.mark.parametrize("length", [1, 1000, 70_001])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_adopted_memory_is_reduced_in_place(bench, transport, length, op):
    blocks = [Block(length * 4 + 4096), Block(length * 4)]
    assert transport.adopt([each.file() for each in blocks])
    for block, start in zip(blocks, (4096, 0), strict=True):
        array = block.array[start:].view(np.float32)
        assert transport.holds(array) and transport.memory.holds_at(array.ctypes.data, array.nbytes)
        array[:] = drawn(bench.rank, length, "float32")
        transport.barrier()
        transport.all_reduce(array, array, op)
        assert same_bits(array, bench.folded([drawn(rank, length, "float32") for rank in range(bench.size)], op))
        transport.barrier()
    addresses = [each.array.ctypes.data for each in blocks]
    transport.memory.free_unused()
    assert all(transport.memory.holds_at(address, 4) for address in addresses)
    for each in blocks:
        each.is_used = bench.rank == 0  # as long as one rank of the host uses it
    transport.memory.free_unused()
    held = bool(transport.memory.comm.bcast(bench.rank, 0) == 0)
    assert all(transport.memory.holds_at(address, 4) == held for address in addresses)
    for each in blocks:
        each.is_used = False
    transport.memory.free_unused()
    assert not any(transport.memory.holds_at(address, 4) for address in addresses)


def test_files_that_a_rank_cannot_map_are_not_adopted(bench, transport):
    block = Block(8192)
    file = block.file()
    if transport.memory.rank == transport.memory.ranks - 1:
        file = file._replace(descriptor=1 << 20)
    adopted = transport.adopt([file])
    assert adopted == (transport.memory.ranks == 1)
    assert transport.memory.holds_at(file.address, 8) == adopted
    block.is_used = False
    transport.memory.free_unused()


def test_all_agree(bench, transport):
    for rank in range(bench.size):
        assert not transport.all_agree(bench.rank != rank)
    assert transport.all_agree(True)
