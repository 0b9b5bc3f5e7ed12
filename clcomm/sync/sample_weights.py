"""The weights of ranks with uneven inputs: of how many samples each rank's gradient is the mean, and who has none left.

They are given before backward (`expect`), with the synchronisation, or within a `join`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from clcomm.base.errors import ArgumentError
from clcomm.comm.communicator import Communicator
from clcomm.sync.agreement import refused
from clcomm.sync.hooks import AdasumHook
from clcomm.sync.known_models import KnownModels
from clcomm.sync.model_ranks import (
    gradient_weight,
    mixes_ranks,
    mixing_weight,
    refuse_mixing,
    require_equal_samples,
    total_inputs,
)


class SampleWeights:
    """The factors for this rank's gradients of a Synchronizer's models.

    Attributes:
        in_join: whether ranks may run out of batches.
    """

    def __init__(self, comm: Communicator, models: KnownModels):
        self._comm, self._models = comm, models
        self.in_join = False

    @refused
    def expect(self, model: Any, samples: float, of: float | None) -> None:
        """Set the factor of a step before its backward; see `Synchronizer.expect_samples`."""
        self._refuse_unweighable(model)
        if self.in_join:
            raise ArgumentError(
                "expect_samples: expected no join() around it, where ranks may have no samples, got one"
            )
        weight_of = mixing_weight if mixes_ranks(self._models.of(model).space) else gradient_weight
        self._weigh(model, weight_of(self._comm, samples, of))

    @refused
    def take(self, model: object, samples: float | None, of: float | None) -> float:
        """Return the factor of a synchronisation that was expected, or else of these samples, which a join asks for."""
        ours = self._models.of(model)
        if ours.expected_weight is not None:
            if samples is not None:
                raise ArgumentError(f"samples: expected None after expect_samples(), got {samples!r}")
            expected = ours.expected_weight
            self._weigh(model, None)
            return expected
        if samples is None:
            raise ArgumentError("samples: expected this rank's number of samples within join(), got None")
        self._refuse_unweighable(model)
        if mixes_ranks(ours.space):
            require_equal_samples(self._comm, samples)
        return gradient_weight(self._comm, samples, of, in_join=self.in_join)

    @contextmanager
    def join(self, model: object, take_part: Callable[[], object]) -> Iterator[None]:
        """Call `take_part` after the block as often as other ranks synchronise; after an exception not at all."""
        self._enter_join(model)
        try:
            yield
            while total_inputs(self._comm, None).ranks:
                take_part()
        finally:
            self.in_join = False

    @refused
    def _enter_join(self, model: object) -> None:
        if self.in_join:
            raise ArgumentError("join: expected to be entered once, got a join() within another")
        self._refuse_unweighable(model)
        refuse_mixing(self._models.of(model).space, "join", "whose statistics are of all ranks' batches")
        self.in_join = True

    @refused
    def refuse_any(self, samples: float | None, of: float | None) -> None:
        """Raise ArgumentError for a step whose gradients would be weighed, with a policy."""
        if samples is not None or of is not None or self.in_join:
            self._models.settings.refuse_policy("samples", "None")

    def _weigh(self, model: Any, weight: float | None) -> None:
        """Let this rank's gradients count `weight` times, from this step's first backward on; None: as any rank's."""
        ours = self._models.of(model)
        ours.expected_weight = weight
        for layer in ours.space.mixing_layers():
            layer.weigh(1.0 if weight is None else weight, next(model.parameters()).device)

    def _refuse_unweighable(self, model: object) -> None:
        """Exclude overlap, and raise ArgumentError where gradients are reduced before they could be weighed."""
        settings = self._models.settings
        if settings.overlap is True or any(each.overlaps for each in self._models):
            raise ArgumentError(
                "samples: expected None with overlap, where gradients are on their way before they could be weighed; "
                "use overlap=False"
            )
        settings.refuse_shards("samples", "None", "all of which count alike")
        settings.refuse_policy("samples", "None")
        if isinstance(settings.hook, AdasumHook):
            raise ArgumentError("samples: expected None with combination='adasum', which is no mean over samples")
        if settings.zero > 1 and self._models.of(model).sharded_update is not None:
            raise ArgumentError(
                f"samples: expected None with zero={settings.zero}, which reduces gradients during backward, before "
                "they could be weighed; use zero=1"
            )
        if settings.overlap:
            self._models.use(replace(settings, overlap=False))
