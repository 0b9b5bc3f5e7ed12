"""The batches that every system trains on: made once by the parent, read by every rank of every job.

B: images of a batch. Each system converts them to its own host tensors before it is measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from clcomm.base.host import variables
from clcomm.base.host.arrays import aligned_empty
from training.data.open_data import open_data

#: Batches a rank has; windows go round them.
COUNT = 8

Batch = tuple[np.ndarray, np.ndarray]


def default_data() -> str:
    """Return "mnist" where CLCOMM_DATA or ./data/mnist has it, else "synthetic"."""
    return "mnist" if variables.text("CLCOMM_DATA") or Path("data/mnist").is_dir() else "synthetic"


def write_batches(path: Path, data: str, ranks: int, size: int, report: Any) -> tuple[int, ...]:
    """Write COUNT batches of normalised float32 images and labels for each rank; return one image's shape."""
    train = open_data(data, report=report).train
    order = np.random.RandomState(0).permutation(len(train))
    indices = np.resize(order, (ranks, COUNT, size))
    images, labels = train.batch(indices.reshape(-1))
    np.savez(path, images=images.reshape(*indices.shape, *train.image_shape), labels=labels.reshape(indices.shape))
    return train.image_shape


def read_batches(path: str, rank: int) -> list[Batch]:
    """Return a rank's batches: images float32 (B, C, H, W) and labels int32 (B,)."""
    with np.load(path) as arrays:
        images, labels = arrays["images"][rank], arrays["labels"][rank]
    return [(aligned(x), aligned(y)) for x, y in zip(images, labels, strict=True)]


def aligned(values: np.ndarray) -> np.ndarray:
    """Return a page-aligned copy, as of the project's own loader; PyTorch uses it in place too."""
    copy = aligned_empty(values.shape, values.dtype)
    copy[...] = values
    return copy
