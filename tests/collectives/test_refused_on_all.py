"""A mistake of one rank's arguments is raised on every rank, which names it, and the next collective is right."""

from __future__ import annotations

import math

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer
from clcomm.base.errors import ArgumentError, MismatchError
from tests.helpers import one_line
from tests.numpy_models import set_gradients, small_model

pytestmark = pytest.mark.mpi(min_size=2)


class Unpicklable:
    def __reduce__(self):
        raise RuntimeError("has no state\nof its own")


def mistakes(comm, is_odd):
    """Return calls by name, in which the odd rank makes a mistake."""
    n, x = comm.size, np.ones(4, np.float32)

    def either(right, wrong):
        return wrong if is_odd else right

    thing = either(1, Unpicklable())
    return {
        "op": lambda: comm.all_reduce(x.copy(), either("sum", "median")),
        "no array": lambda: comm.all_reduce(either(x.copy(), [1.0])),
        "strided": lambda: comm.all_reduce_init(either(x, x[::2])),
        "started": lambda: comm.all_reduce_async(either(x.copy(), x[::2])).wait(),
        "root": lambda: comm.broadcast(x.copy(), either(0, n)),
        "out": lambda: comm.all_gather(x, out=either(np.empty((n, 4), np.float32), np.empty(3))),
        "objects in an array": lambda: comm.all_gather(either(x, np.array([object()]))),
        "blocks": lambda: comm.reduce_scatter(np.ones(either(n, n + 1))),
        "lists": lambda: comm.all_to_all([x] * either(n, n + 1), [x.copy() for _ in range(n)]),
        "gathered object": lambda: comm.all_gather_object(thing),
        "object to one": lambda: comm.gather_object(thing),
        "data to one": lambda: comm.gather(thing),
    }


def mistakes_of_root(comm):
    things, root = [Unpicklable()] * comm.size, comm.size - 1
    return {
        "object": lambda: comm.broadcast_object(things[0], root),
        "items": lambda: comm.scatter_object(things, root),
        "data": lambda: comm.scatter(things, root),
    }


@pytest.mark.parametrize("place", [0, -1])
def test_a_mistake_of_one_rank_is_raised_on_all(place):
    comm = Communicator()
    odd = range(comm.size)[place]
    calls = mistakes(comm, comm.rank == odd)
    if odd == comm.size - 1:
        calls |= mistakes_of_root(comm)
    for name, call in calls.items():
        with pytest.raises(ArgumentError) as caught:
            call()
        said = comm.all_gather_object(one_line(caught))
        assert set(said) == {said[0]} and said[0].endswith(f"(on rank {odd})"), name
        assert comm.all_reduce(np.ones(3)).tolist() == [comm.size] * 3, name


def test_a_mistake_of_all_ranks_has_one_text():
    comm = Communicator()
    with pytest.raises(ArgumentError) as caught:
        comm.broadcast(np.ones(3), comm.size)
    assert one_line(caught) == f"root: expected a rank from 0 to {comm.size - 1}, got {comm.size}"


def mistakes_of_a_synchronizer(comm, is_odd):
    """Return calls by name, in which the odd rank makes a mistake, of Synchronizers and their models."""
    model, other = small_model(), small_model()
    set_gradients(model, comm.rank)
    set_gradients(other, comm.rank)

    def either(right, wrong):
        return wrong if is_odd else right

    def begun(**options):
        sync = Synchronizer(comm, **options)
        sync.broadcast_parameters(model)
        return sync

    def with_local(sync):
        sync.sync_gradients(model)
        if not is_odd:
            sync.finish_step(model)
        sync.sync_gradients(model)
        comm.barrier()

    def finish(sync):
        if not is_odd:
            sync.sync_gradients(model)
        sync.finish_step(model)
        comm.barrier()

    def joined(sync):
        with sync.join(model, lambda: None):
            if is_odd:
                with sync.join(model, lambda: None):
                    pass
            sync.sync_gradients(model, samples=1)

    def shard(sync):
        for each in sync.shards.own:
            with sync.shard(model, either(each, each + 1)):
                set_gradients(model, each)
        sync.sync_gradients(model)

    two, n = 2 * comm.size, comm.size
    bare, plain, local, shards = (
        Synchronizer(comm),
        begun(),
        begun(policy="local:h=2"),
        begun(shards=two),
    )
    return {
        "no model": lambda: bare.broadcast_parameters(either(other, 3)),
        "nothing to average": lambda: bare.sync_gradients(either(other, [])),
        "root": lambda: plain.broadcast_parameters(model, either(0, n)),
        "root of buffers": lambda: plain.broadcast_parameters(model, either(0, "0")),
        "samples": lambda: plain.sync_gradients(model, samples=either(1, -1)),
        "of": lambda: plain.sync_gradients(model, samples=1, of=either(n, 0)),
        "expected": lambda: plain.expect_samples(model, either(1, math.inf)),
        "hook": lambda: (plain.register_comm_hook(either(None, 3)), plain.sync_gradients(model)),
        "join within join": lambda: joined(plain),
        "two steps in one": lambda: with_local(local),
        "no step before": lambda: finish(begun(policy="local:h=2")),
        "deal": lambda: shards.deal_shards(either([2] * n, [1] * n)),
        "dealt without shards": lambda: either(shards, plain).deal_shards([2] * n),
        "shard": lambda: shard(shards),
    }


@pytest.mark.parametrize("place", [0, -1])
def test_a_mistake_of_one_rank_with_a_synchronizer_is_raised_on_all(place):
    comm = Communicator()
    odd = range(comm.size)[place]
    for name, call in mistakes_of_a_synchronizer(comm, comm.rank == odd).items():
        with pytest.raises((ArgumentError, MismatchError)) as caught:
            call()
        said = comm.all_gather_object(one_line(caught))
        assert set(said) == {said[0]} and f"on rank {odd}" in said[0], (name, said)
        assert comm.all_reduce(np.ones(3)).tolist() == [comm.size] * 3, name


@pytest.mark.parametrize("samples", [math.nan, -1, "3"])
def test_samples_of_one_rank_that_are_no_number_are_refused_on_all(samples):
    comm, model = Communicator(), small_model()
    sync = Synchronizer(comm)
    for expects in (False, True):
        set_gradients(model, comm.rank)
        given = samples if comm.rank == 1 else 3
        with pytest.raises(ArgumentError, match=r"^samples: .*\(on rank 1\)$"):
            if expects:
                sync.expect_samples(model, given)
            else:
                sync.sync_gradients(model, samples=given)
        sync.sync_gradients(model, samples=3)
