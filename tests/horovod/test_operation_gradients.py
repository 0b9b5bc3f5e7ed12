"""Gradients through the operations, compared as bits with the ranks' weights by formula."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from tests.horovod.values import folded, same_bits, tensor_of  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=1)


def grad(tensor, result, weights):
    (result * weights).sum().backward()
    return tensor.grad


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_gradients_of_an_all_reduce_are_all_reduced(hvd, op):
    everyone = [tensor_of(rank, (4,), torch.float64, 1) for rank in range(hvd.size())]
    own = torch.ones(4, dtype=torch.float64, requires_grad=True)
    found = grad(own, hvd.allreduce(own, op=getattr(hvd, op)), everyone[hvd.rank()])
    assert same_bits(found, folded(everyone, op))
    pair = [torch.ones(4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    sum(hvd.grouped_allreduce(pair, op=getattr(hvd, op))).mul(everyone[hvd.rank()]).sum().backward()
    assert all(same_bits(each.grad, folded(everyone, op)) for each in pair)


def test_gradients_of_the_others_come_back_to_where_rows_came_from(hvd):
    rank, ranks = hvd.rank(), hvd.size()
    own = torch.ones(rank + 1, 2, dtype=torch.float64, requires_grad=True)
    rows = sum(range(1, ranks + 1))
    weights = [tensor_of(each, (rows, 2), torch.float64, 2) for each in range(ranks)]
    found = grad(own, hvd.allgather(own), weights[rank])
    first = sum(range(1, rank + 1))
    assert same_bits(found, folded(weights, "Average")[first : first + rank + 1])
    for root in range(ranks):
        one = torch.ones(3, dtype=torch.float64, requires_grad=True)
        each = [tensor_of(other, (3,), torch.float64, 3) for other in range(ranks)]
        expected = folded(each, "Average") if rank == root else torch.zeros(3, dtype=torch.float64)
        assert same_bits(grad(one, hvd.broadcast(one, root), each[rank]), expected)
    sent = torch.ones(2 * ranks, dtype=torch.float64, requires_grad=True)
    factors = torch.arange(2.0 * ranks, dtype=torch.float64) + 100 * rank
    expected = torch.cat(
        [torch.tensor([2.0 * rank, 2.0 * rank + 1], dtype=torch.float64) + 100 * to for to in range(ranks)]
    )
    assert same_bits(grad(sent, hvd.alltoall(sent), factors), expected)


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_gradients_of_a_reduce_scatter_are_gathered(hvd, op):
    own = torch.ones(2 * hvd.size() + 1, dtype=torch.float64, requires_grad=True)
    part = hvd.reducescatter(own, op=getattr(hvd, op), prescale_factor=2.0)
    found = grad(own, part, torch.full(part.shape, hvd.rank() + 1.0, dtype=torch.float64))
    lengths = [len(each) for each in torch.tensor_split(own, hvd.size())]
    factor = 2.0 * (hvd.size() if op == "Sum" else 1)
    assert found.tolist() == [factor * (rank + 1) for rank, length in enumerate(lengths) for _ in range(length)]
