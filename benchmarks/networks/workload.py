"""What both systems train: a network with its initial weights, its batches and its optimizer, in a folder of files.

The parent writes it, each rank of each system reads its part.

Legend: R ranks, S steps, B samples of a batch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.batches import Batch, aligned
from clcomm import Communicator
from clcomm.engine import Device, Module, weights
from clcomm.sync.sampler import DistributedSampler
from models import GPT, ResNet
from training.data.cifar import as_cifar
from training.data.datasets import Splits
from training.data.open_data import open_data
from training.data.text import open_text

#: The networks of the bars, and what a smaller one has in their place.
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "gpt": {
        "full": {"context": 256, "layers": 6, "width": 192, "heads": 6},
        "small": {"context": 64, "layers": 2, "width": 64, "heads": 2},
    },
    "resnet": {"full": {"width": 64}, "small": {"width": 8}},
}
#: Optimizer and learning rate.
OPTIMIZERS = {"gpt": ("adamw", 1e-3), "resnet": ("sgd", 0.02)}
_MOMENTUM = 0.9
_WEIGHTS, _FIELDS = "weights.safetensors", "workload.json"


@dataclass(frozen=True)
class Workload:
    """A network by name, its sizes, and its optimizer."""

    network: str
    sizes: dict[str, Any]
    optimizer: str
    lr: float

    @property
    def optimizer_settings(self) -> dict[str, float]:
        """What the optimizer takes besides its rate."""
        return {"momentum": _MOMENTUM} if self.optimizer == "sgd" else {}

    def module(self, device: Device) -> Module:
        """Return this project's network, with values of a seed."""
        kinds: dict[str, Any] = {"gpt": GPT, "resnet": ResNet}
        return kinds[self.network](**self.sizes, device=device, seed=0)


def write(folder: Path, network: str, size: str, ranks: int, steps: int, batch: int, data: str, tests: int) -> Splits:
    """Write a workload with so many batches for each rank and so many samples to test; return its data.

    Samples come in the order of a DistributedSampler, epoch after epoch.
    """
    sizes = dict(SIZES[network][size])
    if network == "gpt":
        splits = open_text(None, sizes["context"], Communicator(transport="solo"))
        sizes["vocabulary"] = splits.train.classes
    else:
        splits = open_data(data, report=lambda line: None)
        splits = splits if splits.train.image_shape[0] == 3 else as_cifar(splits)
        sizes |= {"in_shape": splits.train.image_shape, "classes": splits.train.classes}
    assert splits.test is not None
    workload = Workload(network, sizes, *OPTIMIZERS[network])
    (folder / _FIELDS).write_text(json.dumps(asdict(workload)), encoding="utf-8")
    weights.save(folder / _WEIGHTS, workload.module(Device.select(cores=1)))
    for rank in range(ranks):
        order = DistributedSampler(len(splits.train), rank, ranks, seed=0)
        indices: list[np.ndarray] = []
        for epoch in range(-(-steps * batch // len(order))):
            order.set_epoch(epoch)
            indices += [part for part in order.batches(batch) if len(part) == batch]
        _write_batches(folder, f"train{rank}", splits.train.batch(np.concatenate(indices[:steps])))
    _write_batches(folder, "test", splits.test.batch(np.arange(min(tests, len(splits.test)))))
    return splits


def _write_batches(folder: Path, name: str, arrays: Batch) -> None:
    for kind, array in zip(("inputs", "labels"), arrays, strict=True):
        np.save(folder / f"{name}.{kind}.npy", array)


def read(folder: Path) -> Workload:
    """Return what `write` wrote."""
    return Workload(**json.loads((folder / _FIELDS).read_text(encoding="utf-8")))


def batches_of(folder: Path, name: str, batch: int) -> list[Batch]:
    """Return the whole batches of "train" with a rank's number, or of "test", in memory of their own."""
    inputs, labels = (np.load(folder / f"{name}.{kind}.npy", mmap_mode="r") for kind in ("inputs", "labels"))
    firsts = range(0, len(inputs) - batch + 1, batch)
    return [(aligned(inputs[n : n + batch]), aligned(labels[n : n + batch])) for n in firsts]


def initial_weights(folder: Path) -> Path:
    """Return the file of the initial weights."""
    return folder / _WEIGHTS
