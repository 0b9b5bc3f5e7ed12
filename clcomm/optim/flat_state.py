"""An optimizer's state: device buffers of float32, with a place for each element of some parts of a flat space."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.layout import FlatLayout, ShardPart
from clcomm.base.flat_space.parameters import ParameterRange, ParameterSpec
from clcomm.engine.flat import FlatSpace
from clcomm.engine.parameter import Parameter
from clcomm.optim.groups import GROUPS, MISSED

if TYPE_CHECKING:
    import pyopencl as cl

#: Bytes of an element: parameters and state are float32.
ITEM = 4
#: The buffer with the parameters in float32, where 16 bits are stored.
MASTER = "master"


class FlatState:
    """Buffers by name, filled with zeros at their first use.

    Attributes:
        parts: those of the flat space that have a place, in elements; at first one, the whole.
        is_whole: whether each element of the flat space has a place, its own.
        count: elements in each buffer.
    """

    def __init__(self, space: FlatSpace):
        self.space = space
        self._buffers: dict[str, cl.Buffer] = {}
        self._place([ShardPart(0, self.span, 0)])

    @property
    def span(self) -> int:
        """Elements of the flat space."""
        return self.space.layout.span // ITEM

    @property
    def is_used(self) -> bool:
        """Whether there are buffers."""
        return bool(self._buffers)

    def __getitem__(self, name: str) -> cl.Buffer:
        found = self._buffers.get(name)
        if found is None:
            found = self._buffers[name] = self._upload(np.zeros(self.count, np.float32))
        return found

    def _upload(self, values: np.ndarray) -> Any:
        return self.space.device.upload(values if values.size else np.zeros(1, np.float32))  # no OpenCL buffer is empty

    def restrict_to(self, parts: Sequence[ShardPart]) -> None:
        """Give a place to these parts alone; ArgumentError outside the flat space or off its alignment."""
        multiple = self.space.layout.alignment // ITEM
        for start, stop, offset in parts:
            if not 0 <= start <= stop <= self.span or any(value % multiple for value in (start, stop, offset)):
                raise ArgumentError(
                    f"range: expected multiples of {multiple} within [0, {self.span}], got [{start}, {stop})"
                )
        self._place(parts)

    def _place(self, parts: Sequence[ShardPart]) -> None:
        self.parts = tuple(parts)
        self.is_whole = self.parts == (ShardPart(0, self.span, 0),)
        self.count = max([offset + stop - start for start, stop, offset in parts], default=0)
        self._views: tuple[Any, list[Any]] = (None, [])  # buffer of all parameters, and a view of it for each part

    def moved_to(self, space: FlatSpace) -> FlatState:
        """Return the state for another flat space, which has the same parameters and more; zeros for those."""
        new, old = FlatState(space), self.space
        places = dict(zip(old.parameters, old.layout.ranges, strict=True))
        for name, values in self.read().items():
            moved = np.zeros(new.span, np.float32)
            for parameter, place in zip(space.parameters, space.layout.ranges, strict=True):
                if parameter in places:
                    begin = places[parameter].start // ITEM
                    moved[place.start // ITEM :][: parameter.numel()] = values[begin : begin + parameter.numel()]
            new._buffers[name] = space.device.upload(moved)
        return new

    # -- on the host

    def read(self, names: Iterable[str] = ()) -> dict[str, np.ndarray]:
        """Return the contents of these buffers, and of those in use."""
        state = {}
        for name in dict.fromkeys([*names, *self._buffers]):
            state[name] = np.empty(self.count, np.float32)
            if self.count:
                self.space.device.read(self[name], state[name])
        return state

    def own_values(self, name: str, values: np.ndarray) -> np.ndarray:
        """Return what has a place here of a whole buffer; ArgumentError for what is not the flat space's."""
        array = np.asarray(values)
        if array.shape != (self.span,):
            raise ArgumentError(f"state_dict[{name!r}]: expected {self.span} values, got {array.shape}")
        if array.dtype.kind not in "fiu":
            raise ArgumentError(f"state_dict[{name!r}]: expected numbers, got {array.dtype}")
        own = np.zeros(self.count, np.float32)
        for start, stop, offset in self.parts:
            own[offset : offset + stop - start] = array[start:stop]
        return own

    def write(self, name: str, values: np.ndarray) -> None:
        """Replace a buffer's contents by `own_values`."""
        if self.count:
            self.space.device.write(self[name], values)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_buffers": self.read(), "_views": (None, [])}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._buffers = {name: self._upload(values) for name, values in state["_buffers"].items()}

    # -- the parameters that it belongs to

    def updated(self, part: int, params: object) -> Any:
        """Return the buffer of float32 in which a part is updated: its masters, where 16 bits are stored.

        params: a buffer of the parameters that have a place; None: they are in the flat space.
        """
        if self.space.storage is not None:
            return self[MASTER]
        return self._view(part) if params is None else params

    def reconcile(self, params: object) -> None:
        """Queue: masters become what the program has stored since the last step; nothing without masters."""
        if self.space.storage is not None:
            self._for_stored(self.space.storage.reconcile, params)

    def narrow(self, params: object) -> None:
        """Queue: store the masters, rounded; nothing without masters."""
        if self.space.storage is not None:
            self._for_stored(self.space.storage.narrow, params)

    def _for_stored(self, move: Callable[[object, object, int, int, int], None], params: object) -> None:
        """Call `move` of a Storage with each part of what is stored, and its masters."""
        for start, stop, offset in self.parts:
            if params is None:
                move(self.space.params, self[MASTER], start, offset, stop - start)
            else:
                move(params, self[MASTER], offset, offset, stop - start)

    def _view(self, part: int) -> Any:
        """Return the parameters as a buffer in which a part lies where it lies in the state."""
        whole, views = self._views
        if whole is not self.space.params:
            whole, views = self.space.params, [self.space.params]
            if not self.is_whole:
                views = [
                    whole.get_sub_region((start - offset) * ITEM, (offset + stop - start) * ITEM)
                    if start < stop
                    else None
                    for start, stop, offset in self.parts
                ]
            self._views = whole, views
        return views[part]


# --- The order of an optimizer's state: that of its flat space, which another job's may not have. ---
# A flat space has the order in which its first user gave the parameters: that of an optimizer over a list may be
# another than that of one over the model. A state names its parameters; who loads it brings it into an order of its
# own.

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


# --- Runs: neighbouring elements of an optimizer's state that a step updates with one launch. ---


class StateRun(NamedTuple):
    """Elements [first, first + length) of the state, in one part of it, of one group that missed as many steps."""

    first: int
    length: int
    missed: int
    part: int
    group: int


def runs_of(state: FlatState, trained: Mapping[Parameter, int], missed: Mapping[Parameter, int]) -> list[StateRun]:
    """Return the runs of the trained parameters.

    Args:
        state: of all parameters.
        trained: the group of each.
        missed: the steps that each was left out of, 0 for others.
    """
    runs: list[StateRun] = []
    places = state.space.layout.ranges
    ends = [*(place.start // ITEM for place in places[1:]), state.span]
    for part, (start, stop, offset) in enumerate(state.parts):
        for place, end, parameter in zip(places, ends, state.space.parameters, strict=True):
            first, last = max(place.start // ITEM, start), min(end, stop)
            if first < last and parameter in trained:
                kind = missed.get(parameter, 0), part, trained[parameter]
                _add(runs, StateRun(first - start + offset, last - first, *kind))
    return runs


def _add(runs: list[StateRun], run: StateRun) -> None:
    """Add a run, to the one before it where that adjoins and is alike."""
    last = runs[-1] if runs else None
    if last is not None and last.first + last.length == run.first and last[2:] == run[2:]:
        runs[-1] = last._replace(length=last.length + run.length)
    else:
        runs.append(run)
