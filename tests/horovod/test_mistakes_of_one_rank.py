"""A mistake of one rank in a call of Horovod's is raised on every rank of its process set."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from clcomm.base.errors import ArgumentError, MismatchError  # noqa: E402
from tests.helpers import one_line  # noqa: E402
from tests.horovod.training import batch_of, gradients_of, net  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=2)


def mistakes(hvd, is_odd):
    def either(right, wrong):
        return wrong if is_odd else right

    x, n = torch.ones(hvd.size(), 2), hvd.size()
    lazy = torch.nn.LazyLinear(2).weight
    return {
        "splits": lambda: hvd.alltoall(x, splits=either([1] * n, [2] * n)),
        "rows": lambda: hvd.alltoall(either(x, torch.ones(()))),
        "root": lambda: hvd.broadcast(x, either(0, n)),
        "op": lambda: hvd.allreduce(x, op=either(hvd.Sum, "sum")),
        "no tensor": lambda: hvd.allreduce(either(x, [1.0])),
        "sparse op": lambda: hvd.synchronize(hvd.sparse_allreduce_async(x.to_sparse(), op=either(hvd.Sum, hvd.Max))),
        "gather": lambda: hvd.allgather(either(x, None)),
        "scatter": lambda: hvd.reducescatter(either(x, torch.ones(()))),
        "lazy": lambda: hvd.broadcast_parameters({"weight": either(x, lazy)}, 0),
        "object": lambda: hvd.allgather_object(either(1, lambda: None)),
        "optimizer": lambda: hvd.DistributedOptimizer(
            torch.optim.SGD([torch.nn.Parameter(x.clone())], 0.1), op=either(hvd.Sum, hvd.Max)
        ),
        "lazy optimizer": lambda: hvd.DistributedOptimizer(
            torch.optim.SGD([either(torch.nn.Parameter(x.clone()), lazy)], 0.1)
        ),
        "no optimizer": lambda: hvd.broadcast_optimizer_state(either(torch.optim.SGD([lazy], 0.1), None), 0),
        "set of no numbers": lambda: hvd.add_process_set(either([0], ["0"])),
        "set of no ranks": lambda: hvd.add_process_set(either([0], [n])),
        "no set": lambda: hvd.add_process_set(either([0], 0)),
        "more ranks": lambda: (hvd.init(either(list(range(n)), [n])), hvd.barrier()),
        "sets": lambda: hvd.init(process_sets=either([[0]], "static")),
    }


def steps_gone_wrong(hvd, is_odd):
    """What goes wrong between the calls of a loop, on the odd rank; the others go on to the next collective."""

    def optimizer_of(**options):
        model = net()
        return model, hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), **options)

    def backward(model, step):
        model(batch_of(hvd.rank(), step)).square().sum().backward()

    def one_more_backward():
        model, optimizer = optimizer_of()
        for step in range(1 + is_odd):
            backward(model, step)
        optimizer.step()
        hvd.barrier()

    def older_optimizer():
        model, older = optimizer_of()
        newer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
        backward(model, 0)
        (older if is_odd else newer).step()

    def not_reduced():
        model, optimizer = optimizer_of()
        backward(model, 0)
        optimizer.step()  # its settings are compared at the next synchronisation
        backward(model, 0)
        optimizer.synchronize()
        if is_odd:
            backward(model, 1)
        try:
            with optimizer.skip_synchronize():
                optimizer.step()
            hvd.barrier()
        finally:
            optimizer.synchronize()  # which all ranks call after the error

    def passes():
        model, optimizer = [optimizer_of() for _ in range(2)][-1]
        try:
            optimizer.set_backward_passes_per_step(0 if is_odd else 1)
            backward(model, 0)
            optimizer.step()
        finally:
            optimizer.synchronize()  # what was begun

    def joining():
        model, optimizer = optimizer_of(op=hvd.Adasum)
        if is_odd:
            hvd.join()
        backward(model, 0)
        optimizer.step()

    return {each.__name__: each for each in (one_more_backward, older_optimizer, not_reduced, passes, joining)}


@pytest.mark.parametrize("place", [0, -1])
def test_a_mistake_of_one_rank_is_raised_on_all(hvd, place):
    odd = range(hvd.size())[place]
    for name, call in mistakes(hvd, hvd.rank() == odd).items():
        refused_on(hvd, odd, call, name)


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("kind", sorted(steps_gone_wrong(None, False)))
def test_a_step_that_goes_wrong_on_one_rank_is_an_error_on_all(hvd, kind, place):
    gc.collect()  # optimizers of earlier tests, which errors hold
    odd = range(hvd.size())[place]
    refused_on(hvd, odd, steps_gone_wrong(hvd, hvd.rank() == odd)[kind], kind)


@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("joins", [False, True])
def test_backward_after_a_step_that_failed_reduces_no_older_gradients(hvd, joins, optimizers):
    """joins: the last rank does, before that step and again after it."""
    gc.collect()
    models = [net() for _ in range(optimizers)]
    wrapped = [hvd.DistributedOptimizer(torch.optim.SGD(each.parameters(), 0.1), op=hvd.Sum) for each in models]
    model, optimizer, trained = models[-1], wrapped[-1], range(hvd.size() - joins)

    def reduce(number):
        model.zero_grad()
        model(batch_of(hvd.rank(), number)).square().sum().backward()
        optimizer.synchronize()

    if hvd.rank() in trained:
        reduce(0)
    with pytest.raises(ArgumentError, match="backward_passes_per_step"):
        if hvd.rank() not in trained:
            hvd.join()
        elif hvd.rank() == 0:
            optimizer.set_backward_passes_per_step(0)
        else:
            reduce(1)
    if hvd.rank() in trained:
        reduce(2)
        everyone = [gradients_of(model, rank, [2], torch.float32) for rank in trained]
        for parameter, own in zip(model.parameters(), zip(*everyone, strict=True), strict=True):
            assert torch.allclose(parameter.grad, sum(own), rtol=1e-5, atol=1e-6)
    hvd.join()


def refused_on(hvd, odd, call, name):
    with pytest.raises(ArgumentError) as caught:
        call()
    said = hvd.allgather_object(one_line(caught))
    theirs = said[odd - 1]  # an error of a class of its own names no rank where it was made
    assert theirs.endswith(f"(on rank {odd})"), (name, said)
    assert {each.removesuffix(f" (on rank {odd})") for each in said} == {theirs.removesuffix(f" (on rank {odd})")}
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2, name


def test_what_others_do_not_wait_in_is_an_error_of_one_rank(hvd):
    is_odd = hvd.rank() == hvd.size() - 1
    handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
    for call in (hvd.poll, hvd.synchronize) if is_odd else ():
        with pytest.raises(ArgumentError, match=r"^handle: expected what an asynchronous call returned, got int$"):
            call(3)
    assert hvd.synchronize(handle).tolist() == [hvd.size()] * 2


def test_ranks_that_remove_other_sets_get_the_same_error(hvd):
    is_odd = hvd.rank() == hvd.size() - 1
    first = hvd.add_process_set([0])
    for wrong in (hvd.ProcessSet([0]), hvd.global_process_set, None):
        with pytest.raises(MismatchError, match=r"^process_set: .*; remove the same sets in the same order"):
            hvd.remove_process_set(wrong if is_odd else first)
    assert hvd.remove_process_set(first) and not hvd.remove_process_set(first)
