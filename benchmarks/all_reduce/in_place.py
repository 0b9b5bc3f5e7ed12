"""What PyTorch's all-reduces in place have in common: tensors by size, checked once and then timed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.all_reduce.worker import Measured, expected_sum, rank_values, timed
from benchmarks.workers import serve


def place() -> tuple[str, int, int]:
    """Return the job's directory, this process's rank, and the number of ranks."""
    return sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def serve_in_place(all_reduce: Callable[[torch.Tensor], object]) -> None:
    """Answer the parent's requests with an all-reduce that sums a tensor in place."""
    directory, rank, ranks = place()
    systems: dict[int, Measured] = {}

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        nbytes = request["nbytes"]
        if nbytes not in systems:
            tensor = torch.zeros(nbytes // 4)
            values = tensor.numpy()
            values[...] = rank_values(values.size, rank)
            all_reduce(tensor)
            np.testing.assert_array_equal(values, expected_sum(values.size, ranks))
            systems[nbytes] = Measured(lambda: all_reduce(tensor), values, values, ranks)
        return timed(systems[nbytes], request["repeats"])

    serve(directory, rank, handle)
