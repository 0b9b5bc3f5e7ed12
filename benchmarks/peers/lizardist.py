"""The LizarDist loop: PyTorch computes, and NumPy and mpi4py average, tensor by tensor or in concatenated buckets.

Written from its description, https://github.com/adelbennaceur/lizardist: gradients become NumPy arrays, are summed with
Allreduce, divided by the number of ranks and copied back into `.grad`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from benchmarks.peers.batches import Batch
from benchmarks.peers.pytorch import TorchSystem
from benchmarks.peers.worker import options, work

BUCKET_SIZE = 1 << 20  # bytes, its default


class LizarDist(TorchSystem):
    """Synchronises between backward and update; the setting "bucketing" selects one of its two ways."""

    def __init__(self, model: str, shape: tuple[int, ...], batches: list[Batch], comm: MPI.Comm):
        super().__init__(model, shape, batches)
        self.comm, self.bucketing = comm, True

    def configure(self, settings: dict[str, Any]) -> None:
        super().configure(settings)
        self.bucketing = settings.get("bucketing", True)

    def synchronise(self) -> None:
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        arrays = [gradient.detach().cpu().numpy() for gradient in gradients]
        averaged = self._bucketed(arrays) if self.bucketing else [self._averaged(each) for each in arrays]
        for gradient, mean in zip(gradients, averaged, strict=True):
            gradient.copy_(torch.from_numpy(mean).to(gradient.device))

    def _averaged(self, array: np.ndarray) -> np.ndarray:
        total = np.empty_like(array)
        self.comm.Allreduce(array, total, op=MPI.SUM)
        return total / self.comm.Get_size()

    def _bucketed(self, gradients: list[np.ndarray]) -> list[np.ndarray]:
        results: list[np.ndarray] = []
        for bucket in _buckets(gradients):
            flat = self._averaged(np.concatenate([gradient.ravel() for gradient in bucket]))
            ends = np.cumsum([gradient.size for gradient in bucket])[:-1]
            results += [part.reshape(g.shape) for part, g in zip(np.split(flat, ends), bucket, strict=True)]
        return results


def _buckets(gradients: list[np.ndarray]) -> list[list[np.ndarray]]:
    buckets: list[list[np.ndarray]] = [[]]
    filled = 0
    for gradient in gradients:
        if buckets[-1] and filled + gradient.nbytes > BUCKET_SIZE:
            buckets.append([])
            filled = 0
        buckets[-1].append(gradient)
        filled += gradient.nbytes
    return buckets


def main() -> None:
    given, comm = options(), MPI.COMM_WORLD
    work(given, comm.Get_rank(), lambda batches: LizarDist(given.model, tuple(given.shape), batches, comm))


if __name__ == "__main__":
    main()
