"""Drawn networks of PyTorch for `tests.proofs.shards`: through the adapter, or in DistributedDataParallel.

Each case draws layers (linear, convolutions, recurrent, attention, with norms and dropout), an optimizer, clipping, the
number of micro-batches and of shards, bucket sizes, and whether the model is wrapped and shards are dealt anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import clcomm.torch  # noqa: F401 - registers the backend
from clcomm import Communicator, Synchronizer
from tests.shard_steps import drawn_counts, run_backward

STEPS, CLASSES, TOKENS, WIDTH = 3, 6, 11, 8
#: Process groups, by their number of ranks.
_GROUPS: dict[int, Any] = {}
KINDS = ("mlp", "convolutions", "lstm", "gru", "attention")


class Last(nn.Module):
    """The last of a sequence's outputs, of a recurrent layer too."""

    def forward(self, outputs: Any) -> torch.Tensor:
        sequence = outputs[0] if isinstance(outputs, tuple) else outputs
        return sequence[:, -1]


@dataclass(frozen=True)
class TorchCase:
    """One training; `seed` decides the network's layers, its values and the samples."""

    seed: int
    kind: str
    wraps: bool
    deals: bool
    optimizer: str
    clips: bool
    micro_batches: int
    shards: int
    settings: dict[str, Any]

    @classmethod
    def draw(cls, rng: np.random.Generator, ranks: int) -> TorchCase:
        return cls(
            int(rng.integers(1 << 30)), str(rng.choice(KINDS)), bool(rng.integers(2)), bool(rng.integers(2)),
            str(rng.choice(["SGD", "Adam", "AdamW", "RMSprop"])), bool(rng.integers(2)), int(rng.integers(1, 4)),
            int(rng.integers(ranks, ranks + 5)),
            {"bucket_size": int(rng.integers(64, 40_000)), "overlap": bool(rng.integers(2))},
        )  # fmt: skip

    def model(self) -> nn.Module:
        """Return the network at its start."""
        rng = np.random.default_rng(self.seed)
        torch.manual_seed(self.seed)
        share, width, norm = float(rng.choice([0.0, 0.2, 0.5])), 4 * int(rng.integers(1, 10)), int(rng.integers(3))
        end = [nn.Dropout(share), nn.Linear(width, CLASSES)]
        if self.kind == "mlp":
            norms = [nn.BatchNorm1d(width), nn.LayerNorm(width), nn.Identity()]
            return nn.Sequential(nn.Flatten(), nn.Linear(64, width), norms[norm], nn.ReLU(), *end)
        if self.kind == "convolutions":
            norms = [nn.BatchNorm2d(width), nn.GroupNorm(2, width), nn.Identity()]
            pool = nn.MaxPool2d(2) if rng.integers(2) else nn.AvgPool2d(2)
            layers = [nn.Conv2d(1, width, 3, padding=1), norms[norm], nn.GELU(), pool, nn.Conv2d(width, width, 3)]
            return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *end)
        if self.kind == "attention":
            layer = nn.TransformerEncoderLayer(width, 2, 2 * width, share, batch_first=True, norm_first=bool(norm))
            return nn.Sequential(nn.Embedding(TOKENS, width), layer, Last(), *end)
        recurrent = nn.LSTM if self.kind == "lstm" else nn.GRU
        return nn.Sequential(nn.Embedding(TOKENS, WIDTH), recurrent(WIDTH, width, batch_first=True), Last(), *end)

    def batch(self, step: int, shard: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets of a micro-batch."""
        rng = np.random.default_rng([self.seed, step, shard, part])
        if self.kind == "mlp" or self.kind == "convolutions":
            inputs = torch.from_numpy(rng.standard_normal((4, 1, 8, 8)).astype(np.float32))
        else:
            inputs = torch.from_numpy(rng.integers(0, TOKENS, (4, 9)))
        return inputs, torch.from_numpy(rng.integers(0, CLASSES, 4))

    def trained(self, comm: Communicator) -> str:
        """Return the hash of the parameters, buffers, optimizer and norms at the end."""
        inner, rng, norms = self.model(), np.random.default_rng(self.seed), list[torch.Tensor]()
        is_wrapped = self.wraps and comm.size > 1
        model = DistributedDataParallel(inner, process_group=_GROUPS[comm.size]) if is_wrapped else inner
        sync = Synchronizer(comm, shards=self.shards, **self.settings)
        sync.broadcast_parameters(model)
        stepper = getattr(torch.optim, self.optimizer)(inner.parameters(), 1e-2)
        assert sync.shards is not None
        for step in range(STEPS):
            for shard in sync.shards.own:
                with sync.shard(model, shard):
                    batches = [self.batch(step, shard, part) for part in range(self.micro_batches)]
                    run_backward(sync, [partial(_loss, model, *batch) for batch in batches])
            sync.sync_gradients(model)
            if self.clips:
                norms.append(nn.utils.clip_grad_norm_(inner.parameters(), 0.3))
            stepper.step()
            stepper.zero_grad()
            if self.deals:
                sync.deal_shards(drawn_counts(rng, comm.size, self.shards))
        sync.check_replicas(model)
        sync.broadcast_buffers(model)
        states = (value for state in stepper.state.values() for value in state.values())
        values = [*inner.state_dict().values(), *states, *norms]
        return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in values)).hexdigest()


def _loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(inputs), targets)


def prepare(worlds: Iterable[range]) -> None:
    """Make process groups on backend clcomm of the ranks that train together; collective."""
    torch.set_num_threads(1)
    dist.init_process_group("clcomm")
    for ranks in worlds:
        _GROUPS[len(ranks)] = dist.new_group(list(ranks))
