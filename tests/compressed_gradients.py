"""What tests of compression have in common: the schemes, a bucket, and gradients for it."""

from __future__ import annotations

import numpy as np

from clcomm.base.flat_space.layout import FlatLayout
from clcomm.base.flat_space.parameters import ParameterSpec

SCHEMES = ["fp16", "bf16", "int8", "topk:0.05", "powersgd:2"]
FEEDBACK = SCHEMES[2:]
LAYOUT = FlatLayout([ParameterSpec("w", (40, 30)), ParameterSpec("b", (40,))])
(BUCKET,) = LAYOUT.buckets(1 << 20)
SIZE = (BUCKET.stop - BUCKET.start) // 4


def gradient_of(rank: int, step: int) -> np.ndarray:
    """Return a bucket's gradient: the ranges hold numbers, the padding between them zeros."""
    flat = np.zeros(LAYOUT.span, np.uint8)
    for number, place in enumerate(LAYOUT.ranges):
        rng = np.random.default_rng([rank, step, number])
        LAYOUT.view(flat, place.name)[...] = rng.standard_normal(place.shape)
    return flat[BUCKET.start : BUCKET.stop].view(np.float32)
