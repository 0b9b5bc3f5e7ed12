"""Models divided by a plan train as on one rank: alone, beside data parallel, and with the sequence divided."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Communicator, DistributedDataParallel, Mesh
from clcomm.engine import Dropout, Linear, Replay, Sequential, Tensor
from clcomm.engine.nn import manual_seed
from clcomm.optim import SGD, AdamW
from clcomm.parallel.tensor_parallel import ColumnParallel, SequenceParallel, parallelize_module
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from models.gpt import next_token_loss
from tests.parallel.tensor_parallel.tasks import (
    STEPS,
    GPTTask,
    MLPTask,
    alike,
    close,
    device,
    joined,
    loss_of,
    tensor_parallel,
    trained,
)

pytestmark = pytest.mark.mpi(min_size=1)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", ["whole", "part"])
@pytest.mark.parametrize("task", [MLPTask, GPTTask])
@pytest.mark.parametrize("make", [SGD, AdamW])
@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_tensor_parallel_ranks_train_as_one(transport, make, task, kind):
    comm = Communicator(transport=transport)
    model = parallelize_module(task.model(seed=comm.rank), comm, task.plans[kind])
    trained(task, model, 1, task.loss(comm), make)
    close(model.state_dict(), trained(task, task.model(), 1, loss_of(task), make).state_dict())
    whole = [parameter.numpy() for parameter in model.parameters() if parameter.part is None]
    assert alike(comm, whole)


def test_ranks_that_compute_in_their_thread_and_others_start_the_same_sums(several, monkeypatch):
    """As on hosts of which one has a core a rank, and another has more."""
    monkeypatch.setattr(device(), "runs_in_caller", several.rank == several.size - 1)
    model = parallelize_module(MLPTask.model(), several, MLPTask.plans["whole"])
    trained(MLPTask, model, 1, MLPTask.loss(several))
    close(model.state_dict(), trained(MLPTask, MLPTask.model(), 1, loss_of(MLPTask)).state_dict())


@pytest.mark.sampled(9)
@pytest.mark.parametrize("kind", ["whole", "part"])
@pytest.mark.parametrize("task", [MLPTask, GPTTask])
@pytest.mark.parametrize(("overlap", "sharded"), [(False, False), (True, False), ("auto", False), (False, True)])
def test_data_parallel_ranks_beside_them_train_as_one(auto, overlap, sharded, task, kind):
    mesh = Mesh(auto, tp=tensor_parallel(auto), dp=-1)
    model = parallelize_module(task.model(seed=auto.rank), mesh["tp"], task.plans[kind])
    ddp = DistributedDataParallel(
        model, mesh["dp"], bucket_size="4KiB", overlap_grad_reduce=overlap, use_distributed_optimizer=sharded
    )
    loss_fn, optimizer = task.loss(mesh["tp"]), SGD(ddp.parameters(), 0.1, momentum=0.9)
    if sharded:
        optimizer = DistributedOptimizer(optimizer, ddp.synchronizer)
    for step in range(STEPS):
        x, targets = (Tensor(each, device()) for each in task.batch(mesh["dp"].rank, step))
        loss_fn(ddp(x), targets).backward()
        ddp.finish_grad_sync()
        optimizer.step()
        optimizer.zero_grad()
    alone = trained(task, task.model(), mesh["dp"].size, loss_of(task))
    close(ddp.state_dict(), alone.state_dict())
    mesh.close()


@pytest.mark.parametrize("kind", ["whole", "part"])
@pytest.mark.parametrize("task", [MLPTask, GPTTask])
def test_replayed_steps_have_the_bits_of_others(auto, task, kind):
    states = []
    for replays in (False, True):
        model = parallelize_module(task.model(), auto, task.plans[kind])
        loss_fn, optimizer = task.loss(auto), SGD(model, 0.1, momentum=0.9)

        def step(x, targets, model=model, loss_fn=loss_fn, optimizer=optimizer):
            loss = loss_fn(model(x), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = Replay(step) if replays else step
        losses = [run(*(Tensor(each, device()) for each in task.batch(0, number))).item() for number in range(16)]
        states.append((losses, {name: each.tobytes() for name, each in model.state_dict().items()}))
        if replays:
            assert run.refusal is None
            assert run.replayed >= 12
    assert states[0] == states[1]


@pytest.mark.parametrize("kind", ["whole", "part"])
def test_accumulated_gradients_are_those_of_one_batch(auto, kind):
    """The sums of replicated parameters' gradients are of each backward, so that nothing counts twice."""
    one, many = (parallelize_module(GPTTask.model(), auto, GPTTask.plans[kind]) for _ in range(2))
    loss_fn = GPTTask.loss(auto)
    x, targets = (Tensor(each, device()) for each in joined(GPTTask, 3, 0))
    loss_fn(one(x), targets).backward()
    for part in range(3):
        x, targets = (Tensor(each, device()) for each in GPTTask.batch(part, 0))
        (loss_fn(many(x), targets) * (1 / 3)).backward()
    for a, b in zip(one.parameters(), many.parameters(), strict=True):
        assert np.allclose(a.grad.numpy(), b.grad.numpy(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", ["whole", "part"])
def test_the_norm_of_all_gradients_is_that_of_one_rank(auto, kind, sharded):
    mesh = Mesh(auto, tp=tensor_parallel(auto), dp=-1)
    model = parallelize_module(GPTTask.model(), mesh["tp"], GPTTask.plans[kind])
    ddp = DistributedDataParallel(model, mesh["dp"], use_distributed_optimizer=sharded)
    optimizer = SGD(ddp.parameters(), 0.1)
    if sharded:
        optimizer = DistributedOptimizer(optimizer, ddp.synchronizer)
    x, targets = (Tensor(each, device()) for each in GPTTask.batch(mesh["dp"].rank, 0))
    GPTTask.loss(mesh["tp"])(ddp(x), targets).backward()
    ddp.finish_grad_sync()
    norm = ddp.clip_grad_norm(0.05)
    optimizer.step()
    alone = GPTTask.model()
    x, targets = (Tensor(each, device()) for each in joined(GPTTask, mesh["dp"].size, 0))
    next_token_loss(alone(x), targets).backward()
    squares = sum((parameter.grad.numpy().astype(np.float64) ** 2).sum() for parameter in alone.parameters())
    assert norm == pytest.approx(np.sqrt(squares), rel=1e-4)
    assert len(set(auto.all_gather_object(norm))) == 1
    before = GPTTask.model().state_dict()
    after = ddp.state_dict()
    own = [name for name, _ in alone.named_parameters()]  # of tied weights one
    moved = sum(((after[name] - before[name]).astype(np.float64) ** 2).sum() for name in own)
    assert np.sqrt(moved) == pytest.approx(0.1 * 0.05, rel=1e-2)
    mesh.close()


def test_dropout_is_alike_on_tensor_parallel_ranks_and_differs_on_others(auto):
    size = tensor_parallel(auto)
    mesh = Mesh(auto, tp=size, dp=-1)
    model = Sequential(Dropout(0.5), Linear(8, 8 * size, device=device()), Dropout(0.5))
    parallelize_module(model, mesh["tp"], {"1": ColumnParallel(), "2": SequenceParallel()})
    for _ in range(2):
        manual_seed(5)
        ones = Tensor(np.ones((16, 64), np.float32), device())
        common, again, own = (model[n](ones).numpy() for n in (0, 0, 2))
        places = auto.all_gather_object((mesh.coordinates["dp"], common.tobytes(), own.tobytes()))
        groups = {dp: {masks for other, masks, _ in places if other == dp} for dp, *_ in places}
        assert all(len(masks) == 1 for masks in groups.values())  # alike within a group, another in each
        assert len(set.union(*groups.values())) == mesh.shape["dp"]
        assert len({mine for *_, mine in places}) == auto.size
        assert common.tobytes() != again.tobytes()
        assert common.tobytes() != own.tobytes() or size == 1
    mesh.close()


def test_stats_name_the_axis_and_what_moved(several):
    mesh = Mesh(several, tp=several.size)
    model = parallelize_module(GPTTask.model(), mesh["tp"], GPTTask.plans["part"])
    trained(GPTTask, model, 1, GPTTask.loss(mesh["tp"]), steps=2)
    table = str(several.stats.table())
    for line in ("reduce_scatter activations", "all_gather activations", "reduce_scatter input gradients",
                 "all_reduce parameter gradients"):  # fmt: skip
        assert f"{line} on tp" in table, table
    mesh.close()
