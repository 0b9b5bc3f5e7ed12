"""Ranks without more batches: they count as zero until all have joined."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from clcomm.errors import ArgumentError  # noqa: E402
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


@pytest.mark.mpi(min_size=2)
def test_optimizers_stepped_in_different_orders_are_an_error(hvd):
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(net().parameters(), 0.1)) for _ in range(2)]
    with pytest.raises(ArgumentError) as caught:
        optimizers[hvd.rank() == 1].step()
    assert "expected the same DistributedOptimizer on every rank" in one_line(caught)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_another_operation_while_ranks_have_joined_is_an_error(hvd, op):
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), op=getattr(hvd, op))
    for step in range(2 if hvd.rank() else 1):
        optimizer.zero_grad()
        model(batch_of(hvd.rank(), step)).square().sum().backward()
        optimizer.step()
        if step:
            with pytest.raises(ArgumentError) as caught:
                hvd.allreduce(torch.ones(2))
            assert "while ranks have joined" in one_line(caught)
    assert hvd.join() == hvd.size() - 1
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2
