"""Jobs of every stage of ZeRO, on models small enough for 50 steps, and what one rank has after the same steps."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from clcomm import Synchronizer, clip_grad_norm
from clcomm.engine import CrossEntropyLoss, Device, Module, Tensor
from clcomm.optim import SGD, Adam
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from models import GPT, MLP, ConvNet
from models.gpt import next_token_loss
from tests.sharded_jobs import SHAPE, cpu

BATCH, CLASSES, TOKENS, CONTEXT = 4, 10, 17, 8
STAGES = (1, 2, 3)
MODELS = ("mlp", "convnet", "gpt")
#: The bar: relative to the parameters of one rank.
CLOSE = 1e-4


def make_model(kind: str, seed: int, device: Device) -> Module:
    if kind == "gpt":  # tied: the first gradient that is begun is the last to be complete
        return GPT(TOKENS, CONTEXT, layers=2, width=16, heads=2, device=device, seed=seed)
    return {"mlp": MLP, "convnet": ConvNet}[kind](SHAPE, CLASSES, device=device, seed=seed)


def make_optimizer(kind: str, model: Module):
    # Not Adam for 50 steps of GPT: a key's bias has a gradient of nothing but rounding, which Adam makes a whole step.
    if kind == "mlp":
        return Adam(model, 1e-3, amsgrad=True)
    return SGD(model, 0.005, momentum=0.9, dampening=0.1, weight_decay=0.01)


def batch_of(kind: str, rank: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a rank's samples; any rank can compute all."""
    rng = np.random.default_rng([rank, number])
    if kind == "gpt":
        tokens = rng.integers(0, TOKENS, (BATCH, CONTEXT + 1)).astype(np.int32)
        return tokens[:, :-1].copy(), tokens[:, 1:].copy()
    images = rng.standard_normal((BATCH, *SHAPE)).astype(np.float32)
    return images, rng.integers(0, CLASSES, BATCH).astype(np.int32)


def loss_of(kind: str, model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    result = model(inputs)
    return next_token_loss(result, targets) if kind == "gpt" else CrossEntropyLoss()(result, targets)


def backward(kind: str, model: Any, device: Device, batch: tuple[np.ndarray, np.ndarray], share: float = 1.0) -> None:
    inputs, targets = (Tensor(each, device) for each in batch)
    loss_of(kind, model, inputs, targets).backward(share)


class ZeroJob:
    """A model on a rank and its update: stage 0 is plain data parallelism."""

    def __init__(self, comm, kind: str, stage: int, make_device=cpu, freeze: str = "", **options: Any):
        self.comm, self.kind, self.device = comm, kind, make_device()
        self.model = make_model(kind, comm.rank, self.device)  # every rank gets rank 0's
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad = name != freeze
        self.sync = Synchronizer(comm, zero=stage or 1, **options)
        self.optimizer = make_optimizer(kind, self.model)
        if stage:
            self.optimizer = DistributedOptimizer(self.optimizer, self.sync)
        self.sync.broadcast_parameters(self.model)

    def backward(self, number: int, share: float = 1.0) -> None:
        backward(self.kind, self.model, self.device, batch_of(self.kind, self.comm.rank, number), share)

    def step(self, number: int, micro: int = 1, max_norm: float | None = None) -> float | None:
        for part in range(micro):
            with self.sync.no_sync() if part < micro - 1 else contextlib.nullcontext():
                self.backward(number * micro + part, 1 / micro)
                self.sync.sync_gradients(self.model)
        norm = None if max_norm is None else clip_grad_norm(self.sync, self.model, max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def run(self, steps: int, start: int = 0, **options: Any) -> dict[str, np.ndarray]:
        for number in range(start, start + steps):
            self.step(number, **options)
        return self.model.state_dict()


def trained_alone(kind: str, ranks: int, steps: int, micro: int = 1, seed: int = 0) -> dict[str, np.ndarray]:
    """Return the parameters of one rank that has trained on the samples of all."""
    device = cpu()
    model = make_model(kind, seed, device)
    optimizer = make_optimizer(kind, model)
    for number in range(steps):
        for part in range(micro):
            batches = [batch_of(kind, rank, number * micro + part) for rank in range(ranks)]
            joined = np.concatenate([inputs for inputs, _ in batches]), np.concatenate([y for _, y in batches])
            backward(kind, model, device, joined, 1 / micro)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def require_close(state: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert state.keys() == expected.keys()
    for name, values in state.items():
        norm = np.linalg.norm(expected[name].astype(np.float64))
        assert np.linalg.norm(values.astype(np.float64) - expected[name]) <= CLOSE * norm, name
