"""An optimizer's state of one rank's stages, and that of the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.layout import FlatLayout
from clcomm.base.flat_space.parameters import ParameterSpec
from clcomm.comm.communicator import Communicator
from clcomm.optim.flat_state import ITEM
from clcomm.optim.order import NAMES, SIZES, order_of
from clcomm.parallel.tensor_parallel.shards import divided_state, gathered_state

_STATE = "optimizer state"


def whole_state(comm: Communicator, names: Iterable[str], optimizer: Any) -> dict[str, np.ndarray]:
    """Return the state that the optimizer of the whole model would have, on every rank; collective.

    Args:
        comm: the ranks of the stages.
        names: of the whole model's parameters, in its order; those that are not trained may be among them.
        optimizer: of this rank's parameters.
    """
    state, buffers = gathered_state(optimizer), _buffers(optimizer)
    own = {name: [size, *(state[kind][at] for kind in buffers)] for name, (at, size) in _places(state).items()}
    everyone = comm.all_gather_object(own, label=_STATE)
    found = {name: values for part in reversed(everyone) for name, values in part.items()}
    return {**state, **_laid_out(found, [name for name in names if name in found], buffers)}


def own_state(optimizer: Any, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return this rank's part of a whole model's state, for the optimizer's `load_state_dict`.

    Raises ArgumentError for a state without this rank's parameters.
    """
    buffers = [name for name in _buffers(optimizer) if name in state]
    places = _places(state) if {NAMES, SIZES} <= state.keys() else {}
    inner = getattr(optimizer, "optimizer", optimizer)
    own = [place.name for place in reversed(inner.space.layout.ranges)]
    missing = [name for name in own if name not in places]
    if missing:
        raise ArgumentError(f"state_dict: expected the whole model's parameters, got none named {missing[0]}")
    parts: dict[str, list[Any]] = {}
    for name in own:
        at, size = places[name]
        parts[name] = [size, *(np.asarray(state[kind])[at] for kind in buffers)]
    return divided_state(optimizer, {**state, **_laid_out(parts, own, buffers)})


def _buffers(optimizer: Any) -> Sequence[str]:
    names: Sequence[str] = getattr(optimizer, "optimizer", optimizer).state_names
    return names


def _places(state: Mapping[str, np.ndarray]) -> dict[str, tuple[slice, int]]:
    """Return where each parameter's elements are in a state's buffers, and their number."""
    pairs = list(zip(state[NAMES].tolist(), state[SIZES].tolist(), strict=True))
    layout = FlatLayout([ParameterSpec(name, (size,)) for name, size in reversed(pairs)])
    return {place.name: (slice(place.start // ITEM, place.stop // ITEM), place.spec.size) for place in layout.ranges}


def _laid_out(
    parts: Mapping[str, Sequence[Any]], names: Sequence[str], buffers: Sequence[str]
) -> dict[str, np.ndarray]:
    """Return the buffers of parameters in a model's order, and the entries that tell it.

    parts: the number of elements of each parameter, and then those of each buffer.
    """
    layout = FlatLayout([ParameterSpec(name, (parts[name][0],)) for name in names])
    state = order_of(layout, range(len(names) - 1, -1, -1))
    for number, kind in enumerate(buffers, 1):
        values = state[kind] = np.zeros(layout.span // ITEM, np.float32)
        for place in layout.ranges:
            values[place.start // ITEM : place.stop // ITEM] = parts[place.name][number]
    return state
