"""Outer steps of the whole model at once: local SGD and DiLoCo."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clcomm.comm.communicator import Communicator
from clcomm.sync.policies.policy import LocalSteps, ModelParameters, Policy


class Nesterov:
    """An outer optimizer of a part of the parameters: SGD with Nesterov momentum, as PyTorch's computes it.

    anchor: the parameters after the last outer step, the same on all ranks.
    """

    def __init__(self, values: np.ndarray, lr: float, momentum: float):
        self.anchor, self.velocity = values.copy(), np.zeros_like(values)
        self._lr, self._momentum = values.dtype.type(lr), values.dtype.type(momentum)

    def step(self, gradient: np.ndarray) -> None:
        """Move the anchor against the mean outer gradient, whose memory it writes over."""
        self.velocity *= self._momentum
        self.velocity += gradient
        gradient += self._momentum * self.velocity
        gradient *= self._lr
        self.anchor -= gradient


@dataclass(frozen=True)
class LocalSGD(Policy):
    """The parameters become their mean every `h` steps.

    Source: Stich, "Local SGD converges fast and communicates little", ICLR 2019.
    """

    name = "local"

    def start(self, comm: Communicator, model: ModelParameters) -> LocalSteps:
        return _Mean(self.h, comm, model)


class _Mean(LocalSteps):
    takes_means = True

    def outer_step(self) -> None:
        self.model.write(self.mean(self.model.read()))

    def state(self) -> dict[str, np.ndarray]:
        return {}


@dataclass(frozen=True)
class DiLoCo(Policy):
    """Each rank's optimizer takes `h` steps; an outer one then moves by the mean of how far the ranks came.

    lr, momentum: those of the outer SGD with Nesterov momentum.

    Source: Douillard et al., "DiLoCo: Distributed low-communication training of language models", arXiv 2311.08105.
    """

    name = "diloco"
    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("lr", self.lr > 0, "a positive learning rate")
        self.require("momentum", 0 <= self.momentum < 1, "a share from 0 to below 1")

    def start(self, comm: Communicator, model: ModelParameters) -> LocalSteps:
        return _DiLoCo(self, comm, model)


class _DiLoCo(LocalSteps):
    takes_means = True

    def __init__(self, settings: DiLoCo, comm: Communicator, model: ModelParameters):
        super().__init__(settings.h, comm, model)
        self._outer = Nesterov(model.read(), settings.lr, settings.momentum)

    def outer_step(self) -> None:
        self._outer.step(self.mean(self._outer.anchor - self.model.read()))
        self.model.write(self._outer.anchor)

    def state(self) -> dict[str, np.ndarray]:
        return {"anchor": self._outer.anchor, "velocity": self._outer.velocity}
