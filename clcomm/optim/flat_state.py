"""An optimizer's state: device buffers of float32, with a place for each element of some parts of a flat space."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.shards import ShardPart
from clcomm.engine.flat import FlatSpace

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
