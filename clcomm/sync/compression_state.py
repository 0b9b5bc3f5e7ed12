"""What a compression keeps of a model from step to step, such as residuals: written to checkpoints and read back."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from clcomm.sync import between_hosts
from clcomm.sync.compression import CommHook, StatefulHook
from clcomm.sync.known_models import KnownModels
from clcomm.sync.model_sync import ModelSync
from clcomm.sync.shared_space import SharedSpace


def state_of(known: KnownModels, model: object) -> dict[str, np.ndarray]:
    """Return what the models' hook keeps on this rank for one of them, by name; empty where it keeps nothing.

    Collective for a model not seen yet, where the hook keeps anything.
    """
    hook = known.hook
    if not isinstance(hook, StatefulHook) or (gradients := _gradients_of_hook(known.of(model), hook)) is None:
        return {}
    return hook.state_of(gradients)


def load_state(known: KnownModels, model: object, state: Mapping[str, np.ndarray]) -> None:
    """Let the hook continue from this rank's `state_of`; ArgumentError, with nothing changed, for another model's."""
    hook = known.hook
    if isinstance(hook, StatefulHook):
        ours = known.of(model)
        check_state(hook, ours.space, state)
        gradients = _gradients_of_hook(ours, hook)
        if state and gradients is not None:
            hook.load_state_of(gradients, dict(state))


def check_state(hook: StatefulHook | CommHook | None, space: SharedSpace, state: Mapping[str, np.ndarray]) -> None:
    """Raise ArgumentError for a state that `state_of` cannot have returned for this hook and model."""
    check = getattr(hook, "check_state", None)
    if state and check is not None:
        check(space.layout, state)


def _gradients_of_hook(ours: ModelSync, hook: StatefulHook) -> np.ndarray | None:
    """Return the flat gradients of which a hook gets parts; None where it is never called on this rank."""
    comm, arrays = ours.comm, ours.space.arrays
    if not between_hosts.is_for(comm, hook, arrays.grads, arrays.reduced):
        return arrays.grads
    return None if comm.local_rank else arrays.reduced
