"""This project as its Trainer runs it: the native engine under Communicator, Synchronizer and clcomm.optim.SGD."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.peers.batches import Batch
from benchmarks.peers.worker import LR, options, work
from clcomm import Communicator, Synchronizer
from clcomm.engine import Device
from clcomm.sync.compression import parse_compression
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from training.engines.parts import build_parts

PHASES = ("upload", "forward and backward", "sync", "update")


class Native:
    """A step of the native engine; with the setting "phases" it waits after each phase and adds up their times.

    The setting "alone" runs only the reductions of gradients, "per_tensor" reduces each one on its own,
    "compression" names a scheme, which NumPy codes with "coded_by_numpy". sharded: each rank updates a part of the
    parameters.
    """

    def __init__(
        self, model: str, shape: tuple[int, ...], batches: list[Batch], comm: Communicator, sharded: bool = False,
        device: str | None = None,
    ):  # fmt: skip
        self.device = Device.select(device, local_rank=comm.local_rank, local_size=comm.local_size, cores=comm.cores)
        self.parts = build_parts("native", model, shape, 10, seed=0, device=self.device)
        self.comm, self.batches = comm, batches
        self.sync = Synchronizer(comm)
        self.optimizer: Any = self.parts.make_optimizer("sgd", LR)
        if sharded:
            self.optimizer = DistributedOptimizer(self.optimizer, self.sync)
        self.sync.broadcast_parameters(self.parts.model)
        self._initial = self.parts.model.state_dict()
        self._compression: tuple[str, bool] = ("none", False)
        self._codec = self.sync.models.of(self.parts.model).space.adapter.codec
        self._loss: Any = None
        self._by_phase = False
        self._reduce_alone: Callable[[], None] | None = None
        self._bucketing: bool | None = None  # as the Synchronizer has it
        self.phases = _no_time()

    def configure(self, settings: dict[str, Any]) -> None:
        self._by_phase = bool(settings.get("phases"))
        self._bucketing = False if settings.get("per_tensor") else None
        compression = settings.get("compression", "none"), bool(settings.get("coded_by_numpy"))
        if compression != self._compression:
            self._compress(*compression)
        alone = bool(settings.get("alone"))
        self._reduce_alone = self.sync.models.of(self.parts.model).reductions(self._bucketing) if alone else None

    def _compress(self, scheme: str, coded_by_numpy: bool) -> None:
        adapter = self.sync.models.of(self.parts.model).space.adapter
        adapter.codec = None if coded_by_numpy else self._codec  # type: ignore[misc]
        self.sync.register_comm_hook(parse_compression(scheme))
        self._compression = scheme, coded_by_numpy

    def reset(self) -> None:
        self.parts.model.load_state_dict(self._initial)

    def step(self, number: int) -> None:
        if self._reduce_alone is not None:
            self._reduce_alone()
            return
        if self._by_phase:
            self._step_by_phase(number)
            return
        inputs, targets = self.parts.prepare(*self.batches[number])
        self._loss = self.parts.forward_backward(inputs, targets, 1.0)
        self.sync.sync_gradients(self.parts.model, self._bucketing)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _step_by_phase(self, number: int) -> None:
        marks = [(time.perf_counter(), time.process_time())]

        def mark() -> None:
            self.device.finish()
            marks.append((time.perf_counter(), time.process_time()))

        inputs, targets = self.parts.prepare(*self.batches[number])
        mark()
        self._loss = self.parts.forward_backward(inputs, targets, 1.0)
        mark()
        self.sync.sync_gradients(self.parts.model, self._bucketing)
        mark()
        self.optimizer.step()
        self.optimizer.zero_grad()
        mark()
        for name, begin, end in zip(PHASES, marks[:-1], marks[1:], strict=True):
            self.phases["wall"][name] += end[0] - begin[0]
            self.phases["cpu"][name] += end[1] - begin[1]

    def finish(self) -> dict[str, Any]:
        self.device.finish()
        phases, self.phases = self.phases, _no_time()
        return {"loss": None if self._loss is None else self._loss.item(), "phases": phases}


def _no_time() -> dict[str, dict[str, float]]:
    return {clock: dict.fromkeys(PHASES, 0.0) for clock in ("wall", "cpu")}


def main() -> None:
    given, comm = options(), Communicator()
    shape = tuple(given.shape)
    work(given, comm.rank, lambda batches: Native(given.model, shape, batches, comm, given.sharded, given.device))


if __name__ == "__main__":
    main()
