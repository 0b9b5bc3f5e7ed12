"""NoLoCo: ranks take outer steps in pairs, which change from one to the next; no data goes to all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clcomm.comm.communicator import Communicator
from clcomm.sync.policies.parameters import ModelParameters
from clcomm.sync.policies.policy import OUTER, LocalSteps, Policy


@dataclass(frozen=True)
class NoLoCo(Policy):
    """Every `h` steps drawn pairs of ranks exchange outer gradients and anchors; of an odd number one is alone.

    A rank's anchor moves by momentum * velocity - lr * (the pair's mean outer gradient) - pull * (its distance from the
    pair's mean anchor). Ranks differ until `align`, after which all have the mean anchor. seed: of the pairs.

    Source: Kolehmainen et al., "NoLoCo: No-all-reduce low communication training method for large models", arXiv
    2506.10911.
    """

    name = "noloco"
    lr: float = 0.7
    momentum: float = 0.5
    pull: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("lr", self.lr > 0, "a positive learning rate")
        self.require("momentum", 0 <= self.momentum < 1, "a share from 0 to below 1")
        self.require("pull", 0 <= self.pull <= 2, "a number from 0 to 2")
        self.require("seed", self.seed >= 0, "a number from 0 up")

    def start(self, comm: Communicator, model: ModelParameters) -> LocalSteps:
        return _Gossip(self, comm, model)


class _Gossip(LocalSteps):
    takes_means = True

    def __init__(self, settings: NoLoCo, comm: Communicator, model: ModelParameters):
        super().__init__(settings.h, comm, model)
        self._settings, self._anchor = settings, model.read().copy()
        self._velocity = np.zeros_like(self._anchor)

    def outer_step(self) -> None:
        number, settings = self.model.dtype.type, self._settings
        own = np.stack([self._anchor - self.model.read(), self._anchor])
        partner = partner_of(self.comm.rank, self.comm.size, settings.seed, self.steps // self.h)
        other = self._exchange(own, partner)
        gradient, anchor = (own + other) * number(0.5)  # the sum of two has the same bits on both
        self._velocity *= number(settings.momentum)
        self._velocity -= number(settings.lr) * gradient + number(settings.pull) * (self._anchor - anchor)
        self._anchor += self._velocity
        self.model.write(self._anchor)

    def _exchange(self, own: np.ndarray, partner: int) -> np.ndarray:
        """Return the partner's array; a rank that is alone calls it too, as all ranks compare their calls."""
        other, none, ranks = np.empty_like(own), np.empty(0, own.dtype), range(self.comm.size)
        sends = [own.reshape(-1) if rank == partner else none for rank in ranks]
        receives = [other.reshape(-1) if rank == partner else none for rank in ranks]
        self.comm.all_to_all(sends, receives, label=OUTER)
        return other

    def bring_forward(self) -> None:
        super().bring_forward()
        self._anchor[...] = self.mean(self._anchor)
        self.model.read()
        self.model.write(self._anchor)

    def state(self) -> dict[str, np.ndarray]:
        return {"anchor": self._anchor, "velocity": self._velocity}


def partner_of(rank: int, ranks: int, seed: int, turn: int) -> int:
    """Return the rank with which one exchanges at a turn: itself, or another that has it too."""
    order = np.random.default_rng([seed, turn]).permutation(ranks).tolist()
    place = order.index(rank) ^ 1
    return rank if place >= ranks else int(order[place])
