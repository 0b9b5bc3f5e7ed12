"""All-reduces of arrays in a rank's own memory: their bits, whatever their size and however late a rank is."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.errors import MismatchError
from clcomm.transport.direct_reduction import LEAST_BYTES
from clcomm.transport.other_memory import OtherMemory
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


@pytest.mark.parametrize("checks", ["on", "off"])
def test_other_lengths_are_refused_on_every_rank(monkeypatch, checks):
    monkeypatch.setenv("CLCOMM_CHECKS", checks)
    with Communicator() as comm:
        for more in (1, 100_000):
            array = np.ones(100_000 + more * (comm.rank == 1), np.float32)
            with pytest.raises(MismatchError, match="collective: expected"):
                comm.all_reduce(array)
        comm.barrier()
