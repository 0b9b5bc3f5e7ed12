"""Devices of one process to test on, networks, and the training of one device on the same samples."""

from __future__ import annotations

from functools import cache

import numpy as np

from clcomm.engine import CrossEntropyLoss, Device, Generator, Linear, Module, Tensor, functional
from clcomm.optim import SGD, AdamW, RMSProp
from clcomm.parallel.devices import DeviceManager, data_parallel_step, prepare_replicas
from tests.helpers import cpu_device

FEATURES, CLASSES = 5, 3


@cache
def queues(count: int, kind: str = "cpu") -> tuple[Device, ...]:
    """Return several queues on this process's CPU; of kind "gpu" they copy, as if their memory were their own.

    "mixed": they are of both kinds in turn, as a GPU beside a CPU.
    """
    kinds = ("cpu", "gpu") if kind == "mixed" else (kind,)
    return tuple(_queue(index, kinds[index % len(kinds)]) for index in range(count))


@cache
def _queue(index: int, kind: str) -> Device:
    return cpu_device(kind) if index == 0 else Device(cpu_device("cpu").cl_device, kind=kind)


@cache
def sub_devices(count: int) -> tuple[Device, ...]:
    return tuple(DeviceManager([cpu_device("cpu")], parts=count).devices)


class Network(Module):
    """A network of which a forward may leave out the middle layer."""

    def __init__(self, device: Device, seed: int = 0):
        rng = Generator(seed)
        self.first = Linear(FEATURES, 7, device=device, rng=rng)
        self.middle = Linear(7, 7, device=device, rng=rng)
        self.last = Linear(7, CLASSES, device=device, rng=rng)

    def forward(self, x: Tensor, uses_middle: bool = True) -> Tensor:
        x = functional.tanh(self.first(x))
        return self.last(functional.relu(self.middle(x)) if uses_middle else x)


def batch_of(samples: int, step: int, part: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([step, part, 5])
    x = rng.standard_normal((samples, FEATURES)).astype(np.float32)
    return x, rng.integers(0, CLASSES, samples).astype(np.int32)


def sgd(params) -> SGD:
    return SGD(params, 0.1, momentum=0.9, weight_decay=1e-3)


OPTIMIZERS = {
    "sgd": sgd,
    "nesterov": lambda params: SGD(params, 0.05, momentum=0.9, nesterov=True),
    "adamw": lambda params: AdamW(params, 1e-3, eps=1e-4),
    "rmsprop": lambda params: RMSProp(params, 1e-3, eps=1e-3),
}


def train(devices, batches, sizes=None, skips=(), optimizer=sgd, synchronizer=None, seed=0):
    """Train on several devices, `skips`: those that leave out the middle layer; return replicas, model and losses."""
    model, loss_fn = Network(devices[0], seed), CrossEntropyLoss()
    replicas = prepare_replicas(model, devices, synchronizer)
    optimizers = [optimizer(params) for params in replicas]

    def forward(device, x, y, params):
        return loss_fn(model(x, devices.index(device) not in skips), y)

    losses = [data_parallel_step(forward, replicas, optimizers, batch, sizes=sizes) for batch in batches]
    return replicas, model, losses


def train_alone(batches, sizes, skips=(), optimizer=sgd, seed=0):
    """Train one device on whole batches, each loss the mean over all samples; return its model and losses."""
    device = cpu_device("cpu")
    model, loss_fn, losses = Network(device, seed), CrossEntropyLoss(), []
    steps = optimizer(model)
    bounds = np.cumsum([0, *sizes])
    for x, y in batches:
        total = 0.0
        for index, size in enumerate(sizes):
            if size:
                part = slice(bounds[index], bounds[index + 1])
                logits = model(Tensor(x[part], device), index not in skips)
                loss = loss_fn(logits, y[part]) * (size / len(x))
                loss.backward()
                total += loss.item()
        steps.step()
        steps.zero_grad()
        losses.append(total)
    return model, losses


def bits(params) -> list[bytes]:
    return [parameter.numpy().tobytes() for parameter in params]


def require_close(ours: Module, expected: Module, tolerance: float = 1e-6) -> None:
    """Compare parameters to so much of the largest in each."""
    for name, value in expected.state_dict().items():
        error = np.abs(ours.state_dict()[name] - value).max()
        assert error <= tolerance * np.abs(value).max(), (name, error)
