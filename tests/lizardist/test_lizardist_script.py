"""A training script as LizarDist's users write it, with only its imports changed, at any bucket size."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.nn.functional as F  # noqa: E402

from clcomm import Communicator, Synchronizer  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=1)

STEPS, BATCH = 4, 8
#: Bytes of each parameter of the network below, last layer first: the order in which buckets are filled.
TENSOR_BYTES = (40, 5_120, 512, 802_816, 128, 18_432, 64, 576)


class ConvNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = torch.nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = torch.nn.Linear(1568, 128)
        self.fc2 = torch.nn.Linear(128, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def shard(rank, world_size):
    """Contiguous shards of a small dataset, the remainder with the last rank as LizarDist has it."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(STEPS * BATCH * world_size + 3, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (len(images),), generator=generator)
    size = len(images) // world_size
    end = len(images) if rank == world_size - 1 else (rank + 1) * size
    return torch.utils.data.TensorDataset(images[rank * size : end], labels[rank * size : end])


def train(bucket_size=1 << 20, use_bucketing=True):
    torch.set_num_threads(1)
    comm = Communicator(bucket_size=bucket_size, use_bucketing=use_bucketing)
    rank = comm.get_rank()
    world_size = comm.get_world_size()
    torch.manual_seed(rank)  # every rank starts elsewhere; the broadcast makes them alike
    model = ConvNet()
    sync = Synchronizer(comm, use_bucketing=use_bucketing)
    sync.broadcast_parameters(model)
    loader = torch.utils.data.DataLoader(
        shard(rank, world_size), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(7)
    )
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    for (data, target), _ in zip(loader, range(STEPS), strict=False):
        optimizer.zero_grad()
        loss = criterion(model(data), target)
        loss.backward()
        sync.sync_gradients(model, use_bucketing=use_bucketing)
        optimizer.step()
    comm.barrier()
    stats = comm.get_bucket_stats()
    assert np.isfinite(comm.allreduce(np.array([loss.item()]), op="sum")).all()
    assert len(comm.bcast({"epoch": 1}, root=0)) == 1
    comm.finalize()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).numpy(), stats


@pytest.fixture(scope="module")
def whole():
    """Parameters after training with one bucket for everything, and the stats."""
    return train(bucket_size=1 << 30)


@pytest.mark.parametrize(
    "bucket_size, use_bucketing, buckets", [(1 << 10, True, 7), (256 << 10, True, 3), (1 << 20, False, 8)]
)
def test_parameters_have_the_same_bits_at_any_bucket_size(whole, bucket_size, use_bucketing, buckets):
    parameters, stats = train(bucket_size, use_bucketing)
    assert parameters.tobytes() == whole[0].tobytes()
    assert stats["total_allreduce_calls"] == buckets * STEPS
    assert stats["total_bytes_sent"] == sum(TENSOR_BYTES) * STEPS
    assert whole[1]["total_allreduce_calls"] == STEPS


def test_all_ranks_end_with_the_same_parameters(whole):
    comm = Communicator()
    gathered = comm.all_gather(whole[0])
    assert all(row.tobytes() == gathered[0].tobytes() for row in gathered)


def test_the_result_is_that_of_averaging_by_hand(whole):
    """The same training in one process, with every rank's gradients added in rank order."""
    torch.set_num_threads(1)
    world_size = Communicator().size
    torch.manual_seed(0)
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    loaders = [
        torch.utils.data.DataLoader(
            shard(rank, world_size), BATCH, shuffle=True, generator=torch.Generator().manual_seed(7)
        )
        for rank in range(world_size)
    ]
    for batches, _ in zip(zip(*loaders, strict=False), range(STEPS), strict=False):
        gradients = []
        for data, target in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(data), target).backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        for parameter, parts in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
            parameter.grad = sum(parts) / world_size
        optimizer.step()
    expected = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).numpy()
    np.testing.assert_allclose(whole[0], expected, rtol=1e-5, atol=1e-7)
