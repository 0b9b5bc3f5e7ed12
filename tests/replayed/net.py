"""A small model whose kernels depend on a Python value, which each subclass holds in another place."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from clcomm import optim
from clcomm.engine import CrossEntropyLoss, Generator, Linear, Module, Tensor

FEATURES, HIDDEN, CLASSES = 6, 10, 3
#: What `change` chooses from, for most nets.
RATES = (1.0, 0.5, 2.0)


class Net(Module):
    """Two layers; between them a subclass does what depends on a Python value, which `change` sets."""

    def __init__(self, device):
        rng = Generator(0)
        self.first = Linear(FEATURES, HIDDEN, device=device, rng=rng)
        self.last = Linear(HIDDEN, CLASSES, device=device, rng=rng)
        self.start()
        self.flat_space()
        self.optimizer = optim.SGD(self, 0.1, momentum=0.5, weight_decay=0.01)

    def start(self) -> None:
        pass

    def forward(self, x):
        return self.last(self.between(self.first(x).relu()))

    def between(self, h):
        return h

    def change(self, value: int) -> None:
        """Set the value that the step depends on to one of three values."""

    def function(self):
        """Return what is replayed."""
        loss_fn = CrossEntropyLoss()

        def forward_backward(x, y):
            loss = loss_fn(self(x), y)
            loss.backward()
            return loss

        return forward_backward

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def batch(device, rng: Any, size: int = 4):
    x = rng.standard_normal((size, FEATURES)).astype(np.float32)
    return Tensor(x, device), Tensor(rng.integers(0, CLASSES, size).astype(np.int32), device)


class Randomness:
    """The state of the global random generators, so that two runs draw the same."""

    def __init__(self) -> None:
        self.states = random.getstate(), np.random.get_state()

    def restore(self) -> None:
        random.setstate(self.states[0])
        np.random.set_state(self.states[1])
