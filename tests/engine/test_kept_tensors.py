"""What an operation keeps for its backward, as arguments or attributes, and what is written to it in between.

Gradients are those of the values at the operation, or backward raises an error: never those of other values.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
from mpi4py import MPI

import clcomm.engine as ours
from clcomm import Communicator
from clcomm.base.errors import ArgumentError
from clcomm.engine import Tensor, fused, no_grad
from clcomm.engine import functional as F
from clcomm.engine.nn.utils.rnn import pack_padded_sequence
from clcomm.engine.recomputation import checkpoint
from clcomm.optim import SGD

_DRAWS = int(os.environ.get("CLCOMM_KEPT_CASES", "3"))


def numbers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.uniform(0.1, 0.9, shape).astype(np.float32)


def classes(rng: np.random.Generator, most: int, *shape: int) -> np.ndarray:
    return rng.integers(0, most, shape).astype(np.int32)


def booleans(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.random(shape) < 0.5


def batch_norm(x, weight, bias, mean, variance):
    return F.batch_norm(x, mean, variance, weight, bias, training=False)


def recurrent(x, lengths):
    ours.manual_seed(3)
    cell = ours.LSTM(3, 2, device=x.device, batch_first=True)
    return cell(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[0].data


#: By name: the function, and what draws its arguments.
KINDS: dict[str, tuple[Callable, Callable]] = {
    "embedding": (lambda w, i: F.embedding(i, w), lambda r: (numbers(r, 5, 3), classes(r, 5, 4))),
    "gather": (lambda x, i: F.gather(x, 1, i), lambda r: (numbers(r, 3, 4), classes(r, 4, 3, 2))),
    "index_select": (lambda x, i: F.index_select(x, 0, i), lambda r: (numbers(r, 3, 4), classes(r, 3, 5))),
    "scatter_add": (
        lambda x, s, i: F.scatter_add(x, 0, i, s),
        lambda r: (numbers(r, 4, 3), numbers(r, 2, 3), classes(r, 4, 2, 3)),
    ),
    "masked_fill": (lambda x, m: F.masked_fill(x, m, 2.0), lambda r: (numbers(r, 3, 4), booleans(r, 3, 4))),
    "where": (
        lambda a, b, m: F.where(m, a, b), lambda r: (numbers(r, 3, 4), numbers(r, 3, 4), booleans(r, 3, 4))
    ),
    "cross_entropy": (lambda x, y: F.cross_entropy(x, y), lambda r: (numbers(r, 4, 5), classes(r, 5, 4))),
    "smoothed": (
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), lambda r: (numbers(r, 4, 5), classes(r, 5, 4))
    ),
    "weighted": (
        lambda x, w, y: F.cross_entropy(x, y, weight=w.detach()),
        lambda r: (numbers(r, 4, 5), numbers(r, 5), classes(r, 5, 4)),
    ),
    "nll": (lambda x, y: F.nll_loss(x, y), lambda r: (numbers(r, 4, 5), classes(r, 5, 4))),
    "ctc": (
        lambda x, y, n, m: F.ctc_loss(x, y, n, m),
        lambda r: (numbers(r, 6, 2, 4), 1 + classes(r, 3, 2, 2), np.int32([6, 5]), np.int32([2, 1])),
    ),
    "weights of logits": (
        lambda x, w: F.binary_cross_entropy_with_logits(x, x.detach() * 0.5, weight=w.detach()),
        lambda r: (numbers(r, 3, 4), numbers(r, 3, 4)),
    ),
    "attention": (
        lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m.detach()),
        lambda r: (numbers(r, 1, 2, 3, 4), numbers(r, 3, 3)),
    ),
    "batch_norm": (batch_norm, lambda r: (numbers(r, 4, 3), *(numbers(r, 3) for _ in range(4)))),
    "recurrent": (recurrent, lambda r: (numbers(r, 2, 3, 3), np.int32([3, 2]))),
    "linear and relu": (lambda x, w, b: F.relu(F.linear(x, w, b)), lambda r: (
        numbers(r, 4, 3), numbers(r, 2, 3), numbers(r, 2)
    )),
    "fused": (
        fused(lambda x, y: (x * y).sigmoid() * x), lambda r: (numbers(r, 3, 4), numbers(r, 3, 4))
    ),
    "checkpoint": (
        lambda w, i: checkpoint(lambda own, at: F.embedding(at, own).square(), w, i),
        lambda r: (numbers(r, 5, 3), classes(r, 5, 4)),
    ),
    "max_pool": (lambda x: F.max_pool2d(x, 2), lambda r: (numbers(r, 1, 2, 4, 4),)),
}  # fmt: skip


def gradients(device, function, arrays, written: int | None, how: str = "") -> list[np.ndarray | None]:
    """Return the gradients of all floats, where one of the arguments is written to between forward and backward."""
    tensors = [Tensor(array, device, requires_grad=array.dtype == np.float32) for array in arrays]
    y = function(*tensors)
    upstream = Tensor(np.linspace(1.0, 2.0, y.numel(), dtype=np.float32).reshape(y.shape), device)
    if written is not None:
        x, values = tensors[written], arrays[written]
        other = ~values if values.dtype == bool else np.flip(values).copy() if how == "flip" else np.zeros_like(values)
        with no_grad():
            if how == "detach":
                x.detach().copy_from(other)
            elif how == "item":
                x[tuple([0] * x.ndim)] = (not values.flat[0]) if values.dtype == bool else 0
            else:
                x.copy_from(other)
    y.backward(upstream)
    return [None if x.grad is None else x.grad.numpy() for x in tensors]


@pytest.mark.parametrize("name", KINDS)
def test_gradients_are_of_the_values_at_the_operation_or_backward_refuses(device, name):
    function, draw = KINDS[name]
    for seed in range(_DRAWS):
        arrays = draw(np.random.default_rng([seed, len(name)]))
        expected = gradients(device, function, arrays, None)
        for written in range(len(arrays)):
            for how in ("zero", "flip", "detach", "item"):
                try:
                    found = gradients(device, function, arrays, written, how)
                except ArgumentError as error:
                    assert "was overwritten after it" in str(error), str(error)
                    continue
                for got, own in zip(found, expected, strict=True):
                    assert (got is None) == (own is None)
                    if got is not None:
                        np.testing.assert_array_equal(got, own, f"{name}: {how} of argument {written}")


def test_a_fused_operation_in_place_reads_what_it_had(device):
    x = np.float32([[0.5, -1.0, 2.0]])
    function = fused(lambda own: (own * own).sigmoid() * own)
    results = []
    for in_place in (False, True):
        leaf = Tensor(x, device, requires_grad=True)
        h = leaf * 1.0
        if in_place:
            F.overwrite(h, function)
        else:
            h = function(h)
        h.sum().backward()
        results.append(leaf.grad.numpy())
    np.testing.assert_allclose(*results, rtol=1e-6)


#: Calls that write to an array, `(comm, array)`; prepared ones return what writes.
WRITES = {
    "broadcast": lambda comm, x: comm.broadcast(x),
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "ring": lambda comm, x: comm.all_reduce(x, algorithm="ring"),
    "out": lambda comm, x: comm.all_reduce(np.ones(x.shape, np.float32), out=x),
    "all_gather": lambda comm, x: comm.all_gather(np.ones(x.shape, np.float32), out=x),
    "gather": lambda comm, x: comm.gather(np.ones(x.shape, np.float32), out=x),
    "scatter": lambda comm, x: comm.scatter([np.ones(x.shape, np.float32)], out=x),
    "scan": lambda comm, x: comm.scan(np.ones(x.shape, np.float32), out=x),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(np.ones(x.shape, np.float32), out=x),
    "all_to_all": lambda comm, x: comm.all_to_all([np.ones(x.shape, np.float32)], [np.asarray(x)]),
    "in place": lambda comm, x: comm.all_gather_in_place(x),
    "prepared": lambda comm, x: comm.all_reduce_init(x),
    "prepared gather": lambda comm, x: comm.all_gather_in_place_init(x),
    "prepared start": lambda comm, x: comm.all_reduce_async_init(x),
    "all_reduce_async": lambda comm, x: comm.all_reduce_async(x).wait(),
    "all_gather_async": lambda comm, x: comm.all_gather_async(np.ones(x.shape, np.float32), out=x).wait(),
    "irecv": lambda comm, x: (comm.irecv(x), comm.isend(np.ones(x.shape, np.float32), 0)),
}  # fmt: skip
#: Calls that begin to write to an array.
STARTS = {
    "all_reduce_async": lambda comm, x: comm.all_reduce_async(x),
    "all_gather_async": lambda comm, x: comm.all_gather_async(np.ones(x.size // comm.size, np.float32), out=x),
    "irecv": lambda comm, x: comm.irecv(x, (comm.rank + 1) % comm.size),
}
#: How a program names the memory of a tensor of shape (64, 3), or a part of it.
NAMES = {
    "tensor": lambda x: x, "array": np.asarray, "dlpack": np.from_dlpack,
    "rows": lambda x: np.asarray(x)[8:16], "row": lambda x: np.from_dlpack(x)[63],
    "bytes": lambda x: np.frombuffer(memoryview(np.asarray(x)), np.float32)[5:9],
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", WRITES)
def test_a_collective_that_writes_to_a_tensor_counts_as_a_write(how, name):
    comm = Communicator(transport="solo")
    x = Tensor(np.ones((64, 3), np.float32), requires_grad=True) * 2.0
    array = NAMES[name](x)
    for turn in range(2):  # the second call has a plan
        loss = (x * x).sum()
        done = WRITES[how](comm, array)
        if how.startswith("prepared"):
            loss = (x * x).sum()
            done()
        with pytest.raises(ArgumentError, match="backward: Mul kept a tensor"):
            loss.backward()
        loss = (x * x).sum()
        comm.all_gather(array)  # which reads it
        comm.broadcast(np.ones(3))
        if turn:
            loss.backward()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["array", "rows"])
@pytest.mark.parametrize("how", STARTS)
def test_a_collective_in_the_background_writes_from_its_start_to_its_end(how, name):
    comm, tell = Communicator(), MPI.COMM_WORLD.Barrier
    x = Tensor(np.ones((12 * comm.size, 8), np.float32), requires_grad=True) * 2.0
    array = np.asarray(x) if name == "array" else np.asarray(x)[comm.size : 3 * comm.size]
    before = (x * x).sum()
    if comm.rank:
        tell()
        before = None
    handle = STARTS[how](comm, array)
    between = (x * x).sum() if comm.rank == 0 else None
    if comm.rank == 0:
        with pytest.raises(ArgumentError, match="backward: Mul kept a tensor"):
            before.backward()
        tell()
    if how == "irecv":
        comm.send(np.ones(array.shape, np.float32), (comm.rank - 1) % comm.size)
    handle.wait()
    after = (x * x).sum()
    if between is not None:
        with pytest.raises(ArgumentError, match="backward: Mul kept a tensor"):
            between.backward()
    handle.wait()
    after.backward()


def test_a_collective_writes_to_the_parameters_that_an_array_of_it_is_of():
    comm, model = Communicator(transport="solo"), ours.nn.Linear(3, 2)
    SGD(model, 0.1)
    loss = model(Tensor(np.ones((4, 3), np.float32), requires_grad=True)).sum()
    comm.broadcast(np.asarray(model.weight)[1:])
    with pytest.raises(ArgumentError, match="kept a tensor"):
        loss.backward()
