"""A rank of `benchmarks.mixed`: a small ConvNet on an OpenCL runtime or library that the rank chooses, on a core.

Every kind has the same names and shapes of parameters, so that all average with each other.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from benchmarks.workers import serve
from clcomm import Communicator, Synchronizer
from clcomm.base.host import usable_cores
from clcomm.base.host.launcher import launched_rank

POCL, INTEL, TINYGRAD = KINDS = "pocl", "intel", "tinygrad"
_LR, _SHAPE, _CLASSES = 0.01, (1, 28, 28), 10

#: Averages a batch's gradients.
Synchronise = Callable[[], None]


class Training(Protocol):
    """A kind's model and its steps."""

    model: Any

    def step(self, images: np.ndarray, labels: np.ndarray, synchronise: Synchronise) -> None:
        """Take a step on a batch; may leave work queued."""

    def finish(self) -> float:
        """Wait until all work is done, and return the last loss."""


class Engine:
    """clcomm's engine on the device of CLCOMM_DEVICE."""

    def __init__(self, comm: Communicator):
        from clcomm.engine import Device
        from training.engines.parts import build_parts

        device = Device.select(None, local_rank=comm.local_rank, local_size=comm.local_size, cores=1)
        self._parts = build_parts("native", "convnet", _SHAPE, _CLASSES, 0, device=device)
        self.model, self._optimizer = self._parts.model, self._parts.make_optimizer("sgd", _LR)
        self._device, self._loss = device, None

    def step(self, images: np.ndarray, labels: np.ndarray, synchronise: Synchronise) -> None:
        self._loss = self._parts.forward_backward(*self._parts.prepare(images, labels), 1.0)
        synchronise()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def finish(self) -> float:
        self._device.finish()
        return float("nan") if self._loss is None else float(np.asarray(self._loss.numpy()))


class Tinygrad:
    """tinygrad, whole steps in a TinyJit; a batch of another size gets one of its own."""

    def __init__(self, comm: Communicator):
        import clcomm.tinygrad  # noqa: F401  # before tinygrad opens its device
        from tinygrad import Tensor, nn  # isort: skip

        class ConvNet:
            def __init__(self) -> None:
                self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
                self.fc1, self.fc2 = nn.Linear(1568, 128), nn.Linear(128, _CLASSES)

            def __call__(self, x: Tensor) -> Tensor:
                x = self.conv2(self.conv1(x).relu().max_pool2d()).relu().max_pool2d()
                return self.fc2(self.fc1(x.flatten(1)).relu())

        self.model: Any = ConvNet()
        self._optimizer = nn.optim.SGD(nn.state.get_parameters(self.model), lr=_LR)
        self._jits: dict[int, Any] = {}
        self._loss: Any = None

    def step(self, images: np.ndarray, labels: np.ndarray, synchronise: Synchronise) -> None:
        from tinygrad import Context, Tensor, TinyJit

        @Context(TRAINING=1)
        def step(x: Tensor, y: Tensor) -> Tensor:
            self._optimizer.zero_grad()
            loss = self.model(x).sparse_categorical_crossentropy(y).backward()
            synchronise()
            return loss.realize(*self._optimizer.schedule_step())

        jit = self._jits.setdefault(len(images), TinyJit(step))
        self._loss = jit(Tensor(images), Tensor(labels.astype(np.int32)))

    def finish(self) -> float:
        return float("nan") if self._loss is None else float(self._loss.item())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, required=True, help="of each rank")
    parser.add_argument("--cores", nargs="+", type=int, required=True, help="of each rank, by their order")
    options, place = parser.parse_args(), launched_rank() or 0
    kind = options.kinds[place]
    cores = sorted(usable_cores())
    os.sched_setaffinity(0, {cores[options.cores[place] % len(cores)]})  # before OpenCL is loaded
    os.environ["CLCOMM_DEVICE"] = {INTEL: "intel", POCL: "portable"}.get(kind, "")
    comm = Communicator()
    side: Training = Tinygrad(comm) if kind == TINYGRAD else Engine(comm)
    sync = Synchronizer(comm)
    sync.broadcast_parameters(side.model)
    draw = np.random.default_rng(comm.rank)

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        if "hash" in request:
            return {"hash": hash_of(sync, side.model)}
        batches: list[int] = request["batches"]
        size, total = batches[comm.rank], sum(batches)
        images = draw.standard_normal((size, *_SHAPE)).astype(np.float32)
        labels = draw.integers(0, _CLASSES, size)
        comm.barrier()
        begin = time.perf_counter()
        for _ in range(request["steps"]):
            side.step(images, labels, lambda: sync.sync_gradients(side.model, samples=size, of=total))
        loss = side.finish()
        comm.barrier()
        return {"seconds": time.perf_counter() - begin, "loss": loss}

    serve(options.directory, comm.rank, handle)


def hash_of(sync: Synchronizer, model: object) -> str:
    """Return the hash of a replica's bits."""
    space = sync.models.of(model).space
    space.adapter.pull_parameters()
    return hashlib.sha256(space.arrays.params.tobytes()).hexdigest()


if __name__ == "__main__":
    main()
