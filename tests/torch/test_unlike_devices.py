"""Ranks whose devices round steps differently: compared after the first step and every 100th, and made alike."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import sys
from collections import Counter
from weakref import ref

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402

from clcomm.sync import torch_replicas  # noqa: E402
from tests.faults.launch import finish, start  # noqa: E402
from tests.torch.models import Net, Normed, batch, seeded  # noqa: E402

SEVERAL = pytest.mark.mpi(min_size=2)
#: Averagings after which replicas are compared.
COMPARED = (2, 100)


class Recurrent(nn.Module):
    """An LSTM whose last layer is tied to its first."""

    def __init__(self):
        super().__init__()
        self.cells, self.inner, self.outer = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 5), nn.Linear(6, 5)
        self.outer.weight = self.inner.weight

    def forward(self, images):
        hidden, _ = self.cells(images.view(-1, 3, 4))
        return self.inner(hidden[:, -1]) + self.outer(hidden[:, 0])


def bits(model):
    """Return a hash of a model's parameters."""
    whole = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
    return hashlib.sha256(whole.numpy().tobytes()).hexdigest()


def gathered(value):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


@pytest.fixture
def unlike(monkeypatch):
    """Ranks that compute with two kinds in turn."""
    monkeypatch.setattr(torch_replicas, "computes_with", lambda _: f"kind {dist.get_rank() % 2}")


@SEVERAL
@pytest.mark.parametrize("seed", range(50))
def test_drawn_jobs_that_drift_are_found_and_made_alike(world, unlike, caplog, seed):
    draw, rank = random.Random(seed), dist.get_rank()
    options = draw.choice([{}, {"bucket_cap_mb": 0.0005}, {"gradient_as_bucket_view": True}, {"static_graph": True},
                           {"find_unused_parameters": True}])  # fmt: skip
    net = seeded(draw.choice([Net, Normed, Recurrent]))
    model = DDP(net.to(memory_format=draw.choice([torch.contiguous_format, torch.channels_last])), **options)
    name, settings = draw.choice(
        [("SGD", {}), ("SGD", {"momentum": 0.9}), ("Adam", {}), ("AdamW", {}), ("RMSprop", {})]
    )
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3, **settings)
    passes, drifting = 1 if "static_graph" in options else draw.choice([1, 2]), draw.randrange(dist.get_world_size())
    moved = draw.choice([each.data for each in model.parameters() if each.requires_grad])
    for backward in range(1, COMPARED[-1] + 1):
        optimizer.zero_grad()
        for accumulated in range(passes):
            is_last = accumulated == passes - 1
            before = bits(model)
            with caplog.at_level("WARNING", "clcomm"), model.no_sync() if not is_last else torch.enable_grad():
                images, labels = batch(rank, 2 * backward + accumulated)
                nn.functional.cross_entropy(model(images), labels).backward()
        if backward in COMPARED:
            starts = gathered(before)
            most = Counter(starts).most_common(1)[0][0]
            assert len(set(starts)) > 1 and gathered(bits(model)) == [most] * len(starts)
            assert not dist.get_rank() or bits(model) == most
        elif backward < COMPARED[0]:
            assert bits(model) == before
        if backward == COMPARED[-1]:
            break
        optimizer.step()
        if rank == drifting:
            moved.copy_(torch.nextafter(moved, torch.tensor(9.0, dtype=moved.dtype)))
    said = gathered(caplog.messages)
    assert not any(said[1:])
    (line,) = said[0]
    assert "'module." in line and "kind 0 on rank" in line and "kind 1 on rank" in line and "all go on with" in line


@SEVERAL
def test_a_graph_that_is_kept_serves_after_the_comparison(world, unlike):
    model = DDP(seeded(Net))
    for step in range(2):
        images, labels = batch(dist.get_rank(), step)
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward(retain_graph=True)
        with torch.no_grad():
            model.module.first.weight.data.add_(dist.get_rank() if step == 0 else 0)
    loss.backward()
    assert len(set(gathered(bits(model)))) == 1


@SEVERAL
def test_ranks_that_have_joined_compare_nothing_meanwhile(world, unlike):
    model = DDP(seeded(Net))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(steps):
        for step in range(steps):
            optimizer.zero_grad()
            images, labels = batch(dist.get_rank(), step)
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            with torch.no_grad():
                model.module.first.weight.add_(1e-12 * dist.get_rank())

    with model.join():
        train(1 + dist.get_rank())  # the second averaging is not of all ranks
    assert len(set(gathered(bits(model)))) == 1
    train(2)  # the second of all
    train(98)
    images, labels = batch(dist.get_rank(), 0)
    nn.functional.cross_entropy(model(images), labels).backward()
    assert len(set(gathered(bits(model)))) > 1
    dist.barrier()


@SEVERAL
@pytest.mark.parametrize("alike", [True, False])
def test_ranks_of_one_kind_pay_no_comparison_and_no_model_is_kept(world, monkeypatch, alike):
    monkeypatch.setattr(torch_replicas, "computes_with", lambda _: f"kind {0 if alike else dist.get_rank()}")
    compared, find = [], torch_replicas.find_differing
    monkeypatch.setattr(torch_replicas, "find_differing", lambda *given: compared.append(given) or find(*given))
    model = DDP(seeded(Net))
    for step in range(4):
        images, labels = batch(dist.get_rank(), step)
        nn.functional.cross_entropy(model(images), labels).backward()
    assert len(compared) == (0 if alike else 1)
    kept = ref(model.module.first.weight)
    del model
    gc.collect()
    assert kept() is None


DRIFT = """
import os, hashlib
from clcomm.base.host.launcher import launched_rank
if launched_rank() == 0:
    os.environ["ATEN_CPU_CAPABILITY"] = "default"  # before PyTorch is loaded: a processor without fused multiply-add
import torch
DOOR = {door!r}
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(12, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))
optimizer, average = torch.optim.SGD(net.parameters(), 0.1), lambda: None
if DOOR == "torch":
    import torch.distributed as dist
    import clcomm.torch
    dist.init_process_group("clcomm")
    comm, model = clcomm.torch.communicator(), torch.nn.parallel.DistributedDataParallel(net)
elif DOOR == "horovod":
    import clcomm.horovod as hvd
    hvd.init()
    hvd.broadcast_parameters(net.state_dict(), 0)
    model, optimizer = net, hvd.DistributedOptimizer(optimizer, net.named_parameters())
    average = optimizer.synchronize
else:
    from clcomm import Synchronizer
    model, sync = net, Synchronizer(Communicator())
    sync.broadcast_parameters(net)
    average = lambda: sync.sync_gradients(net)

def hashes():
    own = torch.cat([each.detach().reshape(-1) for each in net.parameters()]).numpy().tobytes()
    return len(set(world.all_gather_object(own)))

world, found = Communicator(), []
for step in range(100):
    optimizer.zero_grad()
    images = torch.randn(4, 12, generator=torch.Generator().manual_seed(100 * world.rank + step))
    model(images).square().mean().backward()
    average()
    if step in (0, 1, 98, 99):
        found.append(hashes())
    if DOOR == "horovod":
        with optimizer.skip_synchronize():
            optimizer.step()
    else:
        optimizer.step()
    if step == 0:
        found.append(hashes())
if world.rank == 0:
    print(found, torch.backends.cpu.get_cpu_capability())
"""


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="a processor of the plainest kind")
@pytest.mark.parametrize("door", ["torch", "horovod", "synchronizer"])
def test_processors_of_two_kinds_drift_and_are_made_alike(tmp_path, door):
    path = os.pathsep.join(["."] + [each for each in sys.path if each])
    ended = finish(start(tmp_path, DRIFT.format(door=door), ranks=3, PYTHONPATH=path))
    assert ended.code == 0, ended.err
    assert ended.out.strip() == "[1, 2, 1, 2, 1] DEFAULT"
    (line,) = [each for each in ended.err.splitlines() if "replicas" in each]
    own = torch.backends.cpu.get_cpu_capability()
    assert "DEFAULT) on rank 0" in line and f"{own}) on ranks 1 and 2" in line and line.endswith("go on with rank 1's")
