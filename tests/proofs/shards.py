"""Drawn networks and settings with logical shards: the hash at the end on 1, 2, 3, 4 and 8 ranks.

`python -m tests.proofs.shards CASES SEED`, on 8 ranks or on those of its mpiexec. Each case draws layers, an optimizer,
clipping, the number of micro-batches and of shards, precision, whether a loop of one's own or a Session trains, the
latter with augmented images and an evaluation, whether batch norm is over all shards, and for each number of ranks how
shards are dealt anew in between and the way gradients take: shared memory or MPI, one host or two. Rank 0 prints how
many trainings were compared, by number of ranks, and the cases that differed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.on_ranks import relaunch
from clcomm import Communicator, Synchronizer, clip_grad_norm, optim
from clcomm.engine import CrossEntropyLoss, Device, Module, Sequential, Tensor, nn
from clcomm.engine.random_stream import RandomStream
from clcomm.job.endings import run
from clcomm.parallel import SyncBatchNorm
from clcomm.sync.balance import Balancer
from clcomm.transport import mpi_communicators
from models import GPT
from models.gpt import next_token_loss
from tests.helpers import cpu_device
from tests.shard_steps import drawn_counts, run_backward
from tests.transport.references import pretended_host
from training import build_trainer
from training.console import make_console
from training.data.datasets import load_synthetic
from training.engines import parts
from training.options import TrainingOptions
from training.session import Session

COUNTS = (1, 2, 3, 4, 8)
STEPS, CLASSES, TOKENS = 3, 6, 11
WAYS = ("auto", "mpi", "two hosts")


@dataclass(frozen=True)
class Case:
    """One training; `seed` decides the network's layers, its values and the samples."""

    seed: int
    kind: str
    by_session: bool
    deals: bool
    over_shards: bool
    optimizer: str
    clips: bool
    micro_batches: int
    shards: int
    settings: dict[str, Any]

    @classmethod
    def draw(cls, rng: np.random.Generator, ranks: int) -> Case:
        settings: dict[str, Any] = {"bucket_size": int(rng.integers(64, 40_000)), "overlap": bool(rng.integers(2))}
        if rng.integers(4) == 0:
            settings["precision"] = "bf16"
        kind = str(rng.choice(["mlp", "convolutions", "gpt"]))
        return cls(
            int(rng.integers(1 << 30)), kind, kind != "gpt" and bool(rng.integers(2)), bool(rng.integers(2)),
            bool(rng.integers(3)),
            str(rng.choice(["sgd", "adam", "adamw", "rmsprop"])), bool(rng.integers(2)), int(rng.integers(1, 4)),
            int(rng.integers(ranks, ranks + 5)), settings,
        )  # fmt: skip

    def model(self, device: Device, classes: int = CLASSES) -> Module:
        """Return the network at its start."""
        rng, start = np.random.default_rng(self.seed), nn.Generator(self.seed)
        on: dict[str, Any] = {"device": device}
        share, width = float(rng.choice([0.0, 0.2, 0.5])), int(rng.integers(3, 40))
        if self.kind == "gpt":
            heads = int(rng.integers(1, 4))
            return GPT(TOKENS, 8, layers=int(rng.integers(1, 3)), width=4 * heads, heads=heads, dropout=share,
                       seed=self.seed, **on)  # fmt: skip
        norm = rng.integers(4) % 3
        if self.kind == "mlp":
            layers: list[Module] = [nn.Flatten(), nn.Linear(64, width, rng=start, **on)]
            layers += [[nn.BatchNorm1d(width, **on)], [], [nn.LayerNorm(width, **on)]][norm]
            return Sequential(*layers, nn.ReLU(), nn.Dropout(share), nn.Linear(width, classes, rng=start, **on))
        layers = [nn.Conv2d(1, width, 3, padding=int(rng.integers(2)), rng=start, **on)]
        layers += [[nn.BatchNorm2d(width, **on)], [], [nn.GroupNorm(1, width, **on)]][norm]
        after = [nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(share)]
        return Sequential(*layers, *after, nn.Linear(width, classes, rng=start, **on))

    def batch(self, step: int, shard: int, part: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs and targets of a micro-batch."""
        rng = np.random.default_rng([self.seed, step, shard, part])
        if self.kind == "gpt":
            tokens = rng.integers(0, TOKENS, (2, 9)).astype(np.int32)
            return tokens[:, :-1], tokens[:, 1:]
        shape = (4, 64) if self.kind == "mlp" else (4, 1, 8, 8)
        return rng.standard_normal(shape).astype(np.float32), rng.integers(0, CLASSES, 4).astype(np.int32)

    def trained(self, comm: Communicator, device: Device) -> str:
        """Return the hash of the parameters, buffers, optimizer, and norms or losses at the end."""
        return self._by_session(comm) if self.by_session else self._by_loop(comm, device)

    def _by_session(self, comm: Communicator) -> str:
        parts._KINDS["mlp"] = lambda shape, classes, *, device, seed: self.model(device, classes)
        build_trainer.Balancer = partial(Drawn, window=2)  # type: ignore[misc,assignment]
        options = TrainingOptions(
            model="mlp", device="cpu", quiet=True, batch_size=4, epochs=2, max_steps=STEPS + 2, seed=self.seed,
            logical_shards=self.shards, optimizer=self.optimizer, clip_norm=0.3 if self.clips else None, augment=True,
            grad_accumulation=self.micro_batches, balance="auto" if self.deals else "off",
            bucket_size=str(self.settings["bucket_size"]), precision=self.settings.get("precision", "float32"),
        )  # fmt: skip
        session = Session(options, comm, load_synthetic(47 * self.shards // 4, 30, shape=(1, 8, 8)), make_console(comm))
        result = session.run()
        assert result.evaluation is not None
        found = {"losses": np.array([result.train_loss, result.evaluation.loss])}
        return _hash({**session.parts.model.state_dict(), **session.trainer.optimizer.state_dict(), **found})

    def _by_loop(self, comm: Communicator, device: Device) -> str:
        RandomStream.of(device).seed(self.seed, comm.rank)
        model = self.model(device)
        if self.over_shards:
            model = SyncBatchNorm.convert_sync_batchnorm(model, comm)
        loss_of = next_token_loss if self.kind == "gpt" else CrossEntropyLoss()
        sync, norms, rng = Synchronizer(comm, shards=self.shards, **self.settings), [], np.random.default_rng(self.seed)
        sync.broadcast_parameters(model)
        makers = {"sgd": optim.SGD, "adam": optim.Adam, "adamw": optim.AdamW, "rmsprop": optim.RMSProp}
        stepper = makers[self.optimizer](model, 1e-2)
        assert sync.shards is not None
        for step in range(STEPS):

            def compute(shard: int, step: int = step) -> None:
                batches = (self.batch(step, shard, part) for part in range(self.micro_batches))
                run_backward(sync, [partial(self._loss, model, loss_of, batch, device) for batch in batches])

            sync.run_shards(model, compute)
            sync.sync_gradients(model)
            if self.clips:
                norms.append(clip_grad_norm(sync, model, 0.3))
            stepper.step()
            stepper.zero_grad()
            if self.deals:
                sync.deal_shards(drawn_counts(rng, comm.size, self.shards))
        sync.check_replicas(model)
        sync.broadcast_buffers(model)
        return _hash({**model.state_dict(), **stepper.state_dict(), "norms": np.array(norms)})

    def _loss(self, model: Module, loss_of: Any, batch: tuple[np.ndarray, np.ndarray], device: Device) -> Tensor:
        inputs, targets = batch
        return loss_of(model(Tensor(inputs, device)), Tensor(targets, device))


class Drawn(Balancer):
    """Takes other shares after every second step, drawn alike on every rank."""

    WARM_UP_STEPS = 0

    def _exchange(self) -> bool:
        self.changes += 1
        before, shards = self.shares, sum(self.shares) // self.batch_size
        counts = drawn_counts(np.random.default_rng(self.changes), self._comm.size, shards)
        self.shares, self._steps = tuple(each * self.batch_size for each in counts), ()
        return self.shares != before


def _hash(state: dict[str, Any]) -> str:
    return hashlib.sha256(b"".join(np.asarray(state[name]).tobytes() for name in sorted(state))).hexdigest()


@contextmanager
def ranks_of(everyone: Communicator, count: int, way: str) -> Iterator[Communicator | None]:
    """Lend a Communicator of the first ranks, whose gradients take one of the WAYS; None on the other ranks."""
    lane = everyone.comm.Split(0 if everyone.rank < count else 1, everyone.rank)
    one_host = mpi_communicators.host_of
    if way == "two hosts":
        mpi_communicators.host_of = lambda comm: pretended_host("interleaved", comm)
    part = None
    if everyone.rank < count:
        part = Communicator(lane, transport="mpi" if way == "mpi" else "auto")
    mpi_communicators.host_of = one_host
    yield part
    if part is not None:
        part.finalize()
    lane.Free()


def main() -> None:
    cases, seed = map(int, sys.argv[1:3])
    everyone, device, rng = Communicator(), cpu_device("cpu"), np.random.default_rng(seed)
    compared, differ = Counter[int](), []
    for number in range(cases):
        case = Case.draw(rng, everyone.size)
        expected = case.trained(Communicator(transport="solo"), device) if everyone.rank == 0 else None
        expected = everyone.broadcast_object(expected)
        for count in (count for count in COUNTS[1:] if count <= everyone.size):
            with ranks_of(everyone, count, str(rng.choice(WAYS))) as part:
                found = expected if part is None else case.trained(part, device)
            compared[count] += 1
            if any(each != expected for each in everyone.all_gather_object(found)):
                differ.append(f"case {number} on {count} ranks: {case}")
        if everyone.rank == 0:
            print(f"case {number}: {len(differ)} have differed so far", file=sys.stderr, flush=True)
    if everyone.rank == 0:
        print(json.dumps({"compared": compared, "differ": differ}))


if __name__ == "__main__":
    ended = relaunch("tests.proofs.shards", COUNTS[-1])
    if ended is not None:
        sys.exit(ended)
    run(main)
