"""The parts of parameters that a rank holds, and an optimizer's state of them in the form of the whole model's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from clcomm.base.flat_space.layout import FlatLayout
from clcomm.base.flat_space.parameters import ParameterRange, ParameterSpec
from clcomm.comm.communicator import Communicator
from clcomm.engine.parameter import Parameter
from clcomm.optim.optimizer import Optimizer

#: The label under which the Communicator's stats count gathered and broadcast parameters.
PARAMETERS = "parameters"
#: Bytes of an element of the state.
_ITEM = 4


@dataclass(frozen=True)
class Cut:
    """The cut of a parameter along dimension `axis`, in each of `sections` equal sections of it by itself.

    Queries, keys and values beside each other in one layer are three sections.
    """

    axis: int = 0
    sections: int = 1


class Shard:
    """Rank `comm.rank`'s part of a parameter: a `clcomm.engine.parameter.ParameterPart`."""

    def __init__(self, cut: Cut, comm: Communicator):
        self.cut, self.comm = cut, comm

    def __deepcopy__(self, memo: dict[int, object]) -> Shard:
        return self

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        axis = self.cut.axis
        return (*shape[:axis], shape[axis] * self.comm.size, *shape[axis + 1 :])

    def own(self, whole: np.ndarray) -> np.ndarray:
        axis, each = self.cut.axis, np.split(whole, self.cut.sections, self.cut.axis)
        return np.concatenate([np.split(section, self.comm.size, axis)[self.comm.rank] for section in each], axis)

    def gather(self, part: np.ndarray) -> np.ndarray:
        axis = self.cut.axis
        parts = self.comm.all_gather(np.ascontiguousarray(part), label=PARAMETERS)
        sections = zip(*(np.split(each, self.cut.sections, axis) for each in parts), strict=True)
        return np.concatenate([each for section in sections for each in section], axis)

    @property
    def ranks(self) -> int:
        return self.comm.size

    def gather_numbers(self, own: np.ndarray) -> np.ndarray:
        return self.comm.all_gather(own, label=PARAMETERS)


class Shards:
    """This rank's parameters in place of whole ones; those that several layers share stay one."""

    def __init__(self, comm: Communicator):
        self.comm = comm
        self._made: dict[int, tuple[Parameter, Parameter]] = {}  # by the whole one's id, which is kept

    def of(self, whole: Parameter, cut: Cut) -> Parameter:
        """Return this rank's part of a parameter."""
        found = self._made.get(id(whole))
        if found is None:
            shard = Shard(cut, self.comm)
            part = Parameter(np.ascontiguousarray(shard.own(whole.numpy())), whole.device, whole.requires_grad)
            part.part = shard
            found = self._made[id(whole)] = whole, part
        return found[1]


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
    return {**state, **inner.order_in(whole)}


def divided_state(optimizer: object, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return this rank's parts of a `gathered_state`, for `load_state_dict`.

    Entries that do not fit the whole model stay unchanged, for `load_state_dict` to refuse. Raises ArgumentError for
    other parameters.
    """
    inner, own = _divided(optimizer), dict(state)
    if inner is None:
        return own
    whole = _whole_layout(inner)
    if not {*inner.order_in(whole), *inner.state_names} <= own.keys():
        return own
    state = own = inner.in_own_order(state, whole)
    for name in inner.state_names:
        if np.shape(state[name]) == (whole.span // _ITEM,):
            values = np.zeros(inner.space.layout.span // _ITEM, np.float32)
            for place, parameter in _places(inner):
                full = _view(whole, np.asarray(state[name], np.float32), place.name)
                part = full if parameter.part is None else parameter.part.own(full)
                values[_elements(place)] = part.reshape(-1)
            own[name] = values
    return {**own, **inner.order_in(inner.space.layout)}


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
