"""The weights of ranks with uneven inputs: of how many samples each rank's gradient is the mean, and who has none left.

They are given before backward (`expect`), with the synchronisation, or within a `join`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from clcomm.base.errors import ArgumentError
from clcomm.sync.agreement import refused
from clcomm.sync.model_ranks import (
    gradient_weight,
    mixes_ranks,
    mixing_weight,
    refuse_mixing,
    require_equal_samples,
    total_inputs,
)
from clcomm.sync.model_sync import ModelSync


@refused
def expect(ours: ModelSync, samples: float, of: float | None) -> None:
    """See `Synchronizer.expect_samples`."""
    _refuse_unweighable(ours)
    if ours.models.in_join:
        raise ArgumentError("expect_samples: expected no join() around it, where ranks may have no samples, got one")
    weight_of = mixing_weight if mixes_ranks(ours.space) else gradient_weight
    _weigh(ours, weight_of(ours.comm, samples, of))


@refused
def take(ours: ModelSync, samples: float | None, of: float | None) -> float:
    """Return the factor of a synchronisation that was expected, or else of these samples, which a join asks for."""
    if ours.expected_weight is not None:
        if samples is not None:
            raise ArgumentError(f"samples: expected None after expect_samples(), got {samples!r}")
        expected = ours.expected_weight
        _weigh(ours, None)
        return expected
    if samples is None:
        raise ArgumentError("samples: expected this rank's number of samples within join(), got None")
    _refuse_unweighable(ours)
    if mixes_ranks(ours.space):
        require_equal_samples(ours.comm, samples)
    return gradient_weight(ours.comm, samples, of, in_join=ours.models.in_join)


@contextmanager
def join(ours: ModelSync, take_part: Callable[[], object]) -> Iterator[None]:
    """Call `take_part` after the block as often as other ranks synchronise; after an exception not at all."""
    _enter_join(ours)
    try:
        yield
        while total_inputs(ours.comm, None).ranks:
            take_part()
    finally:
        ours.models.in_join = False


@refused
def _enter_join(ours: ModelSync) -> None:
    if ours.models.in_join:
        raise ArgumentError("join: expected to be entered once, got a join() within another")
    _refuse_unweighable(ours)
    refuse_mixing(ours.space, "join", "whose statistics are of all ranks' batches")
    ours.models.in_join = True


def _weigh(ours: ModelSync, weight: float | None) -> None:
    """Let this rank's gradients count `weight` times, from this step's first backward on; None: as any rank's."""
    ours.expected_weight = weight
    model: Any = ours.space.model
    for layer in ours.space.mixing_layers():
        layer.weigh(1.0 if weight is None else weight, next(model.parameters()).device)


def _refuse_unweighable(ours: ModelSync) -> None:
    """Exclude overlap, and raise ArgumentError where gradients are reduced before they could be weighed."""
    ours.models.refuse("samples: expected None", ours=ours)
    if ours.settings.overlap:
        ours.models.use(ours.settings.changed(overlap=False))
