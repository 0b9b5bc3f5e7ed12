"""The order of an optimizer's state: that of its flat space, which another job's may not have.

A flat space has the order in which its first user gave the parameters: that of an optimizer over a list may be another
than that of one over the model. A state names its parameters; who loads it brings it into an order of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from clcomm.errors import ArgumentError
from clcomm.flat_space.layout import FlatLayout
from clcomm.flat_space.parameters import ParameterRange, ParameterSpec
from clcomm.optim.checks import GROUPS, MISSED
from clcomm.optim.flat_state import ITEM

#: The entries with the parameters' names and numbers of elements, in the order of the state.
NAMES, SIZES = "names", "sizes"
_SHOWN = 3  # names in a message


def order_of(layout: FlatLayout) -> dict[str, np.ndarray]:
    """Return the entries of a state of this layout."""
    sizes = [place.spec.size for place in layout.ranges]
    return {NAMES: np.array([place.name for place in layout.ranges], np.str_), SIZES: np.array(sizes, np.int64)}


def in_order_of(
    layout: FlatLayout, given: Sequence[str], state: Mapping[str, np.ndarray], buffers: Sequence[str]
) -> dict[str, np.ndarray]:
    """Return a state in the order of a layout.

    Args:
        given: the names of the layout's parameters in the order in which the optimizer was given them.
        state: with the entries of `order_of`.
        buffers: the names of its flat buffers; one of another length stays as it is.

    Raises:
        ArgumentError: for other parameters.
    """
    ours = FlatLayout([ParameterSpec(place.name, (place.spec.size,)) for place in reversed(layout.ranges)])
    theirs = _layout_of(state)
    source = _named(ours, theirs, given)
    for place in ours.ranges:
        if place.spec.size != source[place.name].spec.size:
            raise ArgumentError(
                f"state_dict: expected {place.spec.size} elements of parameter {place.name}, got "
                f"{source[place.name].spec.size}; give the optimizer the parameters of the job that saved it"
            )
    loaded = dict(state)
    if [source[place.name] for place in ours.ranges] == list(theirs.ranges):
        return loaded
    for name in buffers:
        values = np.asarray(state[name])
        if values.shape == (ours.span // ITEM,):
            moved = loaded[name] = np.zeros_like(values)
            for place in ours.ranges:
                start = source[place.name].start // ITEM
                moved[place.start // ITEM : place.stop // ITEM] = values[start : start + place.spec.size]
    at = {place.name: index for index, place in enumerate(theirs.ranges)}
    for name in {GROUPS, MISSED} & state.keys():
        if np.shape(state[name]) == (len(at),):
            loaded[name] = np.asarray(state[name])[[at[source[place.name].name] for place in ours.ranges]]
    return loaded


def _layout_of(state: Mapping[str, np.ndarray]) -> FlatLayout:
    names, sizes = np.asarray(state[NAMES]), np.asarray(state[SIZES])
    if names.ndim != 1 or names.dtype.kind != "U" or len(set(names.tolist())) != len(names):
        raise ArgumentError(f"state_dict[{NAMES!r}]: expected the parameters' different names, got {names}")
    if sizes.shape != names.shape or sizes.dtype.kind not in "iu" or not (sizes >= 0).all():
        raise ArgumentError(f"state_dict[{SIZES!r}]: expected a number of elements for each name, got {sizes}")
    pairs = zip(names.tolist(), sizes.tolist(), strict=True)
    return FlatLayout([ParameterSpec(name, (size,)) for name, size in reversed(list(pairs))])


def _named(ours: FlatLayout, theirs: FlatLayout, given: Sequence[str]) -> dict[str, ParameterRange]:
    """Return each parameter's place in a state: by its name or, where one side has none, by its number."""
    by_name = {place.name: place for place in theirs.ranges}
    names = {place.name for place in ours.ranges}
    if by_name.keys() == names:
        return by_name
    numbers = {str(index) for index in range(len(names))}
    if len(by_name) == len(given) == len(names) and numbers in (names, by_name.keys()):
        return dict(zip(given, reversed(theirs.ranges), strict=True))
    raise ArgumentError(
        f"state_dict[{NAMES!r}]: expected {_some(names)}, got {_some(by_name)}; "
        "give the optimizer the parameters of the job that saved it"
    )


def _some(names: Collection[str]) -> str:
    first, count = sorted(names)[:_SHOWN], len(names)
    return ", ".join(first) + (f" and {count - _SHOWN} more" if count > _SHOWN else "")
