"""LizarDist's loop with its imports changed: the same PyTorch model, averaged by `clcomm.lizardist`."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.batches import Batch
from benchmarks.peers.pytorch import TorchSystem
from benchmarks.peers.worker import options, work
from clcomm.lizardist import Communicator, Synchronizer


class ImportsChanged(TorchSystem):
    """Synchronises where LizarDist does; the setting "synchronises" False leaves it out, which bounds all others."""

    def __init__(self, model: str, shape: tuple[int, ...], batches: list[Batch], comm: Communicator):
        super().__init__(model, shape, batches)
        self.sync = Synchronizer(comm)
        self.sync.broadcast_parameters(self.module)
        self.bucketing = self.synchronises = True

    def configure(self, settings: dict[str, Any]) -> None:
        super().configure(settings)
        self.bucketing = settings.get("bucketing", True)
        self.synchronises = settings.get("synchronises", True)

    def synchronise(self) -> None:
        if self.synchronises:
            self.sync.sync_gradients(self.module, use_bucketing=self.bucketing)


def main() -> None:
    given, comm = options(), Communicator()
    shape = tuple(given.shape)
    work(given, comm.get_rank(), lambda batches: ImportsChanged(given.model, shape, batches, comm))


if __name__ == "__main__":
    main()
