"""A Synchronizer's replicas: given to all ranks, averaged and compared, so that they start alike and stay alike."""

from __future__ import annotations

import logging

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.comm.communicator import Communicator
from clcomm.comm.stats.now import count_step
from clcomm.sync.agreement import CHECKS, refused
from clcomm.sync.divergence import ReplicaGuard
from clcomm.sync.known_models import KnownModels
from clcomm.sync.model_ranks import refuse_mixing
from clcomm.sync.model_sync import ModelSync
from clcomm.sync.parameter_broadcast import average_parameters, broadcast_buffers, broadcast_parameters
from clcomm.sync.sample_weights import SampleWeights

#: Ranks of several libraries or kinds of device compare their replicas after the first step, and so often.
_MIXED_EVERY = 100
_log = logging.getLogger("clcomm")


class Replicas:
    """The replicas of all models that a Synchronizer has seen.

    Args:
        comm: the ranks, each with one replica of a model.
        models: finds a model's averaging.
        guard: compares the replicas.
    """

    def __init__(self, comm: Communicator, models: KnownModels, guard: ReplicaGuard):
        self._comm, self._models, self._guard = comm, models, guard

    def broadcast(self, model: object, root: int) -> None:
        """See `Synchronizer.broadcast_parameters`."""
        ours = self._unchanged(model)
        broadcast_parameters(self._comm, ours.space, root)
        self._guard.require_alike(ours.space)
        ours.is_alike, ours.local_steps = True, None  # a policy starts from these
        if ours.sharded_update is not None:
            ours.sharded_update.shard(ours.space)

    def broadcast_buffers(self, model: object, root: int) -> None:
        """See `Synchronizer.broadcast_buffers`."""
        ours = self._unchanged(model)
        broadcast_buffers(self._comm, ours.space, root)
        if ours.sharded_steps is not None:
            ours.sharded_steps.start_over()

    @refused
    def average(self, model: object, weights: SampleWeights) -> None:
        """See `Synchronizer.average_parameters`; weights: of which there may be none."""
        ours = self._unchanged(model)
        if ours.sharded_update is not None:
            raise ArgumentError(
                "average_parameters: expected a model without a DistributedOptimizer, which keeps the parameters alike "
                "in each step, got one with it"
            )
        self._models.settings.refuse_policy("average_parameters", "no call")
        self._models.settings.refuse_shards(
            "average_parameters", "no call", "which have the same parameters at every step"
        )
        if weights.in_join or ours.expected_weight is not None:
            call = "join() around it" if weights.in_join else "expect_samples() before it"
            raise ArgumentError(
                f"average_parameters: expected no {call}, as all ranks' parameters count alike, got one"
            )
        refuse_mixing(ours.space, "average_parameters", "whose backward adds up gradients of ranks that differ")
        average_parameters(self._comm, ours.space)

    def _unchanged(self, model: object) -> ModelSync:
        ours = self._models.of(model)
        ours.require_unchanged()
        return ours

    # --- comparisons ---

    def check(self, model: object, repairs: bool = False) -> None:
        """See `Synchronizer.check_replicas`; repairs: whatever `on_divergence` says, make the replicas alike."""
        ours = self._models.of(model)
        if ours.local_steps is not None:
            return  # ranks differ between a policy's outer steps
        if ours.sharded_update is not None:
            ours.sharded_update.require_same_settings()
        self._guard.check(ours.space, lambda root: self.broadcast(model, root), repairs=repairs)

    def check_all(self, ours: ModelSync, state: bool) -> None:
        """Compare frozen parameters too, and the attached optimizer's state; act as `check` does. Collective."""
        self._guard.check(ours.space, lambda root: self.broadcast(ours.space.model, root), True, state)

    def check_start(self, ours: ModelSync) -> None:
        """Compare the replicas before a model's first synchronisation, unless they are to differ; collective."""
        # Of a model whose gradients were reduced in backward, broadcast_parameters has divided the replicas.
        if self._models.settings.check_start and ours.space.arrays.grads.size:
            self._guard.check_start(ours.space, lambda root: self.broadcast(ours.space.model, root))
            if ours.shard_mean is None:
                self._expect_gradients(ours)
        ours.has_started = True

    def compare_settings(self, ours: ModelSync) -> None:
        """Compare what optimizers step with where that is new, unless ranks have those of several libraries."""
        if (new := ours.space.adapter.new_settings()) and not ours.space.has_several_libraries:
            ours.settings.compare(self._comm, new)

    def _expect_gradients(self, ours: ModelSync) -> None:
        """Log a warning where no rank has a gradient; collective."""
        counts = self._comm.all_gather(np.array([ours.space.adapter.has_gradients()], np.uint8), label=CHECKS)
        if not counts.any() and self._comm.rank == 0:
            _log.warning("sync_gradients: expected gradients, got none on any rank; call loss.backward() before it")

    def count_synchronisation(self, ours: ModelSync) -> None:
        """Note that a model's gradients were averaged, and compare the replicas where that is due."""
        ours.count_synchronisation()
        if count_step(id(ours)):
            self._comm.stats.steps.averaged(self._comm.communicated(), self._comm.stats.state)
        done, is_mixed = ours.synchronisations, ours.space.is_mixed
        every = self._guard.every or (_MIXED_EVERY if is_mixed else 0)
        if (every and done % every == 0) or (is_mixed and done == 2):
            self.check(ours.space.model, repairs=not self._guard.every)
