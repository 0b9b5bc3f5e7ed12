"""Steps of a policy: ranks average no gradients, and exchange parameters after the optimizer's steps that are due."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.comm.communicator import Communicator
from clcomm.comm.stats.now import count_step
from clcomm.sync.agreement import refused
from clcomm.sync.known_models import KnownModels
from clcomm.sync.model_ranks import ModelRanks, is_divided, refuse_mixing
from clcomm.sync.model_sync import ModelSync
from clcomm.sync.policies.parameters import ModelParameters
from clcomm.sync.policies.policy import LocalSteps, Policy, load_state, saved_state
from clcomm.sync.replicas import Replicas


class PolicySteps:
    """The policy of a Synchronizer's models; every method does nothing without one.

    Args:
        comm: the ranks.
        models: finds a model's averaging.
        replicas: compares the ranks' models before the first step.
    """

    def __init__(self, comm: Communicator, models: KnownModels, replicas: Replicas):
        self._comm, self._models, self._replicas = comm, models, replicas

    @property
    def policy(self) -> Policy | None:
        """The policy; None: gradients are averaged in each step."""
        return self._models.settings.policy

    @refused
    def gradients_ready(self, model: object) -> None:
        """Note that a step's gradients are complete, which this rank's optimizer uses as they are.

        Raises ArgumentError where `finish_step` has not followed the step before.
        """
        ours = self._models.of(model)
        ours.require_unchanged()
        if ours.local_steps is None:
            refuse_mixing(ours.space, "policy", "whose backward adds up gradients of ranks that differ")
            if is_divided(ours.space) or ModelRanks.of(ours.space).stages is not None:
                raise ArgumentError(
                    "policy: expected a model that each rank has whole, as codes and clipping look at a rank's numbers "
                    "alone, got one that tensor-parallel ranks or stages divide"
                )
            if not ours.has_started:
                self._replicas.check_start(ours)
            self._start(ours)
        elif ours.is_in_step:
            raise ArgumentError(
                "sync_gradients: expected finish_step(model) after the optimizer's step, which the policy counts, got "
                "two steps without it"
            )
        ours.is_in_step = True

    @refused
    def finish_step(self, model: object) -> None:
        """Take the outer step that is due after the optimizer's; collective then. Raises ArgumentError before any."""
        if self.policy is not None:
            steps, ours = self._steps_of(model, "finish_step"), self._models.of(model)
            ours.is_in_step = False
            steps.step_finished()
            if count_step(id(ours)):
                self._comm.stats.steps.averaged(self._comm.communicated(), self._comm.stats.state)

    def align(self, model: object) -> None:
        """Give all ranks the same parameters; collective."""
        if self.policy is not None and self._models.of(model).local_steps is not None:
            self._steps_of(model, "align_parameters").align()

    def state_of(self, model: object) -> dict[str, np.ndarray]:
        """Return what this rank keeps for a model, its parameters too; empty before the first step."""
        steps = self._models.of(model).local_steps
        return {} if steps is None else saved_state(steps)

    @refused
    def load_state(self, model: object, state: Mapping[str, np.ndarray]) -> None:
        """Go on from a `state_of`; collective. Raises ArgumentError, changing nothing, for another model's."""
        ours = self._models.of(model)
        if state:
            load_state(ours.local_steps or self._start(ours), state)

    def _start(self, ours: ModelSync) -> LocalSteps:
        space = ours.space
        assert self.policy is not None
        parameters = ModelParameters(
            space.layout, lambda: space.arrays.params, space.adapter.pull_parameters, space.adapter.push_parameters
        )
        ours.local_steps = steps = self.policy.start(self._comm, parameters)
        return steps

    def _steps_of(self, model: object, call: str) -> LocalSteps:
        ours = self._models.of(model)
        if ours.local_steps is None:
            raise ArgumentError(f"{call}: expected sync_gradients(model) before it, as in every step, got none")
        ours.require_unchanged()
        return ours.local_steps
