"""NoLoCo, SparseLoCo and streaming DiLoCo, and all policies by which a text may name one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from clcomm.comm.communicator import Communicator
from clcomm.sync.policies import codes
from clcomm.sync.policies.outer import DiLoCo, LocalSGD, Nesterov
from clcomm.sync.policies.policy import OUTER, LocalSteps, ModelParameters, Policy

# --- NoLoCo: ranks take outer steps in pairs, which change from one to the next; no data goes to all. ---


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


# --- SparseLoCo: only the largest parts of an outer gradient travel, in 2 bits each, and the rest is sent later. ---


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


# --- Streaming DiLoCo: fragments of the model take their outer steps in turn, while the ranks compute. ---


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


#: Those that `clcomm.sync.policies.parse_policy` knows.
POLICIES: tuple[type[Policy], ...] = (LocalSGD, DiLoCo, StreamingDiLoCo, SparseLoCo, NoLoCo)
