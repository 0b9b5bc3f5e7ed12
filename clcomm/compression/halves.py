"""Half the bytes: gradients as float16, or as the upper half of a float32 (bfloat16); no feedback."""

from __future__ import annotations

import numpy as np

from clcomm.buckets import Bucket
from clcomm.communicator import Communicator
from clcomm.compression.feedback import mean_of_rows


class Float16:
    """Gradients travel, and are summed in rank order, as float16; divided by the ranks first, so that sums fit."""

    elementwise = True

    def __call__(self, gradient: np.ndarray, comm: Communicator, out: np.ndarray, bucket: Bucket) -> None:
        with np.errstate(all="ignore"):
            half = (gradient / comm.size).astype(np.float16)
        np.copyto(out, comm.all_reduce(half))

    def __str__(self) -> str:
        return "fp16"


class BFloat16:
    """Gradients travel as bfloat16, float32's range with 8 bits of precision, and are summed as float32."""

    elementwise = True

    def __call__(self, gradient: np.ndarray, comm: Communicator, out: np.ndarray, bucket: Bucket) -> None:
        rows = comm.all_gather(to_bfloat16(gradient))
        with np.errstate(all="ignore"):
            mean_of_rows([from_bfloat16(row) for row in rows], out)

    def __str__(self) -> str:
        return "bf16"


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Return the upper 16 bits of float32 values, as uint16, rounded to nearest, ties to even; NaN stays NaN."""
    with np.errstate(all="ignore"):
        bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def from_bfloat16(halves: np.ndarray) -> np.ndarray:
    """Return float32 values with these upper 16 bits."""
    return (halves.astype(np.uint32) << 16).view(np.float32)
