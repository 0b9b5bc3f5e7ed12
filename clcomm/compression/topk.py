"""Only the largest gradients travel, the rest waits its turn in the residual (Lin et al., 2018)."""

from __future__ import annotations

import math

import numpy as np

from clcomm.buckets import Bucket
from clcomm.communicator import Communicator
from clcomm.compression.feedback import Feedback


class TopK:
    """Each rank sends this share of a bucket's elements, those of the largest magnitude, with their places."""

    def __init__(self, share: float):
        self.share = share
        self.feedback = Feedback()

    def __call__(self, gradient: np.ndarray, comm: Communicator, out: np.ndarray, bucket: Bucket) -> None:
        wanted = self.feedback.corrected(gradient, bucket)
        count = math.ceil(self.share * wanted.size)
        sizes = np.nan_to_num(np.abs(wanted), nan=np.inf, posinf=np.inf)  # NaN travels first: nobody may miss it
        chosen = np.sort(np.argpartition(-sizes, count - 1)[:count])
        values = wanted[chosen]
        packed = np.concatenate([chosen.astype(np.uint32).view(np.uint8), values.view(np.uint8)])
        wanted[chosen] = 0
        self.feedback.keep(gradient, bucket, wanted)
        total = np.zeros_like(gradient)
        with np.errstate(all="ignore"):
            for row in comm.all_gather(packed):
                total[row[: 4 * count].copy().view(np.uint32)] += row[4 * count :].copy().view(gradient.dtype)
            total /= comm.size
        np.copyto(out, total)

    def __str__(self) -> str:
        return f"topk:{self.share:g}"
