"""netcl in one process, as published and with this project's adapter."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.batches import Batch
from benchmarks.peers.worker import LR, options, work
from clcomm.engine import Device
from training.engines.parts import build_parts


class Netcl:
    """netcl's kernels and optimizer. The setting "as_published" removes the adapter's cache.

    It caches the cross-entropy's programs, which netcl 0.4.4 builds at every call.
    """

    def __init__(self, model: str, shape: tuple[int, ...], batches: list[Batch]):
        self.parts = build_parts("netcl", model, shape, 10, seed=0, device=Device.select())
        self.optimizer = self.parts.make_optimizer("sgd", LR)
        self.batches = batches
        self._initial = self.parts.model.state_dict()
        self._loss: Any = None

    def configure(self, settings: dict[str, Any]) -> None:
        import netcl.autograd.ops as ops
        import pyopencl

        if not hasattr(self, "_helped"):
            self._helped = ops.cl
        ops.cl = pyopencl if settings.get("as_published") else self._helped

    def reset(self) -> None:
        self.parts.model.load_state_dict(self._initial)

    def step(self, number: int) -> None:
        inputs, targets = self.parts.prepare(*self.batches[number])
        self._loss = self.parts.loss_fn(self.parts.model(inputs), targets)
        self._loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def finish(self) -> dict[str, Any]:
        next(self.parts.model.parameters()).numpy()
        return {"loss": self._loss.item()}


def main() -> None:
    given = options()
    work(given, 0, lambda batches: Netcl(given.model, tuple(given.shape), batches))


if __name__ == "__main__":
    main()
