"""Streaming DiLoCo: fragments of the model take their outer steps in turn, while the ranks compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from clcomm.comm.communicator import Communicator
from clcomm.sync.policies import codes
from clcomm.sync.policies.outer import DiLoCo, Nesterov
from clcomm.sync.policies.parameters import ModelParameters
from clcomm.sync.policies.policy import OUTER, LocalSteps


@dataclass(frozen=True)
class StreamingDiLoCo(DiLoCo):
    """DiLoCo in `fragments`, one after the other within `h` steps, each sent during `delay` further steps.

    Each rank then mixes its own parameters, by the share `alpha`, with those of the outer step. bits: of each number of
    an outer gradient, 4 or 32. The ranks' parameters are alike after `align` only, unless `alpha` is 0 in one fragment.

    Source: Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512.
    """

    name = "streaming"
    fragments: int = 4
    delay: int = 1
    alpha: float = 0.5
    bits: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("fragments", 1 <= self.fragments <= self.h, "a number from 1 to h")
        self.require("delay", 0 <= self.delay < self.h, "a number of steps from 0 to below h")
        self.require("alpha", 0 <= self.alpha < 1, "a share from 0 to below 1")
        self.require("bits", self.bits in (4, 32), "4 or 32")

    def start(self, comm: Communicator, model: ModelParameters) -> LocalSteps:
        return _Streaming(self, comm, model)


class _Streaming(LocalSteps):
    def __init__(self, settings: StreamingDiLoCo, comm: Communicator, model: ModelParameters):
        super().__init__(settings.h, comm, model)
        self._settings, values = settings, model.read()
        self._parts = model.fragments(settings.fragments)
        self._outer = [Nesterov(values[part], settings.lr, settings.momentum) for part in self._parts]
        self._turns = [number * settings.h // len(self._parts) for number in range(len(self._parts))]
        # By fragment: what is on its way, the step that ends that (0: nothing is), and a function that returns its
        # mean.
        self._sent = [np.zeros_like(values[part]) for part in self._parts]
        self._due = np.zeros(len(self._parts), np.int64)
        self._means: dict[int, Callable[[], np.ndarray]] = {}

    def after_step(self) -> None:
        for number, turn in enumerate(self._turns):
            if self.steps % self.h == turn:
                self._send(number)
        for number in list(self._means):
            if self.steps >= self._due[number]:
                self._receive(number, self._settings.alpha)

    def outer_step(self) -> None:
        numbers = range(len(self._parts))
        for number in numbers:  # all are on their way together: a slow link's round trip passes once
            if number not in self._means:
                self._send(number)
        for number in numbers:
            self._receive(number, 0.0)

    def bring_forward(self) -> None:
        self.outer_step()

    def _send(self, number: int) -> None:
        gradient = self._outer[number].anchor - self.model.read()[self._parts[number]]
        self._start(number, gradient)
        self._sent[number], self._due[number] = gradient, self.steps + self._settings.delay

    def _start(self, number: int, gradient: np.ndarray) -> None:
        start = _start_sum if self._settings.bits == 32 else _start_codes
        self._means[number] = start(self.comm, gradient)

    def _receive(self, number: int, alpha: float) -> None:
        outer, part = self._outer[number], self._parts[number]
        outer.step(self._means.pop(number)())
        self._due[number] = 0
        own, share = self.model.read()[part], self.model.dtype.type(alpha)
        self.model.write(share * own + (1 - share) * outer.anchor, part)

    def state(self) -> dict[str, np.ndarray]:
        kept = {"due": self._due}
        for number, (outer, sent) in enumerate(zip(self._outer, self._sent, strict=True)):
            kept |= {f"anchor/{number}": outer.anchor, f"velocity/{number}": outer.velocity, f"sent/{number}": sent}
        return kept

    def loaded(self, aligned_at: int) -> None:
        super().loaded(aligned_at)
        while self._means:
            self._means.popitem()[1]()
        for number in np.flatnonzero(self._due):
            self._start(int(number), self._sent[number])


def _start_sum(comm: Communicator, gradient: np.ndarray) -> Callable[[], np.ndarray]:
    return comm.all_reduce_async(gradient, "mean", out=np.empty_like(gradient), label=OUTER).wait


def _start_codes(comm: Communicator, gradient: np.ndarray) -> Callable[[], np.ndarray]:
    """Start to gather the ranks' codes, and return a function that waits for them and returns their mean."""
    scales, coded = codes.to_powers(codes.rows_of(gradient))
    packed = codes.pack(coded, 4)
    sent = np.concatenate([scales.view(np.uint8), packed], axis=1)
    everyone = np.empty((comm.size, *sent.shape), np.uint8)
    handle = comm.all_gather_async(sent, out=everyone, label=OUTER)

    def mean() -> np.ndarray:
        handle.wait()
        total = np.zeros_like(gradient)
        for rows in everyone:
            decoded = codes.from_powers(rows[:, :4].copy().view(np.float32), codes.unpack(rows[:, 4:], 4, codes.ROW))
            total += decoded.reshape(-1)[: total.size].astype(total.dtype)
        total /= total.dtype.type(comm.size)
        return total

    return mean
