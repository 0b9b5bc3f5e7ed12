"""Sharded parameters: a unit is gathered into memory while it is in use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.shards import Unit
from clcomm.engine.device import Device
from clcomm.engine.parameter import LazyParameter, Parameter

if TYPE_CHECKING:
    import pyopencl as cl
    from numpy.typing import ArrayLike


class GatheredParameter(LazyParameter):
    """A parameter whose unit is gathered at the first use of its memory, on all ranks at the same point."""

    __slots__ = ()

    @property
    def buffer(self) -> Any:
        """The device's buffer, valid until the next step; kernels' writes to it are lost."""
        return self._units.buffer_of(self)

    @property
    def _units(self) -> GatheredUnits:
        units: GatheredUnits = self.slot.space.gathered  # type: ignore[union-attr]
        return units

    def copy_from(self, array_like: ArrayLike) -> None:
        """Overwrite the values with a host array of the same shape, the same on every rank."""
        array = np.ascontiguousarray(array_like, self.dtype).reshape(np.shape(array_like))
        if array.shape != self.shape:
            raise ArgumentError(f"copy_from: expected an array of shape {self.shape}, got {array.shape}")
        self._units.write(self, array)
        self.note_write()


class GatheredUnits:
    """The gathered units: the last ones used, and those that are still referenced.

    Args:
        gather: fills a buffer with the unit of this index; collective.
        advance: called at each use of a gathered unit; moves the units gathered ahead.
        write: writes an array into a named parameter's place in the ranks' shards.

    Attributes:
        keep: number of last used units to keep.
        peak_nbytes: the most bytes gathered at once.
    """

    #: One operation's parameters may lie in two units.
    keep = 2

    def __init__(
        self,
        device: Device,
        units: Sequence[Unit],
        parameters: Sequence[Parameter],
        gather: Callable[[int, object], None],
        advance: Callable[[], object],
        write: Callable[[str, np.ndarray], None],
    ):
        self._device, self._units = device, units
        self._gather, self._advance, self._write = gather, advance, write
        self._held: OrderedDict[int, Mapping[Parameter, cl.Buffer]] = OrderedDict()
        self._members: list[list[Parameter]] = []
        rest = list(parameters)
        for unit in units:
            own, rest = rest[: len(unit.ranges)], rest[len(unit.ranges) :]
            self._members.append(own)
        self._places = {
            parameter: (unit.index, place.name)
            for unit, members in zip(units, self._members, strict=True)
            for place, parameter in zip(unit.ranges, members, strict=True)
        }
        self.peak_nbytes = 0

    def buffer_of(self, parameter: Parameter) -> cl.Buffer:
        """Return a parameter's buffer; collective where its unit is not gathered."""
        self._device.not_replayable("uses parameters that are gathered from other ranks")
        index = self._places[parameter][0]
        held = self._held.get(index)
        if held is None:
            held = self._held[index] = self._gathered(index)
        else:
            self._held.move_to_end(index)
            self._advance()
        return held[parameter]

    def write(self, parameter: Parameter, values: np.ndarray) -> None:
        """Set a parameter's values; every rank does so with the same ones."""
        index, name = self._places[parameter]
        self._held.pop(index, None)
        self._device.finish()
        self._write(name, values)

    @contextmanager
    def all_gathered(self) -> Iterator[None]:
        """Keep all units gathered within a block, in which reading parameters moves nothing; collective."""
        before, self.keep = self.keep, len(self._units)
        try:
            for members in self._members:
                self.buffer_of(members[0])
            yield
        finally:
            self.keep = before
            self.release()

    def release(self) -> None:
        self._held.clear()

    def _gathered(self, index: int) -> Mapping[Parameter, cl.Buffer]:
        unit = self._units[index]
        while len(self._held) >= self.keep:  # before there is another
            self._held.popitem(last=False)
        block = self._device.memory.exact(unit.nbytes)
        held = sum(self._units[other].nbytes for other in self._held)
        self.peak_nbytes = max(self.peak_nbytes, held + unit.nbytes)
        self._gather(index, block)
        return {
            parameter: block.get_sub_region(place.start - unit.start, place.nbytes)
            for place, parameter in zip(unit.ranges, self._members[index], strict=True)
        }
