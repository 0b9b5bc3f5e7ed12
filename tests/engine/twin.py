"""Two equal models, one with its step replayed, which the tests of Replay compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from clcomm import optim
from clcomm.engine import CrossEntropyLoss, Replay, Tensor
from clcomm.engine.device import Device
from models import MLP, ConvNet

SHAPE, CLASSES = (1, 10, 10), 7
MODELS: dict[str, Callable[[Device], Any]] = {
    "mlp": lambda device: MLP(SHAPE, CLASSES, 20, device=device, seed=3),
    "convnet": lambda device: ConvNet(SHAPE, CLASSES, device=device, seed=3),
}
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda model: optim.SGD(model, 0.1, momentum=0.9),
    "adam": lambda model: optim.Adam(model, 0.01),
    "rmsprop": lambda model: optim.RMSProp(model, 0.01),
}
LOSS = CrossEntropyLoss()


def repeats(replay: Replay) -> int:
    """Return how many runs a Replay replayed or checked."""
    return replay.replayed + replay.checked


class Twin:
    """A model with a plain step, and an equal one with its step replayed; every call is made on both."""

    def __init__(self, device: Device, model: str = "mlp", optimizer: str = "sgd", limit: int = 16):
        self.device = device
        self.models = [MODELS[model](device) for _ in range(2)]
        self.optimizers = [OPTIMIZERS[optimizer](model) for model in self.models]
        self.steps: list[Any] = [self.make_step(model) for model in self.models]
        self.replay = self.steps[1] = Replay(self.steps[1], limit=limit)
        self.rng = np.random.default_rng(5)

    @staticmethod
    def make_step(model: Any) -> Callable[..., Tensor]:
        def step(x: Tensor, y: Tensor, weight: float = 1.0) -> Tensor:
            loss = LOSS(model(x), y)
            loss.backward(weight)
            return loss

        return step

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        images = self.rng.standard_normal((size, *SHAPE)).astype(np.float32)
        return Tensor(images, self.device), Tensor(self.rng.integers(0, CLASSES, size), self.device)

    def step(self, size: int = 8, *rest: Any) -> None:
        x, y = self.batch(size)
        losses = [step(x, y, *rest) for step in self.steps]
        assert losses[0].numpy().tobytes() == losses[1].numpy().tobytes()
        self.assert_same_gradients()

    def update(self, zero: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            if zero:
                optimizer.zero_grad()

    def assert_same_gradients(self) -> None:
        for p, q in zip(*(model.parameters() for model in self.models), strict=True):
            if p.grad is None:
                assert q.grad is None
            else:
                assert p.grad.numpy().tobytes() == q.grad.numpy().tobytes()

    def assert_same_parameters(self) -> None:
        first, second = (model.state_dict() for model in self.models)
        for name in first:
            assert first[name].tobytes() == second[name].tobytes(), name
