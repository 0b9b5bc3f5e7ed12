"""Drawn networks of PyTorch for `tests.proofs.shards`: in shards' blocks, or in a loop over `ddp.shards(batch)`.

Each case draws layers (linear, convolutions, residual, recurrent, attention, a GPT with tied weights; norms and
dropout), an optimizer, clipping, bf16 autocast, the number of micro-batches and of shards, bucket sizes, whether
PyTorch's or clcomm's DistributedDataParallel or none wraps the model, and whether shards are dealt anew.
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

import clcomm.torch  # registers the backend
from clcomm import Communicator, Synchronizer
from tests.shard_steps import drawn_counts, run_backward

STEPS, CLASSES, TOKENS, WIDTH, LENGTH = 3, 6, 11, 8, 9
#: Process groups, by their number of ranks.
_GROUPS: dict[int, Any] = {}
KINDS = ("mlp", "convolutions", "lstm", "gru", "attention", "resnet", "gpt")


class Last(nn.Module):
    """The last of a sequence's outputs, of a recurrent layer too."""

    def forward(self, outputs: Any) -> torch.Tensor:
        sequence = outputs[0] if isinstance(outputs, tuple) else outputs
        return sequence[:, -1]


class Residual(nn.Module):
    """Two convolutions with batch norm beside an identity."""

    def __init__(self, width: int):
        super().__init__()
        layers = [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(images + self.body(images))


class Gpt(nn.Module):
    """A block of causal attention between an embedding and a head with the same weights."""

    def __init__(self, width: int, share: float):
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, width), nn.Linear(width, TOKENS, bias=False)
        self.head.weight = self.embedding.weight
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.block = nn.TransformerEncoderLayer(width, 2, 2 * width, share, batch_first=True, norm_first=True)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embedding(tokens) + self.places, self.mask))[:, -1]


@dataclass(frozen=True)
class TorchCase:
    """One training; `seed` decides the network's layers, its values and the samples."""

    seed: int
    kind: str
    wrapped_by: str
    casts: bool
    deals: bool
    optimizer: str
    clips: bool
    micro_batches: int
    shards: int
    settings: dict[str, Any]

    @classmethod
    def draw(cls, rng: np.random.Generator, ranks: int) -> TorchCase:
        return cls(
            int(rng.integers(1 << 30)), str(rng.choice(KINDS)), str(rng.choice(["none", "torch", "clcomm", "clcomm"])),
            bool(rng.integers(3) == 0), bool(rng.integers(2)),
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
        if self.kind == "resnet":
            return nn.Sequential(
                nn.Conv2d(1, width, 3), Residual(width), nn.MaxPool2d(2), Residual(width), nn.AdaptiveAvgPool2d(1),
                nn.Flatten(), *end,
            )  # fmt: skip
        if self.kind == "gpt":
            return Gpt(width, share)
        if self.kind == "attention":
            layer = nn.TransformerEncoderLayer(width, 2, 2 * width, share, batch_first=True, norm_first=bool(norm))
            return nn.Sequential(nn.Embedding(TOKENS, width), layer, Last(), *end)
        recurrent = nn.LSTM if self.kind == "lstm" else nn.GRU
        return nn.Sequential(nn.Embedding(TOKENS, WIDTH), recurrent(WIDTH, width, batch_first=True), Last(), *end)

    def batch(self, step: int, shard: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets of a micro-batch."""
        rng = np.random.default_rng([self.seed, step, shard, part])
        if self.kind in ("mlp", "convolutions", "resnet"):
            inputs = torch.from_numpy(rng.standard_normal((4, 1, 8, 8)).astype(np.float32))
        else:
            inputs = torch.from_numpy(rng.integers(0, TOKENS, (4, LENGTH)))
        return inputs, torch.from_numpy(rng.integers(0, CLASSES, 4))

    def trained(self, comm: Communicator) -> str:
        """Return the hash of the parameters, buffers, optimizer and norms at the end."""
        inner, rng, norms = self.model(), np.random.default_rng(self.seed), list[torch.Tensor]()
        is_wrapped = self.wrapped_by == "torch" and comm.size > 1
        model: Any = DistributedDataParallel(inner, process_group=_GROUPS[comm.size]) if is_wrapped else inner
        ddp = None
        if self.wrapped_by == "clcomm":
            overlap, size = self.settings["overlap"], self.settings["bucket_size"]
            ddp = clcomm.DistributedDataParallel(
                inner, comm, shards=self.shards, overlap_grad_reduce=overlap, bucket_size=size
            )
        sync = Synchronizer(comm, shards=self.shards, **self.settings) if ddp is None else ddp.synchronizer
        sync.broadcast_parameters(model)
        stepper = getattr(torch.optim, self.optimizer)(inner.parameters(), 1e-2)
        assert sync.shards is not None
        for step in range(STEPS):
            if ddp is not None:
                self._accumulate(ddp, step)
            else:
                for shard in sync.shards.own:
                    with sync.shard(model, shard):
                        batches = [self.batch(step, shard, part) for part in range(self.micro_batches)]
                        run_backward(sync, [partial(self._loss, model, *batch) for batch in batches])
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

    def _accumulate(self, ddp: clcomm.DistributedDataParallel, step: int) -> None:
        """Add the gradients of a step's micro-batches, each in a loop of its own over this rank's shards."""
        assert ddp.synchronizer.shards is not None
        for part in range(self.micro_batches):
            drawn = [self.batch(step, shard, part) for shard in ddp.synchronizer.shards.own]
            for inputs, targets in ddp.shards([torch.cat(each) for each in zip(*drawn, strict=True)]):
                (self._loss(ddp, inputs, targets) / self.micro_batches).backward()

    def _loss(self, model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.casts):
            return nn.functional.cross_entropy(model(inputs), targets)


def prepare(worlds: Iterable[range]) -> None:
    """Make process groups on backend clcomm of the ranks that train together; collective."""
    torch.set_num_threads(1)
    dist.init_process_group("clcomm")
    for ranks in worlds:
        _GROUPS[len(ranks)] = dist.new_group(list(ranks))
