"""Error feedback: what a lossy scheme leaves out of one step is added to the next (Karimireddy et al., 2019)."""

from __future__ import annotations

import numpy as np

from clcomm.buckets import Bucket


class Feedback:
    """Each bucket's residual: what this rank wanted to send so far, less what it sent."""

    def __init__(self) -> None:
        self._residuals: dict[tuple[int, int, int], np.ndarray] = {}

    def corrected(self, gradient: np.ndarray, bucket: Bucket) -> np.ndarray:
        """Return a copy of the gradient with the bucket's residual added."""
        residual = self._residuals.get(_key(gradient, bucket))
        return gradient.copy() if residual is None else gradient + residual

    def keep(self, gradient: np.ndarray, bucket: Bucket, residual: np.ndarray) -> None:
        """Remember what was not sent; NaN and Inf are not carried on."""
        self._residuals[_key(gradient, bucket)] = np.nan_to_num(residual, copy=False, nan=0.0, posinf=0.0, neginf=0.0)

    def residual(self, gradient: np.ndarray, bucket: Bucket) -> np.ndarray:
        """Return what has not been sent yet; zeros before the first step."""
        return self._residuals.get(_key(gradient, bucket), np.zeros_like(gradient))


def _key(gradient: np.ndarray, bucket: Bucket) -> tuple[int, int, int]:
    """Return what tells a bucket from those of other models: where its gradient lies, which stays."""
    return gradient.__array_interface__["data"][0], bucket.start, bucket.stop


def mean_of_rows(rows: list[np.ndarray], out: np.ndarray) -> None:
    """Put the mean of the ranks' rows, summed in rank order, into `out`; only finished values are written there."""
    total = rows[0].astype(out.dtype)
    for row in rows[1:]:
        total += row
    total /= len(rows)
    np.copyto(out, total)
