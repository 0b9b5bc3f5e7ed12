"""A quarter of the bytes: 8-bit integers with a scale for each block, and error feedback."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from clcomm.buckets import Bucket
from clcomm.compression.feedback import Feedback, mean_of_rows, require_known
from clcomm.compression.ranks import Ranks
from clcomm.layout import FlatLayout

#: Elements that share a scale.
BLOCK = 256


class Int8:
    """Each block's largest magnitude becomes 127; what rounding takes away is added to the next step's gradient."""

    between_hosts = True

    def __init__(self) -> None:
        self.feedback = Feedback()

    def __call__(self, gradient: np.ndarray, comm: Ranks, out: np.ndarray, bucket: Bucket) -> None:
        wanted = self.feedback.corrected(gradient, bucket)
        with np.errstate(all="ignore"):
            packed = pack(wanted)
            self.feedback.keep(gradient, bucket, wanted - unpack(packed, wanted.size))
            mean_of_rows([unpack(row, wanted.size) for row in comm.all_gather(packed)], out)

    def state_of(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Return this rank's residuals of the model whose gradients lie in `flat`."""
        return self.feedback.state_of(flat)

    def check_state(self, layout: FlatLayout, state: Mapping[str, np.ndarray]) -> None:
        """Raise ArgumentError unless this is what `state_of` returns for a model of this layout."""
        self.feedback.check_state(layout, state)
        require_known(state, {"residual"})

    def load_state_of(self, flat: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """Go on from what `state_of` returned."""
        self.feedback.load_state_of(flat, state)

    def __str__(self) -> str:
        return "int8"


def pack(values: np.ndarray) -> np.ndarray:
    """Return bytes that hold a float32 scale for each block, then an int8 for each element; padded with zeros."""
    blocks = np.zeros((-(-values.size // BLOCK), BLOCK), np.float32)
    blocks.reshape(-1)[: values.size] = values
    scales = np.abs(blocks).max(axis=1, initial=0.0) / np.float32(127)  # NaN and Inf stay: the mean has to show them
    quotients = np.nan_to_num(np.rint(blocks / np.where(scales > 0, scales, 1)[:, None]))
    return np.concatenate([scales.view(np.uint8), quotients.astype(np.int8).view(np.uint8).reshape(-1)])


def unpack(packed: np.ndarray, count: int) -> np.ndarray:
    """Return the float32 values that `pack` made the bytes of."""
    blocks = packed.size // (BLOCK + 4)
    scales = packed[: 4 * blocks].copy().view(np.float32)
    numbers = packed[4 * blocks :].view(np.int8).reshape(blocks, BLOCK)
    return (numbers * scales[:, None]).astype(np.float32).reshape(-1)[:count]
