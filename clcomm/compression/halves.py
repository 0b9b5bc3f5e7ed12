"""Half the bytes: gradients as float16, or as the upper half of a float32 (bfloat16); no feedback."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from clcomm.buckets import Bucket
from clcomm.compression.coding import Codec, Coding, Work
from clcomm.compression.ranks import Ranks
from clcomm.transport.bfloat16 import BFLOAT16


class Float16:
    """Gradients travel, and are summed in rank order, as float16; divided by the ranks first, so that sums fit."""

    elementwise = between_hosts = True

    def __call__(self, gradient: np.ndarray, comm: Ranks, out: np.ndarray, bucket: Bucket) -> None:
        self.prepare(gradient, comm, out, bucket)()

    def prepare(
        self, gradient: np.ndarray, comm: Ranks, out: np.ndarray, bucket: Bucket,
        flat: np.ndarray | None = None, codec: Codec | None = None,
    ) -> Work:  # fmt: skip
        """Return what a call with these arguments does; collective. See `PreparedHook`."""
        coding, (halves, total) = Coding(codec), _memory(gradient.size, comm, np.dtype(np.float16))
        encode = coding.to_halves(gradient, halves, comm.size)
        return _in_turn(encode, comm.all_reduce_init(halves, out=total), coding.from_halves(total, out))

    def __str__(self) -> str:
        return "fp16"


class BFloat16:
    """Gradients travel as bfloat16 and are summed as float32, in rank order; the sum is rounded to bfloat16 too."""

    elementwise = between_hosts = True

    def __call__(self, gradient: np.ndarray, comm: Ranks, out: np.ndarray, bucket: Bucket) -> None:
        self.prepare(gradient, comm, out, bucket)()

    def prepare(
        self, gradient: np.ndarray, comm: Ranks, out: np.ndarray, bucket: Bucket,
        flat: np.ndarray | None = None, codec: Codec | None = None,
    ) -> Work:  # fmt: skip
        """Return what a call with these arguments does; collective. See `PreparedHook`."""
        coding, (halves, total) = Coding(codec), _memory(gradient.size, comm, BFLOAT16)
        encode = coding.to_bfloat16(gradient, halves, comm.size)
        return _in_turn(encode, comm.all_reduce_init(halves, out=total), coding.from_bfloat16(total, out))

    def __str__(self) -> str:
        return "bf16"


def _memory(size: int, comm: Ranks, dtype: np.dtype) -> list[np.ndarray]:
    """Return what this rank sends and what comes back."""
    return [make(2 * size).view(dtype) for make in (comm.allocate, comm.allocate_common)]


def _in_turn(*parts: Callable[[], object]) -> Work:
    def run() -> None:
        for part in parts:
            part()

    return run
