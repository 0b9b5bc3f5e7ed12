"""Optimizer state of divided parameters, in the form of the whole model's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from clcomm.engine.parameter import Parameter
from clcomm.flat_space.layout import FlatLayout
from clcomm.flat_space.parameters import ParameterRange, ParameterSpec
from clcomm.optim.optimizer import Optimizer

#: Bytes of an element of the state.
_ITEM = 4


def gathered_state(optimizer: Any) -> dict[str, np.ndarray]:
    """Return the `state_dict()` that the optimizer of the undivided model would have; collective.

    Args:
        optimizer: of `clcomm.optim`, or a DistributedOptimizer of one; another library's, or one of parameters that are
            not divided, gives its own state.
    """
    state, inner = dict(optimizer.state_dict()), _divided(optimizer)
    if inner is None:
        return state
    whole = _whole_layout(inner)
    for name in inner.state_names:
        values = np.zeros(whole.span // _ITEM, np.float32)
        for place, parameter in _places(inner):
            own = state[name][_elements(place)].reshape(place.shape)
            _view(whole, values, place.name)[...] = own if parameter.part is None else parameter.part.gather(own)
        state[name] = values
    return state


def divided_state(optimizer: object, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return this rank's parts of a `gathered_state` for `load_state_dict`, which refuses entries that do not fit."""
    inner, own = _divided(optimizer), dict(state)
    if inner is None:
        return own
    whole = _whole_layout(inner)
    for name in inner.state_names:
        if name in state and np.shape(state[name]) == (whole.span // _ITEM,):
            values = np.zeros(inner.space.layout.span // _ITEM, np.float32)
            for place, parameter in _places(inner):
                full = _view(whole, np.asarray(state[name], np.float32), place.name)
                part = full if parameter.part is None else parameter.part.own(full)
                values[_elements(place)] = part.reshape(-1)
            own[name] = values
    return own


def _divided(optimizer: object) -> Optimizer | None:
    """Return the optimizer that updates divided parameters; None: there are none."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if isinstance(inner, Optimizer) and any(each.part is not None for each in inner.space.parameters):
        return inner
    return None


def _places(optimizer: Optimizer) -> list[tuple[ParameterRange, Parameter]]:
    return list(zip(optimizer.space.layout.ranges, optimizer.space.parameters, strict=True))


def _whole_layout(optimizer: Optimizer) -> FlatLayout:
    """Return the layout of the undivided model's flat space."""
    shapes = {
        place.name: place.shape if parameter.part is None else parameter.part.whole_shape(place.shape)
        for place, parameter in _places(optimizer)
    }
    layout = optimizer.space.layout
    specs = [ParameterSpec(spec.name, shapes[spec.name], spec.dtype) for spec in layout.specs]
    return FlatLayout(specs, layout.alignment)


def _elements(place: ParameterRange) -> slice:
    return slice(place.start // _ITEM, place.stop // _ITEM)


def _view(layout: FlatLayout, values: np.ndarray, name: str) -> np.ndarray:
    return layout.view(values.view(np.uint8), name)
