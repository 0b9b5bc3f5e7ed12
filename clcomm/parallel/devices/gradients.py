"""The mean of the gradients of replicas on several devices of one process, and of those of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.missing import Beginnings
from clcomm.base.host.arrays import aligned_zeros
from clcomm.comm.transport.reduction import prepared_reduction
from clcomm.engine.flat import FlatSpace
from clcomm.sync.synchronizer import Synchronizer
from clcomm.sync.uneven_inputs import apply_weight, weight_of


class GradientMean:
    """Replaces the gradients in flat spaces by their mean: over the devices in their order, then over the ranks.

    The flat spaces move onto host arrays. The mean has one array, which all devices that compute in the host's memory
    read in place, as ranks of a host do.

    Args:
        spaces: one of each device, of one layout.
        model: the module whose flat space is the first.
        synchronizer: averages over ranks; None: there are no others.
    """

    def __init__(self, spaces: Sequence[FlatSpace], model: object = None, synchronizer: Synchronizer | None = None):
        self._spaces, self._model, self._synchronizer = tuple(spaces), model, synchronizer
        first, span = spaces[0], spaces[0].layout.span
        if synchronizer is None:
            # The mean has memory of its own: other devices may still read it when the first one's next backward writes.
            self._grads, self._mean = aligned_zeros(span), aligned_zeros(span)
            first.rebind(aligned_zeros(span), self._grads, self._mean)
        else:
            arrays = synchronizer.models.of(model).space.arrays
            self._grads, self._mean = arrays.grads, arrays.reduced
        rows = [self._grads]
        for space in spaces[1:]:
            rows.append(aligned_zeros(span))
            space.rebind(aligned_zeros(span), rows[-1], self._mean)
        self._names, self._beginnings = {each.name for each in first.layout.ranges}, Beginnings(first.layout.ranges)
        self._rows = [row.view(np.float32) for row in rows]
        total = self._rows[0] if synchronizer is not None else self._mean.view(np.float32)
        self._fold: Callable[[], None] = prepared_reduction(self._rows, total, "mean")

    def run(self, samples: Sequence[float] | None) -> None:
        """Average; a gradient that only some devices have counts as zero on the others.

        samples: how many each device's gradient is the mean of; None: equally many.
        """
        first, *others = self._spaces
        if not first.reduces_into(self._mean):
            raise ArgumentError(
                "param_replicas: expected the first device's gradients where prepare_replicas put them, got them moved "
                "by another Synchronizer; give that to prepare_replicas"
            )
        for space in self._spaces:
            space.moves.pull(0, space.layout.span)
        for row, weight in zip(self._rows, _weights(samples, len(self._rows)), strict=True):
            apply_weight(row, weight)
        if others or self._synchronizer is None:
            self._fold()
        if self._synchronizer is None:
            first.moves.push(0, first.layout.span)
        else:
            first.moves.push_own(self._names - self._beginnings.missing(self._grads))
            total = sum(samples) if samples is not None else len(self._rows)
            self._synchronizer.sync_gradients(self._model, samples=total)
        for space in others:
            space.moves.push(0, space.layout.span)


def _weights(samples: Sequence[float] | None, count: int) -> list[float]:
    """Return the factors that make the mean over devices the mean over samples: 1.0 where all have equally many."""
    if samples is None:
        return [1.0] * count
    return [weight_of(each, count, sum(samples)) for each in samples]
