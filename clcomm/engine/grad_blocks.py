"""Gradients that exist for a while: units of parameters share a few blocks of memory in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clcomm.engine.device import Device
from clcomm.engine.grad_slot import NONE, GradSlot
from clcomm.engine.tensor import wrap
from clcomm.flat_space.shards import Unit


class GradUnit:
    """A unit's gradients and the block that they lie in; `is_open` while any of them exists."""

    def __init__(self, unit: Unit, slots: Sequence[GradSlot]):
        self.unit, self.slots = unit, tuple(slots)
        self.block: Any = None  # the one it had last

    @property
    def is_open(self) -> bool:
        return any(slot.state != NONE for slot in self.slots)


class GradBlocks:
    """The memory of a flat space's gradients while they are not reduced: as many blocks as units are open at once.

    A unit's gradients get a block when the first of them is written, and leave it when all are dropped. A unit comes
    back to the block that it had, so that recordings of a step stay valid, unless another unit is in it.

    Args:
        device: where the blocks are.
        units: of the flat space.
        slots: of all parameters, in the layout's order.

    Attributes:
        units: the gradients of each unit.
        nbytes: of all blocks; they stay allocated.
    """

    def __init__(self, device: Device, units: Sequence[Unit], slots: Sequence[GradSlot]):
        self._device = device
        rest = list(slots)
        self.units = []
        for unit in units:
            own, rest = rest[: len(unit.ranges)], rest[len(unit.ranges) :]
            self.units.append(GradUnit(unit, own))
        self._unit_of = {slot: unit for unit in self.units for slot in unit.slots}
        self._block_nbytes = max(unit.nbytes for unit in units)
        self._blocks: list[Any] = []
        for slot in slots:
            slot.local = slot.reduced = None  # type: ignore[assignment]

    @property
    def nbytes(self) -> int:
        return len(self._blocks) * self._block_nbytes

    def open(self, slot: GradSlot) -> None:
        """Give a gradient that is about to be written its place."""
        own = self._unit_of[slot]
        if own.is_open:
            return
        taken = [unit.block for unit in self.units if unit is not own and unit.is_open]
        if own.block is None or any(own.block is block for block in taken):
            free = (block for block in self._blocks if not any(block is other for other in taken))
            self._move_in(own, next(free, None) or self._new_block())

    def _new_block(self) -> Any:
        self._blocks.append(self._device.memory.exact(self._block_nbytes))
        return self._blocks[-1]

    def _move_in(self, unit: GradUnit, block: Any) -> None:
        unit.block = block
        self._device.revision += 1  # recordings write to the block that it had
        for place, slot in zip(unit.unit.ranges, unit.slots, strict=True):
            region = block.get_sub_region(place.start - unit.unit.start, place.nbytes)
            slot.local = slot.reduced = wrap(self._device, region, place.shape)
