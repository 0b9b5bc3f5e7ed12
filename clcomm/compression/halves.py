"""Half the bytes: gradients as float16, or as the upper half of a float32 (bfloat16); no feedback."""

from __future__ import annotations

from functools import partial

import numpy as np

from clcomm.buckets import Bucket
from clcomm.communicator import Communicator
from clcomm.compression.coding import Codec, Coding, Work
from clcomm.compression.exchange import prepare_exchange


class Float16:
    """Gradients travel, and are summed in rank order, as float16; divided by the ranks first, so that sums fit."""

    elementwise = True

    def __call__(self, gradient: np.ndarray, comm: Communicator, out: np.ndarray, bucket: Bucket) -> None:
        self.prepare(gradient, comm, out, bucket)()

    def prepare(
        self, gradient: np.ndarray, comm: Communicator, out: np.ndarray, bucket: Bucket,
        flat: np.ndarray | None = None, codec: Codec | None = None,
    ) -> Work:  # fmt: skip
        """Return what a call with these arguments does; collective. See `PreparedHook`."""
        coding, nbytes = Coding(codec), 2 * gradient.size
        halves, total = (make(nbytes).view(np.float16) for make in (comm.allocate, comm.allocate_common))
        encode = coding.to_halves(gradient, halves, comm.size)
        reduce = comm.all_reduce_init(halves, out=total)
        decode = coding.from_halves(total, out)

        def run() -> None:
            encode()
            reduce()
            decode()

        return run

    def __str__(self) -> str:
        return "fp16"


class BFloat16:
    """Gradients travel as bfloat16, float32's range with 8 bits of precision, and are summed as float32."""

    elementwise = True

    def __call__(self, gradient: np.ndarray, comm: Communicator, out: np.ndarray, bucket: Bucket) -> None:
        self.prepare(gradient, comm, out, bucket)()

    def prepare(
        self, gradient: np.ndarray, comm: Communicator, out: np.ndarray, bucket: Bucket,
        flat: np.ndarray | None = None, codec: Codec | None = None,
    ) -> Work:  # fmt: skip
        """Return what a call with these arguments does; collective. See `PreparedHook`."""
        coding = Coding(codec)
        encode, decode = partial(coding.to_bfloat16, gradient), partial(coding.mean_of_bfloat16, out=out)
        return prepare_exchange(comm, gradient.size, np.uint16, encode, decode)

    def __str__(self) -> str:
        return "bf16"
