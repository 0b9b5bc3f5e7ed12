"""Collectives on arrays in a rank's own memory: their bits, whatever their size and however late a rank is."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.base.errors import MismatchError
from clcomm.base.host.arrays import to_bfloat16
from clcomm.comm.transport.direct_exchange import LEAST_BYTES, LEAST_READ_BYTES, OtherMemory
from clcomm.comm.transport.reduction import reduce_in_rank_order
from tests.helpers import Recorder
from tests.transport.references import drawn, folded, same_bits

pytestmark = pytest.mark.mpi(min_size=2)

#: Bytes about those of a slot, on any number of ranks, and of several.
SIZES = [0, 8, 4096, *(slots * (64 << 10) + more for slots in (1, 2, 3) for more in (-8, 0, 8))]
#: Those of which ranks read each other's shards, of one piece and of several.
LARGE = [LEAST_BYTES + more for more in (-8, 0, 8)] + [(1 << 20) + 8, 5 << 20]
DTYPES = ["float32", "float64", "float16", "complex128", "int64", "uint8"]


def rows(auto: Communicator, nbytes: int, dtype: str, seed: int = 0) -> list[np.ndarray]:
    count = nbytes // np.dtype(dtype).itemsize
    return [drawn(rank, count, dtype, seed) for rank in range(auto.size)]


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_the_fold_in_rank_order(auto, nbytes, dtype, op):
    if (op == "mean" and dtype in ("int64", "uint8")) or (op == "max" and dtype == "complex128"):
        pytest.skip("no such operation")
    everyone = rows(auto, nbytes, dtype)
    expected, own = folded(everyone, op), everyone[auto.rank]
    array, out = own.copy(), np.full_like(own, 7)
    prepared = auto.all_reduce_init(array, op)
    prepared()
    assert same_bits(array, expected)
    assert same_bits(auto.all_reduce(own, op, out=out), expected)
    assert same_bits(auto.all_reduce(own.copy(), op), expected)


@pytest.mark.parametrize("nbytes", LARGE)
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
@pytest.mark.parametrize("reads", [True, False])
def test_large_arrays(monkeypatch, nbytes, dtype, reads):
    """Ranks read each other's memory, or where they may not, the pieces go through slots: the same bits."""
    if not reads:
        monkeypatch.setattr(OtherMemory, "_finds", lambda self, places, marks: False)
    with Communicator() as comm:
        assert (comm.world.staged._direct is not None) == reads
        everyone = rows(comm, nbytes, dtype)
        expected, own = folded(everyone, "sum"), everyone[comm.rank]
        array, out = own.copy(), np.full_like(own, 7)
        comm.all_reduce_init(array)()
        assert same_bits(array, expected)
        assert same_bits(comm.all_reduce(own, out=out), expected)
        assert same_bits(own, everyone[comm.rank])


def test_late_ranks_read_large_arrays_of_their_call(auto):
    """An array is given back, and written over, as soon as the call returns; ranks pause at drawn moments."""
    rng, pauses = random.Random(11), random.Random(auto.rank)
    for number in range(25):
        everyone = rows(auto, rng.choice([LEAST_BYTES, 2 << 20, 4096]), "float32", number)
        array = everyone[auto.rank].copy()
        if pauses.random() < 0.3:
            time.sleep(0.002)
        auto.all_reduce(array, "mean")
        assert same_bits(array, folded(everyone, "mean"))
        array.fill(np.nan)


@pytest.mark.parametrize("nbytes", [*SIZES[3:], LARGE[1], LARGE[-1]])
def test_a_result_in_common_memory(auto, nbytes):
    everyone = rows(auto, nbytes, "float32")
    out = auto.allocate_common(nbytes).view(np.float32)
    for _ in range(3):
        auto.all_reduce(everyone[auto.rank].copy(), "mean", out=out)
        assert same_bits(out, folded(everyone, "mean"))  # whatever the other ranks still do


def test_late_ranks_read_the_pieces_of_their_call(auto):
    """Ranks pause at drawn moments, and arrays of several sizes take turns with those in shared memory."""
    rng, pauses = random.Random(5), random.Random(auto.rank)
    own = auto.allocate(4096).view(np.float32)
    for number in range(60):
        nbytes = rng.choice([8, 4096, 200_000, 4096])
        everyone = rows(auto, nbytes, "float32", number)
        array = own[: nbytes // 4] if nbytes <= 4096 and rng.random() < 0.3 else np.empty(nbytes // 4, np.float32)
        array[:] = everyone[auto.rank]
        if pauses.random() < 0.2:
            time.sleep(0.002)
        assert same_bits(auto.all_reduce(array), folded(everyone, "sum"))


def test_late_ranks_and_kernels(auto):
    """Prepared all-reduces, in one kernel where there is one, take turns with others, and ranks pause between them."""
    rng, pauses = random.Random(7), random.Random(auto.rank)
    sizes = [4, 4096, 64 << 10, 80_000]
    arrays = [np.empty(nbytes // 4, np.float32) for nbytes in sizes]
    arrays += [auto.allocate(nbytes).view(np.float32) for nbytes in sizes]
    prepared = [auto.all_reduce_init(array, "mean") for array in arrays]
    for number in range(80):
        index = rng.randrange(len(arrays))
        everyone = rows(auto, arrays[index].nbytes, "float32", number)
        arrays[index][:] = everyone[auto.rank]
        if pauses.random() < 0.2:
            time.sleep(0.002)
        if rng.random() < 0.7:
            prepared[index]()
        else:
            auto.all_reduce(arrays[index], "mean")
        assert same_bits(arrays[index], folded(everyone, "mean"))


@pytest.fixture(params=[True, False])
def either(request, monkeypatch):
    """Ranks that read each other's memory, and ranks that may not."""
    if not request.param:
        monkeypatch.setattr(OtherMemory, "_finds", lambda self, places, marks: False)
    with Communicator() as comm:
        yield comm


#: Bytes of a rank's block: none, one element, about a slot, those from which blocks are read directly, several slots.
BLOCKS = [0, 16, *(size + more for size in (64 << 10, LEAST_READ_BYTES, LEAST_BYTES) for more in (-16, 0, 16)), 3 << 20]


@pytest.mark.parametrize("nbytes", BLOCKS)
@pytest.mark.parametrize("dtype", ["float32", "complex128", "uint8", "bfloat16"])
def test_broadcast_gather_and_reduce_scatter(either, nbytes, dtype):
    """Twice each, from a late rank, and the arrays are written over as soon as a call returns."""
    comm, halves = either, dtype == "bfloat16"
    count, recorder = nbytes // (2 if halves else np.dtype(dtype).itemsize), Recorder()
    comm.add_observer(recorder)
    for number in range(2):
        everyone = [drawn(rank, comm.size * count, "float32" if halves else dtype, number) for rank in range(comm.size)]
        everyone = [to_bfloat16(row) for row in everyone] if halves else everyone
        own, last = everyone[comm.rank].copy(), comm.size - 1
        if (comm.rank + number) % 2:
            time.sleep(0.002)
        block = own[:count].copy()
        gathered = comm.all_gather(block)
        block.fill(7)
        assert same_bits(gathered, np.stack([row[:count] for row in everyone]))
        blocks = own.reshape(comm.size, count)
        summed = comm.reduce_scatter(blocks)
        assert same_bits(own, everyone[comm.rank])
        blocks.fill(8)
        expected = np.empty_like(own)
        reduce_in_rank_order(everyone, expected, "sum")
        assert same_bits(summed[0], expected[comm.rank * count :][:count])
        own = everyone[comm.rank].copy()
        assert same_bits(comm.broadcast(own, last), everyone[last])
        own.fill(9)
    assert {event.transport for event in recorder.events} == {"staged"}


@pytest.mark.parametrize("nbytes", [16, LEAST_READ_BYTES, LEAST_BYTES])
def test_results_in_place_of_their_operands(either, nbytes):
    """A block of an array is gathered into it, one beside its place too, and a sum is written over its operand."""
    comm, count = either, nbytes // 4
    everyone = [drawn(rank, comm.size * count, "float32", 3) for rank in range(comm.size)]
    blocks = np.concatenate([row[:count] for row in everyone])
    for place in (comm.rank * count, 0, 4):
        out = np.empty(comm.size * count, np.float32)
        block = out[place : place + count]
        block[:] = everyone[comm.rank][:count]
        assert same_bits(comm.all_gather(block, out=out), blocks)
    expected = folded(everyone, "mean")[comm.rank * count :][:count]
    for place in (comm.rank, 0, comm.size - 1):
        array = everyone[comm.rank].copy().reshape(comm.size, count)
        assert same_bits(comm.reduce_scatter(array, "mean", out=array[place : place + 1])[0], expected)


@pytest.mark.parametrize("checks", ["on", "off"])
def test_other_lengths_are_refused_on_every_rank(monkeypatch, checks):
    monkeypatch.setenv("CLCOMM_CHECKS", checks)
    with Communicator() as comm:
        for more in (1, 100_000):
            array = np.ones(100_000 + more * (comm.rank == 1), np.float32)
            with pytest.raises(MismatchError, match="collective: expected"):
                comm.all_reduce(array)
        comm.barrier()
