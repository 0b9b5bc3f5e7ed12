"""What tests of overlap train, with it and without: a small model of the engine, and its like in PyTorch."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Synchronizer
from clcomm.engine import CrossEntropyLoss, Generator, Linear, Module, Replay, Tensor
from clcomm.optim import SGD


class Net(Module):
    """Three layers, of which the second can be left out."""

    def __init__(self, device):
        rng = Generator(0)
        self.first = Linear(12, 40, device=device, rng=rng)
        self.second = Linear(40, 40, device=device, rng=rng)
        self.third = Linear(40, 3, device=device, rng=rng)

    def forward(self, x, whole=True):
        x = self.first(x).relu()
        return self.third(self.second(x).relu() if whole else x)


def batch(rank: int, step: int):
    rng = np.random.default_rng([rank, step])
    return rng.standard_normal((4, 12)).astype(np.float32), rng.integers(0, 3, 4).astype(np.int32)


class Side:
    """A model and its optimizer; a step is `backward`, a synchronisation and `update`."""

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class Native(Side):
    """Trains a Net, recorded and queued again."""

    def __init__(self, device, rank: int = 0):
        self.device, self.rank = device, rank
        self.model = Net(device)
        self.model.flat_space()
        loss_fn = CrossEntropyLoss()

        def run(x, y, whole):
            loss_fn(self.model(x, whole), y).backward()

        self.run = Replay(run)
        self.optimizer = SGD(self.model, 0.1, momentum=0.9)

    def backward(self, step: int, whole: bool = True) -> None:
        x, y = batch(self.rank, step)
        self.run(Tensor(x, self.device), Tensor(y, self.device), whole)

    def bits(self) -> list[bytes]:
        return [value.tobytes() for value in self.model.state_dict().values()]


class Torch(Side):
    """Trains the same with PyTorch, or skips the test where it is not installed."""

    def __init__(self, device, rank: int = 0):
        self.torch = torch = pytest.importorskip("torch", reason="PyTorch is not installed")
        self.rank = rank
        torch.manual_seed(0)
        self.model = self.net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)

    def net(self):
        nn = self.torch.nn

        class TorchNet(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second, self.third = nn.Linear(12, 40), nn.Linear(40, 40), nn.Linear(40, 3)

            def forward(self, x, whole=True):
                x = self.first(x).relu()
                return self.third(self.second(x).relu() if whole else x)

        return TorchNet()

    def backward(self, step: int, whole: bool = True) -> None:
        torch, (x, y) = self.torch, batch(self.rank, step)
        torch.nn.functional.cross_entropy(self.model(torch.tensor(x), whole), torch.tensor(y).long()).backward()

    def bits(self) -> list[bytes]:
        return [value.numpy().tobytes() for value in self.model.state_dict().values()]


KINDS = ["native", "queued", "staged", "torch"]


def side_of(kind: str, device, rank: int) -> Side:
    return (Torch if kind == "torch" else Native)(device, rank)


def begun(kind: str, comm, device, steps: int = 0, **options) -> tuple[Side, Synchronizer]:
    """Return a side after some steps, and its Synchronizer."""
    side, sync = side_of(kind, device, comm.rank), Synchronizer(comm, **options)
    sync.broadcast_parameters(side.model)
    for step in range(steps):
        side.backward(step)
        sync.sync_gradients(side.model)
        side.update()
    return side, sync


def trained(kind: str, comm, device, monkeypatch, steps: int = 5, micro_batches: int = 1, **options) -> tuple:
    """Return the bits after some steps, and the Synchronizer."""
    if kind in ("queued", "staged"):  # as a device that computes by itself, and one with memory of its own
        monkeypatch.setattr(device, "runs_in_caller", False)
    if kind == "staged":
        monkeypatch.setattr(device, "shares_host_memory", False)
    side, sync = begun(kind, comm, device, **options)
    for step in range(steps):
        for micro in range(micro_batches - 1):
            with sync.no_sync():
                side.backward(100 * step + micro, whole=micro % 2 == 0)
                sync.sync_gradients(side.model)
        side.backward(100 * step + 99, whole=step != 3)
        sync.sync_gradients(side.model)
        side.update()
    monkeypatch.undo()
    return side.bits(), sync
