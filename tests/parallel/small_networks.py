"""Small networks, their batches on each rank, and what one rank trains them to."""

from __future__ import annotations

import numpy as np

from clcomm.engine import CrossEntropyLoss, Linear, ReLU, Sequential, Tensor
from clcomm.optim import SGD
from tests.helpers import cpu_device

STEPS, BATCH, FEATURES, CLASSES = 50, 4, 6, 5
#: The bar: relative to the parameters of one rank.
CLOSE = 1e-4


def batch_of(rank: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a rank's samples of a step; any rank can compute all."""
    rng = np.random.default_rng([rank, step])
    return rng.standard_normal((BATCH, FEATURES)).astype(np.float32), rng.integers(0, CLASSES, BATCH).astype(np.int32)


def joined(ranks, step: int) -> tuple[np.ndarray, np.ndarray]:
    images, labels = zip(*(batch_of(rank, step) for rank in ranks), strict=True)
    return np.concatenate(images), np.concatenate(labels)


def network(seed: int = 0) -> Sequential:
    device, rng = cpu_device("cpu"), np.random.default_rng(seed)
    model = Sequential(
        Linear(FEATURES, 16, device=device), ReLU(), Linear(16, 16, device=device), ReLU(),
        Linear(16, CLASSES, device=device),
    )  # fmt: skip
    for parameter in model.parameters():
        parameter.copy_from(rng.standard_normal(parameter.shape).astype(np.float32) * 0.3)
    return model


def backward(model, images: np.ndarray, labels: np.ndarray, scale: float = 1.0) -> float:
    loss = CrossEntropyLoss()(model(Tensor(images, cpu_device("cpu"))), Tensor(labels, cpu_device("cpu")))
    (loss * scale).backward()
    return loss.item()


def trained_alone(ranks: int, steps: int = STEPS, micro: int = 1, frozen: bool = False) -> dict[str, np.ndarray]:
    """Return the parameters of one rank that has trained on the samples of all."""
    model = network()
    freeze(model, frozen)
    optimizer = SGD(model, 0.1, momentum=0.9)
    for step in range(steps):
        for part in range(micro):
            backward(model, *joined(range(ranks), step * micro + part), 1 / micro)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def freeze(model, is_wanted: bool) -> None:
    if is_wanted:
        model[0].weight.requires_grad = False


def require_close(state, expected) -> None:
    assert state.keys() == expected.keys()
    for name, values in state.items():
        norm = np.linalg.norm(expected[name].astype(np.float64))
        assert np.linalg.norm(values.astype(np.float64) - expected[name]) <= CLOSE * norm, name


def require_alike(comm, state) -> None:
    mine = [values.tobytes() for values in state.values()]
    assert all(theirs == mine for theirs in comm.all_gather_object(mine))


class Buffer:
    """A buffer with the two methods of the engine's tensors that are used here."""

    def __init__(self, values: np.ndarray):
        self.values = values

    def numpy(self) -> np.ndarray:
        return self.values.copy()

    def copy_from(self, values: np.ndarray) -> None:
        self.values = np.array(values)


class Counting(Linear):
    """A layer with buffers that each forward changes, by the rank's own data."""

    def __init__(self, rank: int):
        super().__init__(3, 2, device=cpu_device("cpu"))
        self.mean, self.count = Buffer(np.full(2, float(rank), np.float32)), Buffer(np.array(rank, np.int64))

    def named_buffers(self):
        yield from (("mean", self.mean), ("count", self.count))

    def forward(self, x):
        self.seen = self.mean.numpy(), int(self.count.numpy())
        self.mean.copy_from(self.mean.numpy() + x.numpy().mean())
        self.count.copy_from(self.count.numpy() + 1)
        return super().forward(x)
