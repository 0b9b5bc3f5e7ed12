"""The order of an optimizer's state: that of its flat space, which another job's may not have.

A flat space has the order in which its first user gave the parameters: that of an optimizer over a list may be another
than that of one over the model. A state names its parameters; who loads it brings it into an order of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.layout import FlatLayout
from clcomm.base.flat_space.parameters import ParameterRange, ParameterSpec
from clcomm.optim.checks import GROUPS, MISSED
from clcomm.optim.flat_state import ITEM

#: The entries with the parameters' names, numbers of elements, and places in the optimizer's list.
NAMES, SIZES, PLACES = "names", "sizes", "places"
_SHOWN = 3  # names in a message


def order_of(layout: FlatLayout, places: Sequence[int]) -> dict[str, np.ndarray]:
    """Return the entries of a state of this layout.

    places: of its parameters among those that the optimizer was given, -1 for others.
    """
    names, sizes = [each.name for each in layout.ranges], [each.spec.size for each in layout.ranges]
    return {NAMES: np.array(names, np.str_), SIZES: np.array(sizes, np.int64), PLACES: np.array(places, np.int64)}


def in_order_of(
    layout: FlatLayout, places: Sequence[int], state: Mapping[str, np.ndarray], buffers: Sequence[str]
) -> dict[str, np.ndarray]:
    """Return a state in the order of a layout.

    Args:
        places: as for `order_of`.
        state: with the entries of `order_of`.
        buffers: the names of its flat buffers; one of another length stays as it is.

    Raises:
        ArgumentError: for other parameters.
    """
    ours = FlatLayout([ParameterSpec(place.name, (place.spec.size,)) for place in reversed(layout.ranges)])
    theirs = _layout_of(state)
    source = _sources(ours, theirs, places, state[PLACES])
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
    if np.shape(state[PLACES]) != names.shape or np.asarray(state[PLACES]).dtype.kind not in "iu":
        raise ArgumentError(f"state_dict[{PLACES!r}]: expected a place for each name, got {state[PLACES]}")
    pairs = zip(names.tolist(), sizes.tolist(), strict=True)
    return FlatLayout([ParameterSpec(name, (size,)) for name, size in reversed(list(pairs))])


def _sources(
    ours: FlatLayout, theirs: FlatLayout, our_places: Sequence[int], their_places: np.ndarray
) -> dict[str, ParameterRange]:
    """Return each parameter's range in a state: by name or, where one side has none, by place, as PyTorch does."""
    by_name = {each.name: each for each in theirs.ranges}
    names = {each.name for each in ours.ranges}
    if by_name.keys() == names:
        return by_name
    by_place = dict(zip(their_places.tolist(), theirs.ranges, strict=True))
    lacks_names = all(map(str.isdigit, names)) or all(map(str.isdigit, by_name))
    if lacks_names and sorted(our_places) == sorted(their_places.tolist()) and len(by_place) == len(names):
        return {each.name: by_place[place] for each, place in zip(ours.ranges, our_places, strict=True)}
    raise ArgumentError(
        f"state_dict[{NAMES!r}]: expected {_some(names)}, got {_some(by_name)}; "
        "give the optimizer the parameters of the job that saved it"
    )


def _some(names: Collection[str]) -> str:
    first, count = sorted(names)[:_SHOWN], len(names)
    return ", ".join(first) + (f" and {count - _SHOWN} more" if count > _SHOWN else "")
