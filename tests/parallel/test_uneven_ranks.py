"""DistributedDataParallel on ranks that differ: buffers that each forward changes, and numbers of batches."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import DistributedDataParallel
from clcomm.base.errors import ArgumentError
from clcomm.engine import Linear, Tensor
from clcomm.optim import SGD
from tests.helpers import cpu_device
from tests.numpy_models import Model
from tests.parallel.small_networks import Counting, network, require_alike

pytestmark = pytest.mark.mpi(min_size=1)


# --- buffers ---


@pytest.mark.parametrize("broadcasts", [True, False])
def test_each_training_forward_begins_with_the_buffers_of_rank_0(auto, broadcasts):
    model = Counting(auto.rank)
    ddp = DistributedDataParallel(model, auto, broadcast_buffers=broadcasts)
    x = Tensor(np.full((1, 3), 1.0 + auto.rank, np.float32), cpu_device("cpu"))
    if auto.size > 1 and broadcasts:
        model.mean.copy_from(np.full(2, 100.0 * auto.rank, np.float32))
        model.count.copy_from(np.array(0))
    start, whose = model.mean.numpy()[0], 0 if broadcasts else auto.rank
    first = auto.bcast(start) if broadcasts else start
    for step in range(3):
        ddp(x).sum().backward()
        assert model.seen[0].tolist() == [first + step * (1.0 + whose)] * 2
        ddp.finish_grad_sync()
    before = model.mean.numpy()
    with ddp.no_sync():
        ddp(x)
    ddp.eval()
    ddp(x)  # neither of them communicates
    assert model.mean.numpy().tolist() == (before + 2 * (1.0 + auto.rank)).tolist()
    sent = auto.stats.total("broadcast", "buffers")["calls"]
    assert sent == (3 if broadcasts and auto.size > 1 else 0)


# --- uneven inputs ---


@pytest.mark.parametrize("by", ["all", "active", "samples"])
@pytest.mark.parametrize("steps_too", [True, False])
@pytest.mark.parametrize("kind", ["native", "numpy"])
def test_ranks_may_run_out_of_batches(auto, by, steps_too, kind):
    """SGD without momentum, so that a reference in float64 is a few lines."""
    counts = [2 + (3 * rank) % 5 for rank in range(auto.size)]
    model = Linear(3, 2, bias=False, device=cpu_device("cpu")) if kind == "native" else Model([("w", np.zeros((3, 2)))])
    ddp = DistributedDataParallel(model, auto)
    parameter = model.weight if kind == "native" else model["w"]
    start = (parameter.numpy() if kind == "native" else parameter.data).astype(np.float64)
    plain = SGD(model, 0.5) if kind == "native" else None

    def gradient(rank: int, step: int) -> np.ndarray:
        return np.full(start.shape, (rank + 1) * 10.0**-step)

    def update() -> None:
        if plain is not None:
            plain.step()
        else:
            parameter.data -= 0.5 * parameter.grad
        clear()

    def clear() -> None:
        parameter.grad = None

    with ddp.join(divide_by_initial_world_size=by == "all", step=update if steps_too else None):
        for step in range(counts[auto.rank]):
            mine = gradient(auto.rank, step)
            if kind == "native":
                rows = Tensor(np.ones((1, start.shape[1]), np.float32), cpu_device("cpu"))
                (model(rows) * float(mine[0, 0])).sum().backward()
            else:
                parameter.grad = mine
            ddp.finish_grad_sync(samples=auto.rank + 1 if by == "samples" else None)
            update()
    expected = start.copy()
    for step in range(max(counts)):
        active = [rank for rank in range(auto.size) if step < counts[rank]]
        weights = {rank: rank + 1.0 if by == "samples" else 1.0 for rank in active}
        total = auto.size if by == "all" else sum(weights.values())
        expected -= 0.5 * sum(weights[rank] * gradient(rank, step) for rank in active) / total
    got = parameter.numpy() if kind == "native" else parameter.data
    assert np.allclose(got, expected, rtol=1e-5, atol=1e-6)
    require_alike(auto, {"w": np.array(got)})


def test_ranks_that_ran_out_get_the_buffers_of_one_that_did_not(auto):
    model = Counting(auto.rank)
    ddp = DistributedDataParallel(model, auto)
    with ddp.join():
        for _ in range(1 + auto.rank):
            x = Tensor(np.full((1, 3), 1.0 + auto.rank, np.float32), cpu_device("cpu"))
            ddp(x).sum().backward()
            ddp.finish_grad_sync()
            ddp.zero_grad()
    # Of the ranks that took a step the lowest one's mean went on: rank 0's in the first, rank 1's in the second, ...
    assert model.mean.numpy().tolist() == [sum(1.0 + rank for rank in range(auto.size))] * 2
    assert int(model.count.numpy()) == auto.size


def test_join_is_refused_with_overlap_and_within_another(auto):
    with (
        pytest.raises(ArgumentError, match=r"^join: expected overlap_grad_reduce=False"),
        DistributedDataParallel(network(), auto, overlap_grad_reduce=True).join(),
    ):
        pass
    ddp = DistributedDataParallel(network(), auto)
    with pytest.raises(ArgumentError, match=r"^join: expected to be entered once"), ddp.join(), ddp.join():
        pass
