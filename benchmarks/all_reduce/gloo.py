"""PyTorch's all-reduce over gloo, in place."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed

from benchmarks.all_reduce.worker import expected_sum, rank_values, timed
from benchmarks.workers import serve


def check(tensor: torch.Tensor, rank: int, ranks: int) -> None:
    """Reduce known values and compare."""
    tensor.copy_(torch.from_numpy(rank_values(tensor.numel(), rank)))
    torch.distributed.all_reduce(tensor)
    np.testing.assert_array_equal(tensor.numpy(), expected_sum(tensor.numel(), ranks))
    tensor.zero_()


def main() -> None:
    directory, rank, ranks = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    store = f"file://{Path(directory, 'store')}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    tensors: dict[int, torch.Tensor] = {}

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        nbytes = request["nbytes"]
        if nbytes not in tensors:
            tensors[nbytes] = torch.zeros(nbytes // 4)
            check(tensors[nbytes], rank, ranks)
        return timed(lambda: torch.distributed.all_reduce(tensors[nbytes]), request["repeats"])

    serve(directory, rank, handle)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
