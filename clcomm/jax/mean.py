"""The mean of gradients in buckets, as the Synchronizer computes it, from JAX's arrays to new ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from clcomm.base.flat_space.buckets import Bucket
from clcomm.base.flat_space.layout import FlatLayout
from clcomm.comm.communicator import Communicator
from clcomm.jax.ffi import Kind
from clcomm.jax.primitive import Collective
from clcomm.sync.adapters.adapter import CopyingAdapter, FlatArrays
from clcomm.sync.adapters.jax import narrow, spec_of, widen
from clcomm.sync.agreement import require_agreement
from clcomm.sync.bucket_plan import BucketPlan, PlanSettings


class GradientMean(CopyingAdapter):
    """The mean of arrays of these names, shapes and dtypes; its memory is allocated by the first call.

    Equal ones are one, so that programs share it. MismatchError on every rank where the ranks' differ.
    """

    name = "sync"

    def __init__(self, comm: Communicator, bucket_size: int, arrays: Sequence[tuple[str, Any]]):
        self._comm, self._bucket_size = comm, bucket_size
        self.layout = FlatLayout([spec_of(name, array, "gradient") for name, array in arrays])
        self._names = [name for name, _ in arrays]
        self._key = comm, bucket_size, tuple((name, each.shape, str(each.dtype)) for name, each in arrays)
        self._plan: BucketPlan | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GradientMean) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def results(self, operands: Sequence[Any]) -> list[Kind]:
        return [(each.shape, each.dtype) for each in operands]

    def transposed(self) -> Collective:
        return self

    def run(self, operands: list[np.ndarray], results: list[np.ndarray]) -> None:
        if self._plan is None:
            self._plan = self._planned()
        self._operands, self._results = (dict(zip(self._names, each, strict=True)) for each in (operands, results))
        self._plan.run()
        self._operands = self._results = {}

    def _planned(self) -> BucketPlan:
        comm, span = self._comm, self.layout.span
        lines = [f"{place.name} of shape {place.shape} and {place.dtype}" for place in self.layout.ranges]
        require_agreement(
            comm, "gradients", [*lines, f"buckets of {self._bucket_size} bytes"], "give all the same tree"
        )
        comm.fold_on_cpu()
        grads = comm.allocate(span)
        self.arrays = FlatArrays(np.empty(0, np.uint8), grads, grads if comm.size == 1 else comm.allocate_common(span))
        views = (self.arrays.grads, self.arrays.reduced)
        self._own, self._mean = ({n: self.layout.view(each, n) for n in self._names} for each in views)
        return BucketPlan.agreed(comm, self, PlanSettings(self._bucket_size), None)

    # --- what a BucketPlan needs ---

    @property
    def adapter(self) -> GradientMean:
        """The copies between arrays and flat memory."""
        return self

    def pull_gradients(self, bucket: Bucket) -> None:
        for place in bucket.opening:
            np.copyto(self._own[place.name], widen(self._operands[place.name]))

    def push_gradients(self, bucket: Bucket) -> None:
        for place in bucket.closing:
            result = self._results[place.name]
            np.copyto(result, narrow(self._mean[place.name], result.dtype))
