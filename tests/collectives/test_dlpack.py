"""Other libraries' tensors as arguments of the collectives, by DLPack: on their memory, or refused in one line."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.base.errors import ArgumentError
from clcomm.engine import Linear, Tensor
from tests.adapters.libraries import Exported, library

ON_RANKS = pytest.mark.mpi(min_size=1)


@pytest.fixture
def comm():
    with Communicator() as made:
        yield made


def of_torch(array):
    library("torch")
    import torch

    return torch.from_numpy(array.copy())


TENSORS = {"any": lambda array: Exported(array.copy()), "clcomm": lambda array: Tensor(array), "torch": of_torch}


@pytest.fixture(params=list(TENSORS))
def tensor(request):
    return TENSORS[request.param]


def values(of) -> list:
    return np.from_dlpack(of).tolist()


@ON_RANKS
def test_collectives_read_and_write_a_tensors_own_memory_and_return_it(comm, tensor):
    size, own = comm.size, np.full(4 * comm.size, comm.rank + 1, np.float32)
    total = size * (size + 1) / 2
    reduced = tensor(own)
    at = np.from_dlpack(reduced).ctypes.data
    assert comm.all_reduce(reduced) is reduced and values(reduced) == [total] * 4 * size
    assert np.from_dlpack(reduced).ctypes.data == at
    out = tensor(np.zeros_like(own))
    assert comm.all_reduce(tensor(own), "max", out=out) is out and values(out) == [size] * 4 * size
    assert comm.all_reduce(tensor(own), out=out, algorithm="ring") is out and values(out) == [total] * 4 * size
    sent = tensor(own)
    assert comm.broadcast(sent, size - 1) is sent and values(sent) == [size] * 4 * size
    gathered = tensor(np.zeros((size, 4 * size), np.float32))
    assert comm.all_gather(tensor(own), out=gathered) is gathered
    assert values(gathered) == [[r + 1] * 4 * size for r in range(size)]
    block = tensor(np.zeros(4, np.float32))
    assert comm.reduce_scatter(tensor(own), out=block) is block and values(block) == [total] * 4
    assert comm.all_gather(tensor(own)).shape == (size, 4 * size)
    counted = comm.stats.all_reduces()
    assert counted["total_allreduce_calls"] == 3 and counted["total_bytes_sent"] == 3 * own.nbytes


@ON_RANKS
def test_prepared_and_background_all_reduces_take_tensors(comm, tensor):
    own, out = tensor(np.full(6, comm.rank, np.float32)), tensor(np.zeros(6, np.float32))
    total = comm.size * (comm.size - 1) / 2
    assert comm.all_reduce_async(own, out=out).wait() is out and values(out) == [total] * 6
    run = comm.all_reduce_init(own, "mean", out=out)
    run()
    assert values(out) == [total / comm.size] * 6
    assert comm.all_reduce_async_init(own, out=out)().wait() is out and values(out) == [total] * 6


@ON_RANKS
def test_what_cannot_be_shared_or_written_to_is_refused_in_one_line(comm):
    frozen = np.ones(3, np.float32)
    frozen.flags.writeable = False
    refused = [(lambda: comm.all_reduce(Exported(frozen)), "array: expected a writable array, got a read-only one"),
               (lambda: comm.broadcast(Elsewhere()), "array: expected a tensor in the host's memory that"),
               (lambda: comm.all_gather(np.ones(3), out=[1]), "out: expected a NumPy array, got list")]  # fmt: skip
    for call, text in refused:
        with pytest.raises(ArgumentError) as caught:
            call()
        assert str(caught.value).startswith(text) and "\n" not in str(caught.value)
    layer = Linear(3, 2)
    layer.flat_space()
    layer(Tensor(np.ones((1, 3), np.float32))).sum().backward()
    with pytest.raises(ArgumentError, match=r"array: .* got one of which others get a copy; use numpy"):
        comm.all_reduce(layer.weight.grad)  # which would leave the gradient as it is
    out = Exported(np.zeros(3, np.float32))
    comm.all_reduce(Exported(frozen), out=out)  # which is only read
    assert values(out) == [comm.size] * 3


class Elsewhere:
    """A tensor of a GPU."""

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, **options):
        raise BufferError("the tensor is on cuda:0")


@ON_RANKS
def test_jaxs_arrays_are_read_and_never_written_to(comm):
    library("jax")
    import clcomm.jax  # noqa: F401  # before JAX's first array
    import jax  # isort: skip

    array = jax.numpy.full(5, comm.rank, "float32")
    out = np.empty(5, np.float32)
    assert comm.all_reduce(array, out=out) is out and (out == comm.size * (comm.size - 1) / 2).all()
    with pytest.raises(ArgumentError, match="array: expected a writable array, got a read-only one"):
        comm.all_reduce(array)


@ON_RANKS
def test_collectives_of_no_elements_are_calls_like_others(comm, tensor):
    nothing = tensor(np.zeros((0, 3), np.float32))
    assert comm.all_reduce(nothing) is nothing and comm.broadcast(nothing) is nothing
    assert comm.all_reduce_async(nothing).wait() is nothing
    assert np.shape(comm.all_gather(nothing))[-2:] == (0, 3) and np.shape(comm.reduce_scatter(nothing)) == (0, 3)
