"""Half the bytes: gradients as float16, or as the upper half of a float32 (bfloat16); no feedback."""

from __future__ import annotations

import numpy as np

from clcomm.buckets import Bucket
from clcomm.compression.ranks import Ranks
from clcomm.transport.bfloat16 import from_bfloat16, to_bfloat16


class Float16:
    """Gradients travel, and are summed in rank order, as float16; divided by the ranks first, so that sums fit."""

    elementwise = between_hosts = True

    def __call__(self, gradient: np.ndarray, comm: Ranks, out: np.ndarray, bucket: Bucket) -> None:
        with np.errstate(all="ignore"):
            half = (gradient / comm.size).astype(np.float16)
        np.copyto(out, comm.all_reduce(half))

    def __str__(self) -> str:
        return "fp16"


class BFloat16:
    """Gradients travel as bfloat16 and are summed as float32, in rank order; the sum is rounded to bfloat16 too."""

    elementwise = between_hosts = True

    def __call__(self, gradient: np.ndarray, comm: Ranks, out: np.ndarray, bucket: Bucket) -> None:
        with np.errstate(all="ignore"):
            half = to_bfloat16(gradient / comm.size)
        np.copyto(out, from_bfloat16(comm.all_reduce(half)))

    def __str__(self) -> str:
        return "bf16"
