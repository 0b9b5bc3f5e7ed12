"""FSDP, fully_shard, ZeroRedundancyOptimizer, DTensor and distributed checkpoints on backend clcomm."""

from __future__ import annotations

import copy
from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import warnings  # noqa: E402

warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch's own, of parts of it that it uses itself

import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as checkpoint  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard  # noqa: E402
from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: E402
from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from benchmarks.torch_ddp import sharded_losses  # noqa: E402
from benchmarks.torch_training import Transformer  # noqa: E402
from tests.torch.models import CLASSES, FEATURES, Net, require_close, seeded, sgd, train, train_alone  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=1)
STEPS = 4


class Plain(nn.Module):
    """Layers whose sizes no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 13), nn.Tanh(), nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, CLASSES)
        )

    def forward(self, images):
        return self.layers(images)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_fully_sharded_data_parallel(world):
    model = FullyShardedDataParallel(seeded(Plain), device_id=torch.device("cpu"), use_orig_params=True)
    alone, expected = train_alone(seeded(Plain), STEPS, sgd)
    losses = train(model, STEPS, sgd(model.parameters()))
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-10)
    with FullyShardedDataParallel.summon_full_params(model):
        for (_, mine), (_, theirs) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
            torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-10, atol=1e-10)


def sharded(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def test_fully_shard(world):
    model = sharded(seeded(Plain))
    alone, expected = train_alone(seeded(Plain), STEPS, sgd)
    losses = train(model, STEPS, sgd(model.parameters()))
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-10)
    for (_, mine), (_, theirs) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor().detach(), theirs.detach(), rtol=1e-10, atol=1e-10)


def test_a_sharded_transformer_has_the_losses_of_one_rank(world):
    """The benchmark's architecture; `python -m benchmarks.torch_ddp --model transformer` compares all of it."""
    mine, alone = sharded_losses(partial(Transformer, width=32, layers=3), batch=3, steps=6)
    assert max(abs(one - other) for one, other in zip(mine, alone, strict=True)) <= 1e-5
    assert len(set(alone)) == 6


@pytest.mark.parametrize("overlap", [False, True])
def test_zero_redundancy_optimizer(world, overlap):
    model = DistributedDataParallel(seeded(Net))
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer = ZeroRedundancyOptimizer(
        parameters, torch.optim.SGD, lr=0.1, momentum=0.9, parameters_as_bucket_view=overlap
    )
    alone, expected = train_alone(seeded(Net), STEPS, sgd)
    losses = train(model, STEPS, optimizer)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    require_close(model.module, alone)
    optimizer.consolidate_state_dict(0)


def test_distributed_checkpoint(world, tmp_path_factory):
    folder = [str(tmp_path_factory.mktemp("checkpoint"))]
    dist.broadcast_object_list(folder, 0)
    model = sharded(seeded(Plain))
    train(model, 2, sgd(model.parameters()))
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder[0])
    other = sharded(seeded(Plain, 5))
    state = {"model": other.state_dict()}
    checkpoint.load(state, checkpoint_id=folder[0])
    other.load_state_dict(state["model"])
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs.full_tensor())


def test_dtensor_redistributes(world):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1)
    whole = torch.randn(9, 10, dtype=torch.float64)
    by_rows = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(by_rows.full_tensor(), whole)
    by_columns = by_rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(by_columns.full_tensor(), whole)
    assert torch.equal(by_columns.redistribute(mesh, [Replicate()]).to_local(), whole)
    product = by_columns @ distribute_tensor(whole.T.contiguous(), mesh, [Shard(0)])
    torch.testing.assert_close(product.full_tensor(), whole @ whole.T)


def test_tensor_parallel(world):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)))
    alone = copy.deepcopy(model)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    images = torch.ones(3, 6, dtype=torch.float64) / 7
    out, expected = model(images), alone(images)
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    expected.sum().backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


@pytest.mark.mpi(min_size=4)
def test_a_mesh_of_two_dimensions(world):
    if dist.get_world_size() != 4:
        pytest.skip("4 ranks")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = seeded(Plain)
    fully_shard(model, mesh=mesh)
    _, expected = train_alone(seeded(Plain), STEPS, sgd)
    torch.testing.assert_close(train(model, STEPS, sgd(model.parameters())), expected, rtol=1e-10, atol=1e-10)
