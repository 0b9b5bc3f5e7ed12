"""DistributedDataParallel: ranks with batches of their own equal one rank with all of them, with any options."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest

from clcomm import DistributedDataParallel, Mesh, Synchronizer
from clcomm.base.errors import ArgumentError, MismatchError
from clcomm.engine import Linear, Tensor
from tests.helpers import cpu_device, one_line
from tests.numpy_models import Model
from tests.parallel.small_networks import (
    CLASSES,
    FEATURES,
    STEPS,
    backward,
    batch_of,
    joined,
    network,
    require_alike,
    require_close,
)  # fmt: skip

pytestmark = pytest.mark.mpi(min_size=1)


# --- control flow ---


# --- hooks, clipping, other libraries ---


def test_a_hook_reduces_the_buckets(auto):
    called = []

    def hook(gradient, comm, out, bucket) -> None:
        called.append(bucket.index)
        comm.all_reduce(gradient, "mean", out=out)

    ddp = DistributedDataParallel(network(auto.rank), auto, bucket_size=600)
    ddp.register_comm_hook(hook)
    backward(ddp, *batch_of(auto.rank, 0))
    ddp.finish_grad_sync()
    plain = network()
    backward(plain, *joined(range(auto.size), 0))
    assert called == list(range(len(ddp.synchronizer.bucket_plan(ddp.module)))) and len(called) > 1
    for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
        assert np.allclose(ours.grad.numpy(), theirs.grad.numpy(), rtol=1e-4, atol=1e-6)
    norm = ddp.clip_grad_norm(1e-3)
    assert norm == pytest.approx(np.sqrt(sum((p.grad.numpy() ** 2).sum() for p in plain.parameters())), rel=1e-4)


@pytest.mark.parametrize("overlap", [False, True, "auto"])
@pytest.mark.parametrize("bucketing", [{}, {"bucket_size": 600}, {"use_bucketing": False}], ids=str)
def test_pytorch_modules_train_as_on_one_rank(auto, overlap, bucketing):
    torch = pytest.importorskip("torch")

    def made(seed: int):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(FEATURES, 16), torch.nn.Tanh(), torch.nn.Linear(16, CLASSES))

    def step(model, optimizer, images, labels, sync) -> None:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(torch.from_numpy(images)), torch.from_numpy(labels).long())
        loss.backward()
        sync()
        optimizer.step()

    ddp, alone = DistributedDataParallel(made(auto.rank), auto, overlap_grad_reduce=overlap, **bucketing), made(0)
    ours, theirs = (torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (ddp, alone))
    for number in range(STEPS):
        step(ddp, ours, *batch_of(auto.rank, number), ddp.finish_grad_sync)
        step(alone, theirs, *joined(range(auto.size), number), lambda: None)
    require_close(*({name: each.numpy() for name, each in model.state_dict().items()} for model in (ddp, alone)))


def test_pytorch_buffers_are_those_of_rank_0(auto):
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 3), torch.nn.BatchNorm1d(3))
    ddp = DistributedDataParallel(model, auto)
    for number in range(3):
        images, _ = batch_of(auto.rank, number)
        ddp(torch.from_numpy(images)).sum().backward()
        ddp.finish_grad_sync()
        ddp.zero_grad()
    ddp.synchronizer.broadcast_buffers(model)
    state = {name: buffer.numpy() for name, buffer in model.named_buffers()}
    require_alike(auto, state)
    assert state["1.num_batches_tracked"] == 3


# --- veScale's documented example, with its imports changed and "cuda" left out ---


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_the_example_of_vescale(auto, overlap, sharded):
    torch = pytest.importorskip("torch")
    from clcomm.parallel import DeviceMesh
    from clcomm.parallel import DistributedDataParallel as DDP

    mlp = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    ranks = np.arange(auto.size).reshape(-1, 2 if auto.size % 2 == 0 else 1).tolist()
    device_mesh = DeviceMesh(ranks, mesh_dim_names=("DP", "TP"), comm=auto)
    if sharded:  # for the engine's models
        mlp = network()
    dp_tp_mlp = DDP(mlp, device_mesh["DP"], overlap_grad_reduce=overlap, use_distributed_optimizer=sharded)
    torch.manual_seed(auto.rank)
    x = torch.rand(3, FEATURES if sharded else 4)
    dp_tp_mlp(Tensor(x.numpy(), cpu_device("cpu")) if sharded else x).sum().backward()
    dp_tp_mlp.finish_grad_sync()
    gradients = {name: np.array(p.grad.numpy()) for name, p in dp_tp_mlp.named_parameters()}
    require_alike(device_mesh["DP"], gradients)


# --- bad use ---


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "options",
    [
        {"bucket_size": 600}, {"use_bucketing": False}, {"overlap_grad_reduce": True}, {"check_finite": True},
        {"use_distributed_optimizer": True}, {"broadcast_buffers": False}, {"compression": "fp16"},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_differ_are_refused_at_construction(several, options):
    last = several.rank == several.size - 1
    with pytest.raises(MismatchError, match=r"^DistributedDataParallel: expected the same on every rank") as caught:
        DistributedDataParallel(network(), several, **(options if last else {}))
    text = one_line(caught)
    assert several.all_gather_object(text) == [text] * several.size


@pytest.mark.mpi(min_size=2)
def test_models_that_differ_are_refused_at_construction(several):
    mesh = Mesh(several, dp=-1)
    with pytest.raises(MismatchError, match=r"on dp rank") as caught:
        DistributedDataParallel(Linear(3, 2 + (several.rank == 0), device=cpu_device("cpu")), mesh)
    text = one_line(caught)
    assert several.all_gather_object(text) == [text] * several.size


def test_other_bad_use_is_refused(auto):
    with pytest.raises(ArgumentError, match=r"^use_distributed_optimizer: expected False for other libraries' models"):
        DistributedDataParallel(Model([("w", np.ones(3))]), auto, use_distributed_optimizer=True)
    with pytest.raises(ArgumentError, match=r"^comm: expected a Communicator or a Mesh, got Synchronizer$"):
        DistributedDataParallel(network(), Synchronizer(auto))
    ddp = DistributedDataParallel(network(), auto)
    with pytest.raises(ArgumentError, match=r"^DistributedDataParallel: expected to stay in its process"):
        copy.deepcopy(ddp)
    with pytest.raises(AttributeError):
        ddp.nonsense  # noqa: B018
    assert sum(1 for _ in itertools.chain(ddp.parameters())) == 6
