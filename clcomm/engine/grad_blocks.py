"""Short-lived gradients: units of parameters take turns in a few blocks of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from clcomm.base.flat_space.shards import Unit
from clcomm.engine.device import Device
from clcomm.engine.grad_slot import NONE, GradSlot
from clcomm.engine.tensor import wrap

if TYPE_CHECKING:
    import pyopencl as cl


class GradUnit:
    """A unit's gradients and the block they lie in; `is_open` while any of them exists."""

    def __init__(self, unit: Unit, slots: Sequence[GradSlot]):
        self.unit, self.slots = unit, tuple(slots)
        self.block: cl.Buffer | None = None  # the one it had last, and its number
        self.number = -1

    @property
    def is_open(self) -> bool:
        return any(slot.state != NONE for slot in self.slots)


class GradBlocks:
    """The memory of a flat space's unreduced gradients: as many blocks as units are open at once.

    A unit's gradients get a block when the first of them is written, and leave it when all are dropped. A unit comes
    back to the block that it had, so that recordings of a step stay valid, unless another unit is in it.

    Args:
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
        self._blocks: list[cl.Buffer] = []
        self._holders: list[GradUnit] = []  # of each block, the unit that was in it last
        for slot in slots:
            slot.local = slot.reduced = None  # type: ignore[assignment]

    @property
    def nbytes(self) -> int:
        return len(self._blocks) * self._block_nbytes

    def open(self, slot: GradSlot) -> None:
        own = self._unit_of[slot]
        if own.is_open:
            return
        if own.number < 0 or self._is_taken(own.number, own):
            free = (at for at in range(len(self._blocks)) if not self._is_taken(at, own))
            self._move_in(own, next(free, len(self._blocks)))
        self._holders[own.number] = own

    def _is_taken(self, number: int, own: GradUnit) -> bool:
        holder = self._holders[number]
        return holder is not own and holder.is_open

    def _move_in(self, unit: GradUnit, number: int) -> None:
        """Let a unit's gradients lie in a block, a new one if the number is the next."""
        if number == len(self._blocks):
            self._blocks.append(self._device.memory.exact(self._block_nbytes))
            self._holders.append(unit)
        unit.number, unit.block = number, self._blocks[number]
        self._device.revision += 1  # recordings write to the block that it had
        for place, slot in zip(unit.unit.ranges, unit.slots, strict=True):
            region = unit.block.get_sub_region(place.start - unit.unit.start, place.nbytes)
            slot.local = slot.reduced = wrap(self._device, region, place.shape)
