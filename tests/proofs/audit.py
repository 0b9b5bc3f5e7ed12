"""Drawn bit flips on drawn ranks of drawn trainings: whether the audit names rank, step and parameter of each.

`python -m tests.proofs.audit FLIPS SEED`, under mpiexec. Each training has a network with dropout and batch norm, an
optimizer, a transport, overlap, micro-batches, logical shards or none, and a precision, all drawn. Before the flips it
runs without one, with and without audits, which must end with the same bits. A flip is in a place of PLACES, a step, a
rank, an element and a bit. A training that nobody stops and that ends with the bits of the undisturbed one had a flip
without effect, such as one in a value that ReLU sets to zero, or one that rounding removes from the sum of a rank's
shards. Rank 0 prints how many flips were named, by place.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clcomm import Communicator, Synchronizer, clip_grad_norm, optim
from clcomm.base.errors import DivergenceError, NonFiniteError
from clcomm.comm.watch.endings import run
from clcomm.engine import CrossEntropyLoss, Device, Module, Replay, Sequential, Tensor, nn
from clcomm.engine.random_stream import RandomStream
from clcomm.parallel.audit import Audit
from clcomm.sync.divergence import flip_bit, flip_in_space
from tests.helpers import cpu_device

STEPS, EVERY, CLASSES = 4, 2, 5
#: Those of the first row lie in memory from one audit to the next; the others are computed anew in each step.
PLACES = (
    "parameter", "optimizer's state", "updated parameter",
    "activation", "gradient", "gradient in the window", "mean", "running statistics", "audit",
)  # fmt: skip
LASTING = PLACES[:3]
#: The ends of a flip that are as they should be.
RIGHT = "named", "named by check_finite", "without effect"
#: Trainings that are drawn, each of which gets its share of the flips.
TRAININGS = 20


@dataclass(frozen=True)
class Flip:
    """A bit that is flipped; `where` draws what in the place it hits."""

    place: str
    step: int
    rank: int
    where: int

    @classmethod
    def draw(cls, rng: np.random.Generator, ranks: int) -> Flip:
        place = str(rng.choice(PLACES))
        # Parameters that differ in the first step are found by the comparison before the first synchronisation.
        step = int(rng.integers(2, STEPS + 1)) if place in LASTING else int(rng.choice(range(EVERY, STEPS + 1, EVERY)))
        return cls(place, step, int(rng.integers(ranks)), int(rng.integers(1 << 30)))

    @property
    def audited(self) -> int:
        """The number of the next step that is audited."""
        return -(-self.step // EVERY) * EVERY


class Pass(Module):
    """A copy of its input; where it is armed, with a bit flipped, once."""

    where: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1.0
        if self.where is not None:
            values = y.numpy().copy()
            flip_bit(values, self.where)
            self.where = None
            y.copy_from(values)
        return y


@dataclass(frozen=True)
class Training:
    """A training; `seed` decides its values and samples."""

    seed: int
    is_convolutional: bool
    optimizer: str
    transport: str
    micro_batches: int
    extra_shards: int | None
    clips: bool
    replays: bool
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Training:
        shards = int(rng.integers(-1, 3))
        settings: dict[str, Any] = {"bucket_size": int(rng.integers(64, 8000)), "overlap": bool(rng.integers(2))}
        if rng.integers(4) == 0:
            settings["precision"] = "bf16"
        return cls(
            int(rng.integers(1 << 30)), bool(rng.integers(2)), str(rng.choice(["sgd", "adam"])),
            str(rng.choice(["auto", "mpi"])), int(rng.integers(1, 3)), None if shards < 0 else shards,
            bool(rng.integers(2)), bool(rng.integers(2)), settings,
        )  # fmt: skip

    def model(self, device: Device) -> Sequential:
        start, on = nn.Generator(self.seed), {"device": device}
        if self.is_convolutional:
            first = [nn.Conv2d(1, 4, 3, rng=start, **on), nn.BatchNorm2d(4, **on), nn.ReLU(), Pass()]
            return Sequential(*first, nn.Flatten(), nn.Dropout(0.3), Pass(), nn.Linear(64, CLASSES, rng=start, **on))
        first = [nn.Linear(36, 17, rng=start, **on), nn.BatchNorm1d(17, **on), Pass(), nn.ReLU(), nn.Dropout(0.3)]
        return Sequential(*first, Pass(), nn.Linear(17, CLASSES, rng=start, **on))

    def batch(self, step: int, shard: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([self.seed, step, shard])
        shape = (4, 1, 6, 6) if self.is_convolutional else (4, 36)
        inputs = rng.standard_normal((self.micro_batches, *shape)).astype(np.float32)
        return inputs, rng.integers(0, CLASSES, (self.micro_batches, 4)).astype(np.int32)


class Job:
    """One rank's run of a training, with or without a flip and audits."""

    def __init__(self, training: Training, comm: Communicator, device: Device, every: int, flip: Flip | None):
        self.training, self.comm, self.device = training, comm, device
        self.flip = flip if flip is not None and flip.rank == comm.rank else None
        self.computed, self.step, self.hit = 0, 0, ""
        RandomStream.of(device).seed(training.seed, comm.rank)
        self.model = training.model(device)
        shards = None if training.extra_shards is None else comm.size + training.extra_shards
        self.sync = Synchronizer(comm, shards=shards, check_finite=True, **training.settings)
        self.sync.broadcast_parameters(self.model)
        is_sgd = training.optimizer == "sgd"
        self.optimizer = optim.SGD(self.model, 0.05, momentum=0.9) if is_sgd else optim.Adam(self.model, 1e-2)
        self.space = self.sync.models.of(self.model).space
        is_plain = flip is not None and flip.place == "activation"
        self._forward_backward = Replay(self._run) if training.replays and not is_plain else self._run
        self.audit = Audit(self.sync, self.model, self.optimizer, self.compute, every)

    def _run(self, inputs: Tensor, targets: Tensor, weight: float) -> Tensor:
        loss = CrossEntropyLoss()(self.model(inputs), targets)
        loss.backward(weight)
        return loss

    def compute(self, batch: tuple[np.ndarray, np.ndarray]) -> float:
        total, parts = 0.0, list(zip(*batch, strict=True))
        for number, (inputs, targets) in enumerate(parts, 1):
            with nullcontext() if number == len(parts) else self.sync.no_sync():
                given = Tensor(inputs, self.device), Tensor(targets, self.device)
                total += self._forward_backward(*given, 1 / len(parts)).item()
        self.computed += 1
        if self.computed == 1:
            self.plant("gradient", self.space.arrays.grads)
            if self.is_due("running statistics"):
                self._flip_buffer()
        elif self.flip is not None and self.flip.place == "audit" and self.computed == self._own + 1:
            self.device.finish()
            self.plant("audit", self.space.arrays.grads)
        return total

    def is_due(self, place: str) -> bool:
        return self.flip is not None and self.flip.place == place and self.flip.step == self.step

    def plant(self, place: str, flat: np.ndarray, nbytes: Any = int) -> None:
        """Flip a bit of a drawn parameter's part of a flat array, where that is to happen now."""
        if self.is_due(place):
            assert self.flip is not None
            self.device.finish()
            self.hit = flip_in_space(flat, self.space, self.flip.where, nbytes)

    def _flip_buffer(self) -> None:
        assert self.flip is not None
        buffers = [(name, each) for name, each in self.model.named_buffers() if each.dtype == np.float32]
        self.hit, tensor = buffers[self.flip.where // 1009 % len(buffers)]
        values = tensor.numpy().copy()
        flip_bit(values, self.flip.where)
        tensor.copy_from(values)

    def _flip_state(self) -> None:
        state = self.optimizer._state
        names = sorted(state.read())
        if self.is_due("optimizer's state") and names:
            assert self.flip is not None
            name = names[self.flip.where // 101 % len(names)]
            values = state.read([name])[name]
            self.plant("optimizer's state", values.view(np.uint8))
            state.write(name, values)

    def _run_step(self) -> None:
        shards, narrow = self.sync.shards, self.space.precision.nbytes
        self.computed, self._own = 0, 1 if shards is None else len(shards.own)
        self.plant("parameter", self.space.arrays.params, narrow)
        if self.is_due("activation"):
            assert self.flip is not None
            passes = [layer for _, layer in self.model.named_modules() if isinstance(layer, Pass)]
            passes[self.flip.where // 1009 % len(passes)].where = self.flip.where
        self.audit.begin(self.step)
        for shard in [self.comm.rank] if shards is None else shards.own:
            with nullcontext() if shards is None else self.sync.shard(self.model, shard):
                self.audit.run(self.training.batch(self.step, shard))
        self.sync.sync_gradients(self.model)
        mean = self.sync.models.of(self.model).shard_mean
        self.plant("gradient in the window", self.space.arrays.grads if mean is None else mean.rows[-1])
        self.plant("mean", self.space.arrays.reduced)
        self.audit.check_gradients()
        if self.training.clips:
            clip_grad_norm(self.sync, self.model, 0.3)
        self._flip_state()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.plant("updated parameter", self.space.arrays.params, narrow)
        self.audit.check_update()

    def trained(self) -> str:
        """Return the hash at the end, or the error that ended it."""
        try:
            for self.step in range(1, STEPS + 1):
                self._run_step()
        except (DivergenceError, NonFiniteError) as error:
            self.optimizer.zero_grad()
            return f"{type(error).__name__}: {error}"
        self.sync.broadcast_buffers(self.model)
        state = {**self.model.state_dict(), **self.optimizer.state_dict()}
        return hashlib.sha256(b"".join(np.asarray(state[name]).tobytes() for name in sorted(state))).hexdigest()


def judged(flip: Flip, hit: str, ends: Sequence[str], clean: Sequence[str]) -> str:
    """Return how a flip ended: named, without effect, or what was wrong."""
    ranks, told = len(ends), ends[0]
    if not told.startswith(("DivergenceError", "NonFiniteError")):
        return "without effect" if list(ends) == list(clean) else "missed"
    if any(end != told for end in ends):
        return "other lines on other ranks"
    if told.startswith("NonFiniteError"):
        return "named by check_finite" if f"rank {flip.rank}" in told else "named by check_finite without its rank"
    if f"step {flip.audited}" not in told:
        return "named in another step"
    if hit and repr(hit)[:-1] not in told:
        return "named with another parameter"
    if flip.place in LASTING:
        rank = f"on rank {flip.rank} differs" if ranks > 2 else "differs between ranks 0 and 1"
    elif flip.place == "mean":
        rank = f"on rank {flip.rank}" if "in memory that ranks share" not in told else ""
    else:
        rank = f"but rank {flip.rank} got others"
    return "named" if rank in told else "named on another rank"


def main() -> None:
    flips, seed = map(int, sys.argv[1:3])
    rng, device = np.random.default_rng(seed), cpu_device("cpu")
    comms = {name: Communicator(transport=name) for name in ("auto", "mpi")}
    found: dict[str, Counter[str]] = {place: Counter() for place in PLACES}
    clean_steps, wrong, trainings = 0, [], min(TRAININGS, flips)
    for number in range(trainings):
        training = Training.draw(rng)
        comm = comms[training.transport]
        clean = comm.all_gather_object(Job(training, comm, device, 0, None).trained())
        audited = comm.all_gather_object(Job(training, comm, device, EVERY, None).trained())
        clean_steps += STEPS
        if audited != clean:
            wrong.append(f"audits change the bits or find something: {training}: {audited[0]}")
        for _ in range(number, flips, trainings):
            flip = Flip.draw(rng, comm.size)
            job = Job(training, comm, device, EVERY, flip)
            ended = comm.all_gather_object((job.trained(), job.hit))
            how = judged(flip, ended[flip.rank][1], [end for end, _ in ended], clean)
            found[flip.place][how] += 1
            if how not in RIGHT:
                wrong.append(f"{how}: {flip}, {training}: {ended[0][0]}, hit {ended[flip.rank][1]}")
    if comm.rank == 0:
        totals = sum(found.values(), Counter[str]())
        print(json.dumps({"places": found, "totals": totals, "clean_steps": clean_steps, "wrong": wrong}))


if __name__ == "__main__":
    run(main)
