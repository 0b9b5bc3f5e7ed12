"""What a variant's run measured, and how it compares with the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clcomm.comm.costs.estimates import Estimate, estimate
from training.comparison.variants import PER_TENSOR, Variant
from training.result import Result
from training.session import Session


@dataclass(frozen=True)
class Timing:
    """A variant's figures with their confidence intervals over windows.

    `ratio` is the time of its step over the reference's, `alone_ratio` its `alone_s` over the reference's. Ratios are
    taken between windows of one round, so that what slows down a whole round cancels out.
    """

    step_s: Estimate
    communication_s: Estimate
    images_per_s: Estimate
    ratio: Estimate
    alone_s: Estimate
    alone_ratio: Estimate

    @property
    def communication_share(self) -> float:
        return self.communication_s.median / self.step_s.median


@dataclass(frozen=True)
class Outcome:
    """A variant's finished run: its bucket plan in bytes, its transports, and its figures by window, shape (windows,).

    `images` are those of all ranks in a step. Windows in which "auto" was still trying sizes are NaN.
    `alone_s` is the time of a step's reductions with nothing between them, so that no rank waits for another's
    computation; it has windows of its own. NaN in a world of one.
    """

    variant: Variant
    buckets: tuple[int, ...]
    moved_by: str
    session: Session
    result: Result
    step_s: np.ndarray
    communication_s: np.ndarray
    images: np.ndarray
    alone_s: np.ndarray

    @property
    def bucket_size(self) -> int | None:
        """The largest bucket in bytes, the chosen one with "auto"; None: each tensor on its own."""
        return self.result.bucket_size if isinstance(self.variant.bucket_size, str) else self.variant.bucket_size

    def timing(self, reference: Outcome) -> Timing:
        """Return the figures with their intervals, and the ratios to another outcome of the same rounds."""
        figures = (
            self.step_s, self.communication_s, self.step_s / reference.step_s, self.alone_s,
            self.alone_s / reference.alone_s,
        )  # fmt: skip
        step_s, communication_s, *ratios = (estimate(values[np.isfinite(values)]) for values in figures)
        images = self.images[np.isfinite(self.images)]
        return Timing(
            step_s, communication_s, step_s.rate_of(float(images.mean()) if images.size else math.nan), *ratios
        )


def reference_of(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome that the others are compared with: per tensor."""
    return next(outcome for outcome in outcomes if outcome.variant.name == PER_TENSOR)
