"""PyTorch's models over logical shards, wrapped in DistributedDataParallel on backend clcomm: the bits of one rank."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402

import clcomm.horovod as hvd  # noqa: E402
from clcomm import Communicator, Synchronizer  # noqa: E402
from clcomm.base.errors import ArgumentError, MismatchError  # noqa: E402
from tests.helpers import one_line  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=1)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def network():
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 6, 3, padding=1), torch.nn.BatchNorm2d(6), torch.nn.ReLU(), torch.nn.Dropout(0.3),
        torch.nn.Flatten(), torch.nn.Linear(6 * 64, 5),
    )  # fmt: skip


def trained(comm, model, inner, shards, steps=3):
    """Return the bytes of parameters, shard 0's running statistics and Adam's state."""
    sync, stepper = Synchronizer(comm, shards=shards), torch.optim.Adam(inner.parameters(), 1e-2)
    sync.broadcast_parameters(model)
    for step in range(steps):
        for shard in sync.shards.own:
            drawn = torch.Generator().manual_seed(100 * step + shard)
            images, labels = torch.randn(6, 1, 8, 8, generator=drawn), torch.randint(5, (6,), generator=drawn)
            with sync.shard(model, shard):
                torch.nn.functional.cross_entropy(model(images), labels).backward()
        sync.sync_gradients(model)
        stepper.step()
        stepper.zero_grad()
    sync.broadcast_buffers(model)
    values = [*inner.state_dict().values(), *(each for state in stepper.state.values() for each in state.values())]
    return b"".join(each.detach().numpy().tobytes() for each in values)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("more", [0, 3])
def test_a_wrapped_model_has_the_bits_of_one_rank(world, options, more):
    shards = dist.get_world_size() + more
    alone = network()
    expected = trained(Communicator(transport="solo"), alone, alone, shards)
    inner = network()
    assert trained(Communicator(), DDP(inner, **options), inner, shards) == expected


def test_a_wrapped_model_whose_first_backward_has_to_average_is_refused(world):
    model = DDP(network(), static_graph=True)
    sync = Synchronizer(Communicator(), shards=8)
    refusal = pytest.raises(ArgumentError, match="shard: expected a DistributedDataParallel without static_graph")
    with refusal as caught, sync.shard(model, sync.shards.own.start):
        pass
    one_line(caught)


@pytest.mark.parametrize("layer", [torch.nn.SyncBatchNorm, hvd.SyncBatchNorm], ids=["torch", "horovod"])
def test_statistics_of_ranks_are_refused(world, layer):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), layer(4))
    with pytest.raises(ArgumentError, match=r"shards: expected a model without .*SyncBatchNorm, whose") as caught:
        Synchronizer(Communicator(), shards=8).broadcast_parameters(model)
    one_line(caught)


@pytest.mark.mpi(min_size=2)
def test_ranks_with_other_threads_are_refused(world):
    torch.set_num_threads(1 + (dist.get_rank() == 1))
    with pytest.raises(
        MismatchError, match=r"shards: .* with 1 threads on cpu' on .*; give each rank the same"
    ) as caught:
        Synchronizer(Communicator(), shards=8).broadcast_parameters(network())
    one_line(caught)
