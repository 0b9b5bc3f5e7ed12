"""Hooks of one's own, and what is refused as a compression."""

from __future__ import annotations

import pytest

from clcomm import Communicator, Synchronizer
from clcomm.base.errors import ArgumentError, MismatchError
from clcomm.engine import Linear
from clcomm.optim import SGD
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from tests.helpers import one_line
from tests.numpy_models import set_gradients, small_model


def test_a_hook_of_ones_own(comm):
    seen = []

    def doubled(gradient, comm, out, bucket):
        seen.append([place.name for place in bucket.ranges])
        comm.all_reduce(2 * gradient, "mean", out=out)

    plain, hooked = small_model(), small_model()
    for model, hook in ((plain, None), (hooked, doubled)):
        sync = Synchronizer(comm)
        sync.register_comm_hook(hook)
        set_gradients(model, comm.rank)
        sync.sync_gradients(model)
    assert seen == [["w2", "b1", "w1"]]
    for one, two in zip(plain.parameters.values(), hooked.parameters.values(), strict=True):
        assert (2 * one.grad).tobytes() == two.grad.tobytes()


def test_what_a_hook_begins_in_the_background_is_waited_for_and_counted(comm):
    returned = {
        "nothing": lambda handle, out: None,
        "the handle": lambda handle, out: handle,
        "out": lambda _, out: out,
    }
    for what, choose in returned.items():
        plain, hooked = small_model(), small_model()
        sync = Synchronizer(comm, use_bucketing=False)
        set_gradients(plain, comm.rank)
        sync.sync_gradients(plain)
        sync.register_comm_hook(
            lambda gradient, comm, out, bucket, choose=choose: choose(
                comm.all_reduce_async(gradient, "mean", out=out), out
            )
        )
        comm.stats.reset()
        set_gradients(hooked, comm.rank)
        sync.sync_gradients(hooked)
        assert hooked.gradient_bits() == plain.gradient_bits(), what
        total = comm.stats.total("all_reduce", "gradients")
        assert (total["calls"], total["wire_bytes"]) == (3, total["bytes"])


def test_a_hook_that_returns_the_mean_is_an_error_that_names_out(comm):
    model, sync = small_model(), Synchronizer(comm)
    sync.register_comm_hook(lambda gradient, comm, out, bucket: gradient / comm.size)
    set_gradients(model, comm.rank)
    with pytest.raises(ArgumentError) as caught:
        sync.sync_gradients(model)
    assert "expected it to put the mean into `out` and to return None, got ndarray" in one_line(caught)


@pytest.mark.parametrize("text", ["gzip", "", "topk", "topk:0", "topk:2", "powersgd:0", "powersgd:x", "fp16:2", None])
def test_unknown_schemes_are_refused(text):
    with Communicator(transport="solo") as comm, pytest.raises(ArgumentError) as caught:
        Synchronizer(comm, compression=text)
    assert one_line(caught).startswith("compression: expected none, fp16, bf16, int8, topk:SHARE")


def test_a_hook_has_to_be_callable():
    with Communicator(transport="solo") as comm, pytest.raises(ArgumentError) as caught:
        Synchronizer(comm).register_comm_hook("fp16")
    assert "got str" in one_line(caught)


def test_a_sharded_update_does_not_compress():
    with Communicator(transport="solo") as comm, pytest.raises(ArgumentError) as caught:
        DistributedOptimizer(SGD(Linear(3, 2), 0.1), Synchronizer(comm, compression="fp16"))
    assert "expected one without compression" in one_line(caught)


@pytest.mark.mpi(min_size=2)
def test_ranks_with_other_schemes_learn_of_it(several):
    model = small_model()
    sync = Synchronizer(several, compression="int8" if several.rank else "fp16")
    with pytest.raises(MismatchError) as caught:
        sync.sync_gradients(model)
    assert "bucket plan: expected the same on every rank, but entry 1 is 'compression fp16' on rank 0" in one_line(
        caught
    )
