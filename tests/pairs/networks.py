"""The networks that pairs of settings train, whose features a setting turns on, and the batches of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from clcomm.engine import (
    BatchNorm1d,
    Device,
    Dropout,
    Generator,
    LayerNorm,
    Linear,
    Module,
    ReLU,
    Sequential,
    Tanh,
    Tensor,
    fused,
)
from clcomm.engine import functional as F
from clcomm.engine.random_stream import RandomStream
from clcomm.engine.recomputation import checkpoint
from clcomm.parallel import ColumnParallel, RowParallel, SequenceParallel
from models import GPT, ConvNet, ResNet
from models.gpt import next_token_loss
from tests.helpers import cpu_device
from tests.pairs.factors import Setting
from tests.parallel.pipeline.cases import CLASSES, CONTEXT, GPT_PLAN, VOCABULARY, images, text

TOKENS, WIDTH, HIDDEN = 4, 8, 16
_kind = "cpu"
DROPPED = 0.25
#: Layers that a stage of "layers" may begin with, by the number of stages.
_CUTS = {2: [0, 6], 4: [0, 4, 6, 9]}


def device() -> Device:
    """Return the device of this rank's networks."""
    return cpu_device(_kind)


@contextmanager
def computing_as(kind: str) -> Iterator[None]:
    """Within it networks are made for the CPU treated as a device of this kind."""
    global _kind
    before, _kind = _kind, kind
    try:
        yield
    finally:
        _kind = before


@dataclass
class Slice:
    """Rows of a batch that are one replica's: from `start` to `stop`."""

    replica: int
    start: int
    stop: int


class Replicas:
    """Which rows of the batch in work are which replica's, where one rank computes for all.

    Attributes:
        slices: the rows; empty: the batch is this rank's own.
        streams: for each replica the random numbers of its tensor-parallel ranks.
    """

    def __init__(self) -> None:
        self.slices: list[Slice] = []
        self.streams: dict[int, list[RandomStream]] = {}

    @contextmanager
    def computing(self, slices: list[Slice]) -> Iterator[None]:
        self.slices = slices
        yield
        self.slices = []


class Dropping(Dropout):
    """A Dropout that draws each replica's numbers for its rows, and each tensor-parallel rank's for its tokens.

    recomputes: whether backward draws this rank's own again.
    """

    recomputes = False

    def __init__(self, replicas: Replicas):
        super().__init__(DROPPED)
        self.replicas = replicas

    def forward(self, x: Tensor) -> Tensor:
        if not self.replicas.slices or not self.training:
            return checkpoint(super().forward, x) if self.recomputes else super().forward(x)
        rows = []
        for each in self.replicas.slices:
            streams = self.replicas.streams[each.replica]
            step = x.shape[1] // len(streams)
            parts = [
                F.dropout(x[each.start : each.stop, place * step : (place + 1) * step], self.p, True, stream=stream)
                for place, stream in enumerate(streams)
            ]
            rows.append(F.concat(parts, 1) if len(parts) > 1 else parts[0])
        return F.concat(rows, 0) if len(rows) > 1 else rows[0]


class Branch(Module):
    """x + linear(x) on replicas that use it, else x.

    Attributes:
        used: "all", "even" or "none": the replicas that use it.
        replica: this rank's.
        recomputes: whether backward computes this rank's own sum again.
    """

    recomputes = False

    def __init__(self, used: str, replicas: Replicas, rng: Generator):
        self.linear = Linear(WIDTH, WIDTH, device=device(), rng=rng)
        self.used, self.replicas, self.replica = used, replicas, 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.replicas.slices:
            if not self._uses(self.replica):
                return x
            return checkpoint(self._sum, x) if self.recomputes else self._sum(x)
        rows = [x[each.start : each.stop] for each in self.replicas.slices]
        rows = [
            row + self.linear(row) if self._uses(each.replica) else row
            for row, each in zip(rows, self.replicas.slices, strict=True)
        ]
        return F.concat(rows, 0) if len(rows) > 1 else rows[0]

    def _sum(self, x: Tensor) -> Tensor:
        return x + self.linear(x)

    def _uses(self, replica: int) -> bool:
        return self.used == "all" or (self.used == "even" and replica % 2 == 0)


def bent(x: Tensor) -> Tensor:
    return x.tanh() * (x * 0.1 + 1)


bent_as_one = fused(bent)


class Chain(Module):
    """A chain of functions of elements: `bent`, or `bent_as_one`."""

    function = staticmethod(bent)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def layers(setting: Setting, replicas: Replicas) -> Sequential:
    """Return x [N, TOKENS, WIDTH] -> [N, TOKENS, CLASSES], with all features that a setting may name."""
    rng = Generator(7)
    norm = {
        "layer": lambda: LayerNorm(WIDTH, device=device()),
        "batch": lambda: BatchNorm1d(TOKENS, device=device()),
        "sync": lambda: BatchNorm1d(TOKENS, device=device()),
    }[setting["norm"]]
    used = {"none": "all", "all ranks": "none", "some ranks": "even"}[setting["unused"]]
    model = Sequential(
        LayerNorm(WIDTH, device=device()),
        Linear(WIDTH, HIDDEN, device=device(), rng=rng),
        ReLU(),
        Linear(HIDDEN, WIDTH, device=device(), rng=rng),
        norm(),
        Dropping(replicas) if setting["dropout"] == "on" else Tanh(),
        Linear(WIDTH, HIDDEN, device=device(), rng=rng),
        Chain(),
        Linear(HIDDEN, WIDTH, device=device(), rng=rng),
        Branch(used, replicas, rng),
        LayerNorm(WIDTH, device=device()),
        Linear(WIDTH, CLASSES, device=device(), rng=rng),
    )
    if setting["tied"] == "on":
        model[6].weight = model[1].weight
    return model


def token_features(rng: np.random.Generator, samples: int) -> tuple[np.ndarray, np.ndarray]:
    x = rng.standard_normal((samples, TOKENS, WIDTH)).astype(np.float32)
    return x, rng.integers(0, CLASSES, (samples, TOKENS)).astype(np.int32)


_SEQUENCE = {
    "0": SequenceParallel(split_input=True),
    "1": ColumnParallel(sequence_axis=-2),
    "3": RowParallel(sequence_axis=-2),
    "4": SequenceParallel(),
    "5": SequenceParallel(),
    "6": ColumnParallel(sequence_axis=-2),
    "8": RowParallel(sequence_axis=-2),
    "9": SequenceParallel(),
    "10": SequenceParallel(gather_output=True),
}


@dataclass(frozen=True, eq=False)
class Network:
    """A model by setting, its data, its loss of a batch's mean, its plans and cuts.

    frozen: the parameters that "frozen" freezes, of "layers" some in each stage.
    """

    make: Callable[[Setting, Replicas], Module]
    batch: Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]
    loss: Callable[[Tensor, Tensor], Tensor]
    plan: dict[str, Any]
    sequence_plan: dict[str, Any]
    cuts: dict[int, list[int]]
    frozen: tuple[str, ...]
    lr: float = 0.05


NETWORKS = {
    "layers": Network(
        layers,
        token_features,
        next_token_loss,
        {"1": ColumnParallel(), "3": RowParallel(), "6": ColumnParallel(), "8": RowParallel()},
        _SEQUENCE,
        _CUTS,
        ("3.bias", "4.weight", "8.weight", "11.bias"),
    ),
    "gpt": Network(
        lambda setting, _: GPT(VOCABULARY, CONTEXT, 2, 12, 2, tied=setting["tied"] == "on", device=device(), seed=3),
        text,
        next_token_loss,
        GPT_PLAN,
        {
            "transformer.h": SequenceParallel(split_input=True),
            "transformer.h.*.attn": GPT_PLAN["transformer.h.*.attn"],
            "transformer.h.*.attn.c_attn": ColumnParallel(sections=3, sequence_axis=-2),
            "transformer.h.*.mlp.c_fc": ColumnParallel(sequence_axis=-2),
            "transformer.h.*.*.c_proj": RowParallel(sequence_axis=-2),
            "transformer.ln_f": SequenceParallel(gather_output=True),
        },
        {},
        ("transformer.wpe.weight", "transformer.h.1.mlp.c_fc.bias"),
        lr=0.3,
    ),
    "convnet": Network(
        lambda setting, _: ConvNet((1, 8, 8), CLASSES, device=device(), seed=2),
        images,
        F.cross_entropy,
        {"fc1": ColumnParallel(), "fc2": RowParallel()},
        {},
        {},
        ("conv2.weight",),
    ),
    "resnet": Network(
        lambda setting, _: ResNet((1, 8, 8), CLASSES, (1, 1, 1, 1), 4, device=device(), seed=4),
        images,
        F.cross_entropy,
        {},
        {},
        {},
        ("layer2.0.conv1.weight",),
        lr=1e-3,
    ),
}


def network_of(setting: Setting) -> Network:
    return NETWORKS[setting["network"]]


def model_of(setting: Setting, replicas: Replicas) -> Module:
    """Return a setting's model on one rank, with its frozen parameters."""
    network = network_of(setting)
    model = network.make(setting, replicas)
    if setting["frozen"] != "off":
        found = dict(model.named_parameters())
        for name in network.frozen:
            found[name].requires_grad = False
    return model


def tensor(values: np.ndarray) -> Tensor:
    return Tensor(values, device())
