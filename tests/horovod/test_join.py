"""Ranks without more batches: they count as zero until all have joined."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from clcomm.base.errors import ArgumentError  # noqa: E402
from tests.helpers import one_line  # noqa: E402
from tests.horovod.training import batch_of, bits_of, gradients_of, net  # noqa: E402
from tests.horovod.values import folded, same_bits  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=1)


@pytest.mark.parametrize("op", ["Average", "Sum"])
@pytest.mark.parametrize("order", ["rising", "falling", "none"])
def test_joined_ranks_count_as_zero_until_all_have_joined(hvd, op, order):
    ranks = hvd.size()
    batches = {"rising": list(range(1, ranks + 1)), "falling": list(range(ranks, 0, -1)), "none": [2] * ranks}[order]
    if order == "rising":
        batches[0] = 0  # a rank without any batch
    model, twin = net(), net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), op=getattr(hvd, op))
    other = torch.optim.SGD(twin.parameters(), 0.1)
    for _epoch in range(2):
        for step in range(batches[hvd.rank()]):
            optimizer.zero_grad()
            model(batch_of(hvd.rank(), step)).square().sum().backward()
            optimizer.step()
        last = hvd.join()
        assert last == max(rank for rank in range(ranks) if batches[rank] == max(batches))
        hvd.broadcast_parameters(model.state_dict(), last)
        for step in range(max(batches)):
            everyone = [gradients_of(twin, rank, [step], torch.float32) for rank in range(ranks)]
            for rank in range(ranks):
                if step >= batches[rank]:
                    everyone[rank] = [torch.zeros_like(each) for each in everyone[rank]]
            for parameter, own in zip(twin.parameters(), zip(*everyone, strict=True), strict=True):
                parameter.grad = own[0] if ranks == 1 else folded(list(own), op)
            other.step()
        assert same_bits(bits_of(model), bits_of(twin))


@pytest.mark.parametrize("order", ["rising", "falling", "none"])
def test_joined_ranks_follow_several_optimizers_in_any_order(hvd, order):
    """Two models, the first stepped twice in every second batch; a twin in one process has the same bits."""
    ranks = hvd.size()
    batches = {"rising": list(range(1, ranks + 1)), "falling": list(range(ranks, 0, -1)), "none": [2] * ranks}[order]
    models, twins = (net(), net()), (net(), net())
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(each.parameters(), 0.1), op=hvd.Sum) for each in models]
    others = [torch.optim.SGD(each.parameters(), 0.1) for each in twins]
    turns = {step: (0, 0, 1) if step % 2 else (1, 0) for step in range(max(batches))}
    for step in range(batches[hvd.rank()]):
        for index in turns[step]:
            optimizers[index].zero_grad()
            models[index](batch_of(hvd.rank(), step)).square().sum().backward()
            optimizers[index].step()
    last = hvd.join()
    assert last == max(rank for rank in range(ranks) if batches[rank] == max(batches))
    for model in models:
        hvd.broadcast_parameters(model.state_dict(), last)
    for step in range(max(batches)):
        for index in turns[step]:
            everyone = [gradients_of(twins[index], rank, [step], torch.float32) for rank in range(ranks)]
            for rank in range(ranks):
                if step >= batches[rank]:
                    everyone[rank] = [torch.zeros_like(each) for each in everyone[rank]]
            for parameter, own in zip(twins[index].parameters(), zip(*everyone, strict=True), strict=True):
                parameter.grad = own[0] if ranks == 1 else folded(list(own), "Sum")
            others[index].step()
    for model, twin in zip(models, twins, strict=True):
        assert same_bits(bits_of(model), bits_of(twin))


@pytest.mark.parametrize("keeps", ["all ranks", "the first rank", "the last rank", "no rank"])
@pytest.mark.parametrize("operates", [False, True])
def test_ranks_join_without_a_collection_also_where_some_still_hold_a_dropped_optimizer(
    hvd, monkeypatch, keeps, operates
):
    """Whether Python has collected an optimizer that a program dropped differs from rank to rank."""
    gc.collect()  # optimizers of earlier tests, which errors hold
    model, ranks, collections = net(), hvd.size(), []
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(2):
        optimizer.zero_grad()
        model(batch_of(hvd.rank(), 0)).square().sum().backward()
        optimizer.step()
    holds = {"all ranks": True, "the first rank": hvd.rank() == 0, "the last rank": hvd.rank() == ranks - 1}
    if not holds.get(keeps, False):
        del optimizer
        gc.collect()
    monkeypatch.setattr(gc, "collect", lambda *_: collections.append(1))
    for _ in range(3):
        for each in range(hvd.rank() if operates else 0):
            operate(hvd, ["sum", "rows"], range(each + 1, ranks))
        assert hvd.join() == ranks - 1
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [ranks] * 2
    assert not collections


@pytest.mark.mpi(min_size=2)
def test_optimizers_stepped_in_different_orders_are_an_error(hvd):
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(net().parameters(), 0.1)) for _ in range(2)]
    with pytest.raises(ArgumentError) as caught:
        optimizers[hvd.rank() == 1].step()
    assert "expected the same DistributedOptimizer on every rank" in one_line(caught)


OPERATIONS = {
    "sum": lambda hvd, own: (hvd.allreduce(own, op=hvd.Sum), sum),
    "mean": lambda hvd, own: (hvd.allreduce(own), lambda rows: sum(rows) / hvd.size()),
    "least": lambda hvd, own: (hvd.allreduce(own, op=hvd.Min), lambda rows: torch.stack(rows).amin(0)),
    "most": lambda hvd, own: (hvd.allreduce(-own.int(), op=hvd.Max), lambda rows: (-torch.stack(rows).int()).amax(0)),
    "product": lambda hvd, own: (hvd.allreduce(own, op=hvd.Product), lambda rows: torch.stack(rows).prod(0)),
    "group": lambda hvd, own: (
        hvd.grouped_allreduce([own, own.double()], op=hvd.Sum)[1],
        lambda rows: sum(rows).double(),
    ),
    "rows": lambda hvd, own: (hvd.allgather(own[None]), torch.stack),
    "root": lambda hvd, own: (hvd.broadcast(own, hvd.size() - 1), lambda rows: rows[-1]),
    "object": lambda hvd, own: (hvd.broadcast_object(own, hvd.size() - 1), lambda rows: rows[-1]),
}


def value_of(rank):
    return torch.arange(3.0) + rank + 1


def operate(hvd, kinds, active):
    """Run operations of the ranks that go on, and compare them with what these ranks alone have."""
    for kind in kinds:
        found, expected = OPERATIONS[kind](hvd, value_of(hvd.rank()))
        torch.testing.assert_close(found, expected([value_of(rank) for rank in active]))
    hvd.barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("first", OPERATIONS)
@pytest.mark.parametrize("order", ["rising", "falling"])
def test_operations_of_ranks_that_go_on_leave_out_those_that_have_joined(hvd, first, order):
    """Without any optimizer; the first operation is the one that finds out."""
    ranks = list(range(hvd.size()))
    leaves = ranks if order == "rising" else [*reversed(ranks[:-1]), ranks[-1]]
    for joined in range(1, hvd.size()):
        if hvd.rank() in leaves[:joined]:
            break
        operate(hvd, [first, *OPERATIONS], sorted(leaves[joined:]))
    assert hvd.join() == ranks[-1]
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("before", ["step", "metric"])
def test_steps_and_metrics_come_in_any_order(hvd, several, before):
    """Rank r has r + 1 batches; each is a step and metrics; a twin in one process has the same bits."""
    gc.collect()
    ranks, models, twin = hvd.size(), [net() for _ in range(1 + several)], net()
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(each.parameters(), 0.1), op=hvd.Sum) for each in models]
    other = torch.optim.SGD(twin.parameters(), 0.1)
    for step in range(hvd.rank() + 1):
        if before == "metric":
            operate(hvd, ["mean", "rows"], range(step, ranks))
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(batch_of(hvd.rank(), step)).square().sum().backward()
            optimizer.step()
        if before == "step":
            operate(hvd, ["root", "sum"], range(step, ranks))
    assert hvd.join() == ranks - 1
    for step in range(ranks):
        everyone = [gradients_of(twin, rank, [step], torch.float32) for rank in range(ranks)]
        for rank in range(step):
            everyone[rank] = [torch.zeros_like(each) for each in everyone[rank]]
        for parameter, own in zip(twin.parameters(), zip(*everyone, strict=True), strict=True):
            parameter.grad = folded(list(own), "Sum")
        other.step()
    for model in models:
        hvd.broadcast_parameters(model.state_dict(), ranks - 1)
        assert same_bits(bits_of(model), bits_of(twin))


@pytest.mark.mpi(min_size=3)
def test_metrics_go_on_where_a_process_set_has_an_optimizer(hvd):
    members, rank, ranks = hvd.add_process_set([0, 1]), hvd.rank(), hvd.size()
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), process_set=members)
    for step in range(2):
        if step and rank == 0:
            break
        if members.included():
            optimizer.zero_grad()
            model(batch_of(rank, step)).square().sum().backward()
            optimizer.step()
        operate(hvd, ["mean", "rows"], range(step, ranks))
    assert hvd.join() == ranks - 1


@pytest.mark.mpi(min_size=2)
def test_what_ranks_that_have_joined_cannot_do_is_an_error_of_one_line(hvd):
    if hvd.rank():
        for call, said in (
            (lambda: hvd.alltoall(torch.ones(hvd.size())), "no all_to_all while ranks have joined"),
            (lambda: hvd.reducescatter(torch.ones(hvd.size())), "no reduce_scatter while ranks have joined"),
            (lambda: hvd.allgather_object(1), "no all_gather_object while ranks have joined"),
            (lambda: hvd.broadcast(torch.ones(2), 0), "a root that has not joined, got rank 0"),
        ):
            with pytest.raises(ArgumentError) as caught:
                call()
            assert said in one_line(caught)
        assert hvd.synchronize(hvd.allreduce_async(torch.ones(1), op=hvd.Sum)).item() == hvd.size() - 1
    assert hvd.join() == hvd.size() - 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("how", ["in order", "last first", "poll", "operate"])
def test_operations_that_were_started_before_a_rank_joined_leave_it_out(hvd, how):
    others = hvd.size() - 1
    if hvd.rank():
        values = torch.arange(3.0)
        handles = [
            hvd.allreduce_async(values, op=hvd.Sum),
            hvd.alltoall_async(torch.ones(hvd.size())),
            hvd.allgather_async(values),
            hvd.allreduce_async_(values.clone(), op=hvd.Sum),
        ]
        if how == "operate":
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == others
        if how == "poll" and hvd.rank() == 1:
            while not hvd.poll(handles[2]):
                pass
        order = [3, 2, 1, 0] if how == "last first" and hvd.rank() == 1 else range(4)
        for at in order:
            if at == 1:
                with pytest.raises(ArgumentError, match="no all_to_all while ranks have joined"):
                    hvd.synchronize(handles[at])
            else:
                found = hvd.synchronize(handles[at])
                assert torch.equal(found, values.repeat(others) if at == 2 else values * others)
    assert hvd.join() == hvd.size() - 1
