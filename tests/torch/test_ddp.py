"""DistributedDataParallel on backend clcomm equals one process that trains on all ranks' batches."""

from __future__ import annotations

import contextlib
import gc
import itertools

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.distributed as dist  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook  # noqa: E402
from torch.distributed.algorithms.join import Join  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler  # noqa: E402

from tests.torch.models import Net, Normed, batch, require_close, seeded, sgd, train, train_alone  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=1)
STEPS = 4
#: Hooks that are C++ all through.
BUILT_IN = {"built in": dist.BuiltinCommHookType.ALLREDUCE, "built in fp16": dist.BuiltinCommHookType.FP16_COMPRESS}


def require_replicas(model):
    """All ranks have the same bits."""
    mine = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    assert all(torch.equal(each, mine) for each in everyone)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_cap_mb": 0.0005},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0005},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
    ],
    ids=str,
)
def test_training_equals_one_process(world, options):
    start = seeded(Net, seed=dist.get_rank())  # DDP sends rank 0's
    model = DDP(start, **options)
    alone, expected = train_alone(seeded(Net), STEPS, sgd)
    losses = train(model, STEPS, sgd(model.parameters()))
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    require_close(model.module, alone)
    require_replicas(model)


def test_buckets_change_no_bit(world):
    models = [DDP(seeded(Net), bucket_cap_mb=size) for size in (0.0001, 0.001, 25)]
    for model in models:
        train(model, STEPS, sgd(model.parameters()))
    for model in models[1:]:
        require_close(model.module, models[0].module, 0)


def test_parameters_that_a_rank_leaves_unused(world):
    branch = "left" if dist.get_rank() % 2 else "right"
    model = DDP(seeded(Net), find_unused_parameters=True)
    for step in range(STEPS):
        images, labels = batch(dist.get_rank(), step)
        torch.nn.functional.cross_entropy(model(images, branch), labels).backward()
    right = seeded(Net)
    size = dist.get_world_size()
    for step in range(STEPS):
        for rank in range(size):
            images, labels = batch(rank, step)
            loss = torch.nn.functional.cross_entropy(right(images, "left" if rank % 2 else "right"), labels)
            (loss / size).backward()
    for mine, theirs in zip(model.parameters(), right.parameters(), strict=True):
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_no_sync_accumulates(world):
    model, alone = DDP(seeded(Net)), seeded(Net)
    size = dist.get_world_size()
    for step in range(3):
        with model.no_sync() if step < 2 else contextlib.nullcontext():
            images, labels = batch(dist.get_rank(), step)
            torch.nn.functional.cross_entropy(model(images), labels).backward()
        for rank in range(size):
            images, labels = batch(rank, step)
            (torch.nn.functional.cross_entropy(alone(images), labels) / size).backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        if mine.requires_grad:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_uneven_inputs_with_join(world):
    model = DDP(seeded(Net))
    optimizer = sgd(model.parameters())
    with model.join():
        for step in range(2 + dist.get_rank()):
            optimizer.zero_grad()
            images, labels = batch(dist.get_rank(), step)
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    require_replicas(model)
    with Join([model]):
        for step in range(3 - min(2, dist.get_rank())):
            images, labels = batch(dist.get_rank(), step)
            torch.nn.functional.cross_entropy(model(images), labels).backward()


@pytest.mark.parametrize("hook", [None, *BUILT_IN])
@pytest.mark.parametrize("by_active", [False, True])
def test_ranks_that_have_joined(world, hook, by_active):
    """A step's gradient is the sum over the ranks that have a batch, by all ranks or by these."""
    size, rank = dist.get_world_size(), dist.get_rank()
    model, alone = DDP(seeded(Net)), seeded(Net)
    if hook:
        model._register_builtin_comm_hook(BUILT_IN[hook])
    optimizers = [sgd(model.parameters()), sgd(alone.parameters())]
    with model.join(divide_by_initial_world_size=not by_active):
        for step in range(2 + rank):
            optimizers[0].zero_grad()
            images, labels = batch(rank, step)
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            gc.collect()  # of the work that the reducer keeps
            optimizers[0].step()
    for step in range(1 + size):
        optimizers[1].zero_grad()
        active = [each for each in range(size) if step < 2 + each]
        for images, labels in (batch(each, step) for each in active):
            loss = torch.nn.functional.cross_entropy(alone(images), labels)
            (loss / (len(active) if by_active and not hook else size)).backward()
        optimizers[1].step()
    require_close(model.module, alone, 2e-2 if hook == "built in fp16" else 1e-12)
    require_replicas(model)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_a_compiled_model(world, options):
    """Dynamo sees the frames of collectives that a compiled step calls, and has to leave them as they are."""
    model = torch.compile(DDP(seeded(Net, dist.get_rank()), **options), backend="aot_eager")
    alone, expected = train_alone(seeded(Net), STEPS, sgd)
    torch.testing.assert_close(train(model, STEPS, sgd(model.parameters())), expected, rtol=1e-12, atol=1e-12)
    require_close(model.module, alone)
    torch._dynamo.reset()


def test_buffers_follow_rank_0(world):
    model = DDP(seeded(Normed, dist.get_rank()))
    train(model, STEPS, sgd(model.parameters()))
    model(batch(dist.get_rank(), 9)[0])
    statistics = model.module.body[1].running_mean.clone()
    dist.broadcast(statistics, 0)
    require_replicas(model)


@pytest.mark.parametrize("hook", ["allreduce", "own", "fp16", "built in", "built in fp16"])
def test_comm_hooks(world, hook):
    def own(state, bucket):
        tensor = bucket.buffer() / dist.get_world_size()
        return dist.all_reduce(tensor, async_op=True).get_future().then(lambda future: future.value()[0])

    model = DDP(seeded(Net), bucket_cap_mb=0.0005)
    hooks = {
        "allreduce": default_hooks.allreduce_hook,
        "own": own,
        "fp16": default_hooks.fp16_compress_hook,
    }
    if hook in BUILT_IN:
        model._register_builtin_comm_hook(BUILT_IN[hook])
    else:
        model.register_comm_hook(None, hooks[hook])
    alone, _ = train_alone(seeded(Net), STEPS, sgd)
    train(model, STEPS, sgd(model.parameters()))
    require_close(model.module, alone, 1e-2 if "fp16" in hook else 1e-12)
    require_replicas(model)


def test_powersgd_hook(world):
    model = DDP(seeded(Net).float())
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=16, start_powerSGD_iter=2, min_compression_rate=0.1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = sgd(model.parameters())
    for step in range(6):
        optimizer.zero_grad()
        images, labels = batch(dist.get_rank(), step)
        torch.nn.functional.cross_entropy(model(images.float()), labels).backward()
        optimizer.step()
    require_replicas(model)


def test_a_model_per_group(groups):
    ranks, group = groups["even"]
    if dist.get_rank() in ranks:
        model = DDP(seeded(Net, dist.get_rank()), process_group=group)
        train(model, 2, sgd(model.parameters()))
        mine = next(model.parameters()).detach().clone()
        dist.broadcast(mine, ranks[0], group)
        assert torch.equal(mine, next(model.parameters()))


def test_sampler_and_loader(world):
    dataset = torch.arange(23)
    sampler = DistributedSampler(dataset, shuffle=True, seed=3)
    sampler.set_epoch(2)
    seen = torch.cat(list(DataLoader(dataset, batch_size=4, sampler=sampler)))
    everyone = [torch.empty_like(seen) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, seen)
    assert set(torch.cat(everyone).tolist()) == set(range(23))


def test_stats_name_gradients_and_buckets(world):
    import clcomm.torch
    from tests.helpers import Recorder

    comm, seen = clcomm.torch.communicator(), Recorder()
    comm.add_observer(seen)
    model = DDP(seeded(Net), bucket_cap_mb=0.0005)
    train(model, 3, sgd(model.parameters()))
    comm.remove_observer(seen)
    buckets = [event.bucket for event in seen.events if event.label == "gradients"]
    assert len(buckets) > 6 and buckets.count(0) == 3
    assert all(after in (0, before + 1) for before, after in itertools.pairwise(buckets))
