"""PyTorch's DistributedDataParallel over gloo."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.batches import Batch
from benchmarks.peers.pytorch import TorchSystem
from benchmarks.peers.worker import options, work


class Ddp(TorchSystem):
    """DDP averages within backward; gradients live in its buckets, its faster setting."""

    def __init__(self, model: str, shape: tuple[int, ...], batches: list[Batch]):
        super().__init__(model, shape, batches)
        self.forward = DistributedDataParallel(self.module, gradient_as_bucket_view=True)


def main() -> None:
    given = options()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = f"file://{Path(given.directory, 'store')}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    work(given, rank, lambda batches: Ddp(given.model, tuple(given.shape), batches))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
