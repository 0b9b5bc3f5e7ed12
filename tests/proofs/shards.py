"""Drawn networks and settings with logical shards: the hash at the end on 1, 2, 3, 4 and 8 ranks.

`python -m tests.proofs.shards CASES SEED` trains all cases in one job of 18 ranks, each case in all worlds at once; on
the ranks of its mpiexec, where there are fewer, in those worlds that they are enough for, wave after wave. Each case
draws layers, an optimizer, whether ranks divide its state (ZeRO 1), clipping, the number of micro-batches and of
shards, precision, whether a loop of one's own or a Session trains, the latter with augmented images and an evaluation,
whether batch norm is over all shards, and for each number of ranks how shards are dealt anew in between and the way
gradients take: shared memory or MPI, one host or two. With the word `torch` it draws PyTorch's networks
(`torch_shards.py`); with `planted` each rank adds its own shards up first, so that most cases differ. Rank 0 prints how
many trainings were compared, by number of ranks, and the cases that differed.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.on_ranks import relaunch
from clcomm import Communicator, Synchronizer, clip_grad_norm, optim
from clcomm.comm.transport import mpi_communicators
from clcomm.comm.watch.endings import run
from clcomm.engine import CrossEntropyLoss, Device, Module, Sequential, Tensor, nn
from clcomm.engine.random_stream import RandomStream
from clcomm.parallel import SyncBatchNorm
from clcomm.sync.balance import Balancer
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from clcomm.sync.logical_shards import ShardMean
from models import GPT
from models.gpt import next_token_loss
from tests.helpers import cpu_device
from tests.shard_steps import drawn_counts, run_backward
from tests.transport.references import pretended_host
from training import build_trainer
from training.console import make_console
from training.data.datasets import load_synthetic
from training.engines import parts
from training.engines.rehearsal import Rehearsal
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
    divides: bool

    @classmethod
    def draw(cls, rng: np.random.Generator, ranks: int) -> Case:
        divides = bool(rng.integers(3) == 0)  # with ZeRO, which excludes overlap
        overlap = bool(rng.integers(2)) and not divides
        settings: dict[str, Any] = {"bucket_size": int(rng.integers(64, 40_000)), "overlap": overlap}
        if rng.integers(4) == 0:
            settings["precision"] = "bf16"
        kind = str(rng.choice(["mlp", "convolutions", "gpt"]))
        return cls(
            int(rng.integers(1 << 30)), kind, kind != "gpt" and bool(rng.integers(2)), bool(rng.integers(2)),
            bool(rng.integers(3)),
            str(rng.choice(["sgd", "adam", "adamw", "rmsprop"])), bool(rng.integers(2)), int(rng.integers(1, 4)),
            int(rng.integers(ranks, ranks + 5)), settings, divides,
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

    def _normalised(self, comm: Communicator, device: Device, classes: int = CLASSES) -> Module:
        """Return it with batch norm over all shards, or each of them, as drawn.

        Rehearsals exchange nothing, as not all ranks take part: there it is a plain one.
        """
        model, over_shards = self.model(device, classes), self.over_shards and not isinstance(device, Rehearsal)
        return SyncBatchNorm.convert_sync_batchnorm(model, comm) if over_shards else model

    def batch(self, step: int, shard: int, part: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs and targets of a micro-batch."""
        rng = np.random.default_rng([self.seed, step, shard, part])
        if self.kind == "gpt":
            tokens = rng.integers(0, TOKENS, (2, 9)).astype(np.int32)
            return tokens[:, :-1], tokens[:, 1:]
        shape = (4, 64) if self.kind == "mlp" else (4, 1, 8, 8)
        return rng.standard_normal(shape).astype(np.float32), rng.integers(0, CLASSES, 4).astype(np.int32)

    def trained(self, comm: Communicator) -> str:
        """Return the hash of the parameters, buffers, optimizer, and norms or losses at the end."""
        return self._by_session(comm) if self.by_session else self._by_loop(comm, cpu_device("cpu"))

    def _by_session(self, comm: Communicator) -> str:
        parts._KINDS["mlp"] = lambda shape, classes, *, device, seed: self._normalised(comm, device, classes)
        build_trainer.Balancer = partial(Drawn, window=2)  # type: ignore[misc,assignment]
        options = TrainingOptions(
            model="mlp", device="cpu", quiet=True, batch_size=4, epochs=2, max_steps=STEPS + 2, seed=self.seed,
            logical_shards=self.shards, optimizer=self.optimizer, clip_norm=0.3 if self.clips else None, augment=True,
            grad_accumulation=self.micro_batches, balance="auto" if self.deals else "off",
            bucket_size=str(self.settings["bucket_size"]), precision=self.settings.get("precision", "float32"),
            zero=int(self.divides),
        )  # fmt: skip
        session = Session(options, comm, load_synthetic(47 * self.shards // 4, 30, shape=(1, 8, 8)), make_console(comm))
        result = session.run()
        assert result.evaluation is not None
        found = {"losses": np.array([result.train_loss, result.evaluation.loss])}
        return _hash({**session.parts.model.state_dict(), **session.trainer.optimizer.state_dict(), **found})

    def _by_loop(self, comm: Communicator, device: Device) -> str:
        RandomStream.of(device).seed(self.seed, comm.rank)
        model = self._normalised(comm, device)
        loss_of = next_token_loss if self.kind == "gpt" else CrossEntropyLoss()
        sync, norms, rng = Synchronizer(comm, shards=self.shards, **self.settings), [], np.random.default_rng(self.seed)
        sync.broadcast_parameters(model)
        makers = {"sgd": optim.SGD, "adam": optim.Adam, "adamw": optim.AdamW, "rmsprop": optim.RMSProp}
        stepper: Any = makers[self.optimizer](model, 1e-2)
        if self.divides:
            stepper = DistributedOptimizer(stepper, sync)
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


def waves(ranks: int) -> list[dict[int, range]]:
    """Return which ranks train together, by their number: worlds that fit side by side at once, one wave after another.

    Each number of COUNTS, up to that of the ranks, is once in them.
    """
    found = list[dict[int, range]]()
    for count in sorted((count for count in COUNTS if count <= ranks), reverse=True):
        for wave in [*found, dict[int, range]()]:
            begin = sum(wave)
            if begin + count <= ranks:
                break
        found += [wave] * (not wave)
        wave[count] = range(begin, begin + count)
    return found


@contextmanager
def world_of(everyone: Communicator, wave: dict[int, range], ways: dict[int, str]) -> Iterator[Communicator | None]:
    """Lend this rank the Communicator of its world, whose gradients take one of the WAYS; None to a rank without."""
    count = next((count for count, ranks in wave.items() if everyone.rank in ranks), 0)
    own = everyone.comm.Split(count, everyone.rank)
    way, one_host, world = ways.get(count), mpi_communicators.host_of, None
    if way == "two hosts":
        mpi_communicators.host_of = lambda comm: pretended_host("interleaved", comm)
    if count:
        world = Communicator(own, transport="mpi" if way == "mpi" else "auto")
    mpi_communicators.host_of = one_host
    yield world
    if world is not None:
        world.finalize()
    own.Free()


def hashes(everyone: Communicator, case: Any, ways: dict[int, str]) -> dict[int, set[str]]:
    """Return the hashes of a case's trainings by number of ranks: one of each, if all of its ranks have the same."""
    found: dict[int, set[str]] = {}
    for wave in waves(everyone.size):
        with world_of(everyone, wave, ways) as world:
            mine = None if world is None else (world.size, case.trained(world))
        for count, each in filter(None, everyone.all_gather_object(mine)):
            found.setdefault(count, set()).add(each)
    return found


def plant_partial_sums() -> None:
    """Let each rank add its own shards up first, so that the sum's order depends on the ranks."""
    keep = ShardMean.keep

    def planted(self: ShardMean, shard: int) -> None:
        keep(self, shard)
        index = shard - self._shards.own.start
        if self._comm.rank and index:
            self._rows[0] += self._rows[index]
            self._rows[index][:] = 0

    ShardMean.keep = planted  # type: ignore[method-assign]


def main() -> None:
    cases, seed = map(int, sys.argv[1:3])
    everyone, rng, words = Communicator(), np.random.default_rng(seed), sys.argv[3:]
    compared, differ, began_s = Counter[int](), [], time.monotonic()
    draw: Callable[[np.random.Generator, int], Any] = Case.draw
    if "torch" in words:
        from tests.proofs import torch_shards

        draw = torch_shards.TorchCase.draw
        torch_shards.prepare(ranks for wave in waves(everyone.size) for ranks in wave.values())
    if "planted" in words:
        plant_partial_sums()
    for number in range(cases):
        case = draw(rng, max(count for count in COUNTS if count <= everyone.size))
        found = hashes(everyone, case, {count: str(rng.choice(WAYS)) for count in COUNTS[1:]})
        compared.update(count for count in found if count > 1)
        differ += [f"case {number} on {count} ranks: {case}" for count in found if found[count] != found[1]]
        if everyone.rank == 0:
            said = f"{number + 1} cases after {time.monotonic() - began_s:.0f} s, differing trainings: {len(differ)}"
            print(said, file=sys.stderr, flush=True)
    if everyone.rank == 0:
        print(json.dumps({"compared": compared, "differ": differ}))


if __name__ == "__main__":
    ended = relaunch("tests.proofs.shards", sum(COUNTS))
    if ended is not None:
        sys.exit(ended)
    run(main)
