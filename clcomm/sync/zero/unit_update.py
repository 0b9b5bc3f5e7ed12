"""Stages 2 and 3: a rank has a part of every unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

import numpy as np

from clcomm.base.flat_space.shards import ShardPlan
from clcomm.sync.shared_space import SharedSpace
from clcomm.sync.synchronizer import Synchronizer
from clcomm.sync.zero.gradient_shards import GradientShards
from clcomm.sync.zero.parameter_shards import updated_parameters
from clcomm.sync.zero.update import Update


class UnitUpdate(Update):
    """This rank's part of every unit of a flat space: stages 2 and 3."""

    def __init__(self, sync: Synchronizer, space: SharedSpace, plan: ShardPlan):
        super().__init__(sync.comm, space)
        self.plan = plan
        self._parameters = updated_parameters(sync.comm, space, plan, sync.models.settings.zero)
        self._shards = GradientShards(sync.comm, space, plan, sync.models.settings.check_finite)
        self.gradients, self.params = self._shards.buffer, self._parameters.buffer
        sync.comm.barrier()

    def memory(self) -> tuple[int, int, int]:
        in_flight = self._shards.in_flight_nbytes + self._parameters.in_use_nbytes
        return self._parameters.nbytes, self._shards.values.nbytes, in_flight

    def reduce(self, weight: float) -> None:
        self._shards.complete()
        self.upload()

    def named_parts(self) -> Iterator[tuple[str, np.ndarray]]:
        return self._shards.named_parts()

    def upload(self) -> None:
        self._shards.upload()

    def is_finite(self) -> bool:
        return bool(np.isfinite(self._shards.values).all())

    def raise_non_finite(self) -> NoReturn:
        self._shards.raise_non_finite()

    def follow(self, completed: Sequence[str]) -> None:
        self._shards.follow(completed)

    def begin_update(self, is_clipped: bool) -> None:
        self._parameters.begin_update()

    def gather(self) -> None:
        self._parameters.end_update()
        self._shards.finish_step()
