"""The parts of parameters that a rank holds, and an optimizer's state of them in the form of the whole model's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from clcomm.base.flat_space.layout import FlatLayout
from clcomm.base.flat_space.parameters import ParameterSpec
from clcomm.comm.communicator import Communicator
from clcomm.engine.parameter import Parameter
from clcomm.optim.flat_state import ITEM, NAMES, PLACES, SIZES, order_of
from clcomm.optim.optimizer import Optimizer

#: The label under which the Communicator's stats count gathered and broadcast parameters.
PARAMETERS = "parameters"


class Cut(NamedTuple):
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


#: Of each parameter by name: its number of elements, and those of each buffer of a state.
Elements = dict[str, tuple[int, list[np.ndarray]]]


def elements_of(state: Mapping[str, np.ndarray], buffers: Sequence[str]) -> Elements:
    """Return each parameter's part of a state's buffers; none of a state that does not name its parameters."""
    if not {NAMES, SIZES} <= state.keys():
        return {}
    pairs = list(zip(state[NAMES].tolist(), state[SIZES].tolist(), strict=True))
    layout = FlatLayout([ParameterSpec(name, (size,)) for name, size in reversed(pairs)])
    found: Elements = {}
    for place in layout.ranges:
        at = slice(place.start // ITEM, place.stop // ITEM)
        found[place.name] = place.spec.size, [np.asarray(state[kind])[at] for kind in buffers]
    return found


def laid_out(elements: Elements, buffers: Sequence[str]) -> dict[str, np.ndarray]:
    """Return a state's buffers and the entries that tell their order, which is that of `elements`."""
    layout = FlatLayout([ParameterSpec(name, (size,)) for name, (size, _) in reversed(elements.items())])
    state = order_of(layout, range(len(elements) - 1, -1, -1))
    for number, kind in enumerate(buffers):
        values = state[kind] = np.zeros(layout.span // ITEM, np.float32)
        for place in layout.ranges:
            values[place.start // ITEM : place.stop // ITEM] = elements[place.name][1][number]
    return state


def gathered_state(optimizer: Any) -> dict[str, np.ndarray]:
    """Return the `state_dict()` that the optimizer of the undivided model would have; collective.

    Args:
        optimizer: of `clcomm.optim`, or a DistributedOptimizer of one; another library's, or one of parameters that are
            not divided, gives its own state.
    """
    state, inner = dict(optimizer.state_dict()), _divided(optimizer)
    if inner is None:
        return state
    elements = elements_of(state, inner.state_names)
    for place, parameter in zip(inner.space.layout.ranges, inner.space.parameters, strict=True):
        if parameter.part is not None:
            part, (_, values) = parameter.part, elements[place.name]
            whole = [part.gather(each.reshape(place.shape)).reshape(-1) for each in values]
            elements[place.name] = math.prod(part.whole_shape(place.shape)), whole
    return {**state, **laid_out(elements, inner.state_names), PLACES: state[PLACES]}


def divided_state(optimizer: object, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return this rank's parts of a `gathered_state`, for `load_state_dict`.

    Entries that do not fit the whole model stay unchanged, for `load_state_dict` to refuse. Raises ArgumentError for
    other parameters.
    """
    inner, own = _divided(optimizer), dict(state)
    if inner is None:
        return own
    layout, parameters = inner.space.layout, inner.space.parameters
    shapes = {
        place.name: place.shape if each.part is None else each.part.whole_shape(place.shape)
        for place, each in zip(layout.ranges, parameters, strict=True)
    }
    whole = FlatLayout([ParameterSpec(spec.name, shapes[spec.name], spec.dtype) for spec in layout.specs])
    if not {*inner.order_in(whole), *inner.state_names} <= own.keys():
        return own
    own = inner.in_own_order(state, whole)
    fitting = [name for name in inner.state_names if np.shape(own[name]) == (whole.span // ITEM,)]
    elements = elements_of({**own, **inner.order_in(whole)}, fitting)
    for place, parameter in zip(layout.ranges, parameters, strict=True):
        if parameter.part is not None:
            cut = [parameter.part.own(each.reshape(shapes[place.name])) for each in elements[place.name][1]]
            elements[place.name] = place.spec.size, [each.reshape(-1) for each in cut]
    return {**own, **laid_out(elements, fitting), **inner.order_in(layout)}


def _divided(optimizer: object) -> Optimizer | None:
    """Return the optimizer that updates divided parameters; None: there are none."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if isinstance(inner, Optimizer) and any(each.part is not None for each in inner.space.parameters):
        return inner
    return None
