"""All-reduces of JAX's arrays in the background: several at a time, in programs and between them, with gradients."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed; pip install -e '.[jax]'")

from clcomm.jax import all_reduce, all_reduce_async  # before JAX's first array  # isort: skip
import jax
import jax.numpy as jnp

from clcomm import Communicator
from clcomm.base.errors import ArgumentError, MismatchError
from tests.adapters.test_jax import whole

ON_RANKS = pytest.mark.mpi(min_size=1)
JITS = pytest.mark.parametrize("jit", [False, True])


@pytest.fixture
def comm():
    with jax.enable_x64(False):
        yield Communicator()


@ON_RANKS
@JITS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "complex64"])
def test_several_are_in_flight_and_have_the_formula_s_values(comm, jit, dtype):
    def calls(x, y):
        first = all_reduce_async({"x": x, "empty": x[:0]}, comm=comm)
        others = [all_reduce_async(y + n, comm=comm) for n in range(3)]  # of one kind
        flying.append(len(comm.unfinished()))
        squares = all_reduce(y * y, comm=comm)  # a blocking one in between
        return *(each.wait() for each in reversed(others)), first.wait()["x"], squares

    x, y = (jnp.asarray(whole(comm.rank, shape)).astype(dtype) for shape in ((5, 2), (7,)))
    flying, run = [], jax.jit(calls) if jit else calls
    for _ in range(3):  # the memory is used again
        got = run(x, y)
    assert jit or comm.size == 1 or flying[-1] >= 3  # the first time each is prepared, which waits for the others
    ys = [whole(rank, (7,)) for rank in range(comm.size)]
    wanted = *(sum(each + n for each in ys) for n in (2, 1, 0)), sum(whole(r, (5, 2)) for r in range(comm.size))
    for found, expected in zip(got, (*wanted, sum(each * each for each in ys)), strict=True):
        assert found.dtype == x.dtype
        assert (np.asarray(found.astype("complex64")) == expected).all()


@ON_RANKS
@JITS
def test_gradients_are_those_of_the_blocking_ones_and_are_in_flight_in_backward_too(comm, jit):
    weights = jnp.arange(1.0, 7.0)

    def loss(reduce, x):
        parts = reduce([x, jnp.sin(x), x * x])
        return (comm.rank + 1.0) * sum((each * weights * (n + 1)).sum() for n, each in enumerate(parts))

    def asynchronous(parts):
        handles = [all_reduce_async(each, "mean", comm=comm) for each in parts]
        return [handle.wait() for handle in handles]

    def blocking(parts):
        return [all_reduce(each, "mean", comm=comm) for each in parts]

    x = jnp.linspace(0.1, 1.0, 6) + comm.rank
    found, expected = (
        (jax.jit if jit else lambda f: f)(jax.value_and_grad(lambda y, way=way: loss(way, y)))(x)
        for way in (asynchronous, blocking)
    )
    assert all(np.array_equal(*pair) for pair in zip(found, expected, strict=True)), (found, expected)
    tangent = [jax.jvp(lambda y, way=way: loss(way, y), (x,), (jnp.ones(6),)) for way in (asynchronous, blocking)]
    assert np.array_equal(*tangent)


@ON_RANKS
def test_a_handle_passes_from_one_program_to_another_and_through_loops(comm):
    start, finish = jax.jit(lambda x: all_reduce_async(x, comm=comm)), jax.jit(lambda handle: handle.wait())
    handle, x = start(jnp.full(3, 1.0 + comm.rank)), jnp.ones(4)
    total = comm.size * (comm.size + 1) / 2
    assert finish(handle).tolist() == [total] * 3

    def body(step, carried):  # waits for what the round before has started
        value, handle = carried
        return value + handle.wait(), all_reduce_async(jnp.full(4, step + 1.0), comm=comm)

    @jax.jit
    def loop(x):
        value, handle = jax.lax.fori_loop(0, 5, body, (jnp.zeros(4), all_reduce_async(x, comm=comm)))
        return value + handle.wait()

    assert loop(x).tolist() == [comm.size * (1 + 1 + 2 + 3 + 4 + 5)] * 4


@ON_RANKS
def test_gradients_that_nothing_uses_are_zero(comm):
    def loss(x):
        unused, used = all_reduce_async(x * 2, comm=comm), all_reduce_async(x * 3, comm=comm)
        unused.wait()
        return used.wait().sum()

    assert jax.jit(jax.grad(loss))(jnp.ones(3)).tolist() == [3.0 * comm.size] * 3


@ON_RANKS
def test_bad_use_is_one_line(comm):
    handle = all_reduce_async(jnp.ones(3), comm=comm)
    handle.wait()
    with pytest.raises(ArgumentError, match=r"^wait: expected a handle of all_reduce_async that is in flight") as found:
        handle.wait()
    assert "\n" not in str(found.value)
    with pytest.raises(ArgumentError, match="all_reduce_async: expected op 'sum' or 'mean' where gradients"):
        jax.grad(lambda x: all_reduce_async(x, "max", comm=comm).wait().sum())(jnp.ones(3))
    with pytest.raises(ArgumentError, match="all_reduce: expected op 'sum' or 'mean' where gradients"):
        jax.jvp(lambda x: all_reduce(x, "max", comm=comm), (jnp.ones(3),), (jnp.ones(3),))
    added = jax.tree.map(jnp.add, *(all_reduce_async(jnp.ones(3) * n, comm=comm) for n in range(2)))
    with pytest.raises(ArgumentError, match="wait: expected a handle"):
        added.wait()


@pytest.mark.mpi(min_size=2)
def test_ranks_whose_arrays_differ_raise_the_same_line(comm):
    with pytest.raises(MismatchError) as caught:
        all_reduce_async(jnp.ones(3 + comm.rank % 2), comm=comm).wait()
    assert len(set(comm.all_gather_object(str(caught.value)))) == 1
