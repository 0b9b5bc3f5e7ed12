"""SparseLoCo: only the largest parts of an outer gradient travel, in 2 bits each, and the rest is sent later."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clcomm.comm.communicator import Communicator
from clcomm.sync.policies import codes
from clcomm.sync.policies.parameters import ModelParameters
from clcomm.sync.policies.policy import OUTER, LocalSteps, Policy


@dataclass(frozen=True)
class SparseLoCo(Policy):
    """Every `h` steps each rank sends a share of its outer gradient: of each 4,096 numbers those of the largest size.

    lr: of the outer SGD, without momentum. decay: of what was not sent, in place of momentum. share: that is sent.
    bits: of each number sent: a sign, and which of a row's sizes. Its place takes 12 more; from a share of 1/12 on one
    for each number of the row, and none where all are sent.

    Source: Sarfi et al., "Communication efficient LLM pre-training with SparseLoCo", arXiv 2508.15706.
    """

    name = "sparseloco"
    lr: float = 1.0
    decay: float = 0.95
    share: float = 0.03
    bits: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("lr", self.lr > 0, "a positive learning rate")
        self.require("decay", 0 <= self.decay <= 1, "a share from 0 to 1")
        self.require("share", 0 < self.share <= 1, "a share above 0, to 1")
        self.require("bits", 1 <= self.bits <= 8, "a number from 1 to 8")

    def start(self, comm: Communicator, model: ModelParameters) -> LocalSteps:
        return _Sparse(self, comm, model)


class _Sparse(LocalSteps):
    def __init__(self, settings: SparseLoCo, comm: Communicator, model: ModelParameters):
        super().__init__(settings.h, comm, model)
        self._settings, self._anchor = settings, model.read().copy()
        self._unsent = np.zeros_like(self._anchor)
        self._count = max(1, round(settings.share * codes.ROW))

    def outer_step(self) -> None:
        number = self.model.dtype.type
        unsent = self._unsent * number(self._settings.decay) + (self._anchor - self.model.read())
        sent = self._encoded(unsent)
        mean = np.zeros_like(self._anchor)
        for rows in self.comm.all_gather(sent, label=OUTER):
            mean += self._decoded(rows)
        self._unsent = unsent - self._decoded(sent)
        self._anchor -= number(self._settings.lr) * (mean / number(self.comm.size))
        self.model.write(self._anchor)

    def _encoded(self, values: np.ndarray) -> np.ndarray:
        """Return each row's sizes, the places of its largest numbers, and their codes: uint8, (rows, bytes)."""
        rows = codes.rows_of(values)
        places = codes.largest(rows, self._count)
        levels, coded = codes.to_levels(np.take_along_axis(rows, places, axis=1), self._settings.bits)
        packed = codes.pack_places(places), codes.pack(coded, self._settings.bits)
        return np.concatenate([levels.view(np.uint8), *packed], axis=1)

    def _decoded(self, sent: np.ndarray) -> np.ndarray:
        count, bits = self._count, self._settings.bits
        scales = 4 << (bits - 1)
        behind = scales + codes.place_bytes(count)
        levels, places = sent[:, :scales].copy().view(np.float32), codes.unpack_places(sent[:, scales:behind], count)
        values = codes.from_levels(levels, codes.unpack(sent[:, behind:], bits, count))
        rows = np.zeros((len(sent), codes.ROW), np.float32)
        np.put_along_axis(rows, places, values, axis=1)
        return rows.reshape(-1)[: self.model.size] * self.model.mask  # a zero that is sent is some level

    def state(self) -> dict[str, np.ndarray]:
        return {"anchor": self._anchor, "unsent": self._unsent}
