"""One parameter's gradient in the flat space: its state, and the memory that holds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.layout import Unit
from clcomm.base.flat_space.parameters import MISSING
from clcomm.engine.device import Device
from clcomm.engine.tensor import FLOAT32, Shape, Tensor, copy_into, wrap

if TYPE_CHECKING:
    import pyopencl as cl
    from numpy.typing import ArrayLike

#: States of a gradient: none yet; this rank's own, in `grads`; the average, in `reduced`; this rank's own while its
#: all-reduce is in flight, when it must not change.
NONE, LOCAL, REDUCED, SENT = range(4)


class Gradient(Tensor):
    """A parameter's gradient as `p.grad` returns it, in whichever of its two places it is.

    An averaged gradient is read in place. Anything that may write, including any use of `buffer`, first copies it to
    this rank's own memory. Raises ArgumentError after the gradient was dropped: its memory holds the next one.
    """

    __slots__ = ("_number", "_owner")
    exports_copy = True

    _owner: GradSlot
    _number: int  # how many gradients were dropped before this one

    @property
    def _slot(self) -> GradSlot:
        if self._number != self._owner.dropped:
            raise ArgumentError(
                "gradient: expected the one that the parameter has now, got one that zero_grad() or `p.grad = None` "
                "has dropped; keep p.grad.numpy() instead"
            )
        return self._owner

    @classmethod
    def of(cls, slot: GradSlot, shape: Shape) -> Gradient:
        """Return the gradient of a slot in some shape."""
        gradient = cls.__new__(cls)
        gradient._owner, gradient._number = slot, slot.dropped
        gradient.device, gradient.shape = slot.local.device, shape
        gradient.dtype, gradient._requires_grad, gradient.whole_columns = FLOAT32, False, 0
        gradient._grad = gradient._node = gradient._hooks = None
        return gradient

    @property
    def buffer(self) -> Any:
        """The device's buffer: this rank's own copy, as a kernel may write to it."""
        self._slot.require_changeable()
        return self._slot.own().buffer

    def numpy(self) -> np.ndarray:
        return self._slot.current().numpy()

    def note_write(self) -> None:
        """Note a write; a recorded one is not repeated, as the next step has another gradient."""
        self.device.note_write(self.buffer)

    def _as_host_array(self) -> np.ndarray:
        """Return a copy: the gradient's memory holds the next one, and all ranks share the average's."""
        return self.numpy().copy()

    def copy_from(self, array_like: ArrayLike) -> None:
        self._slot.require_changeable()
        super().copy_from(array_like)

    def alias(self, shape: Shape) -> Tensor:
        return Gradient.of(self._slot, shape)


class SlotOwner(Protocol):
    """The part of a flat space that a slot uses.

    step_averages: whether gradients are this rank's own until a step averages them, so that none may be changed before.
    """

    step_averages: bool

    def note_states(self) -> None:
        """Notify a recording under way, if any, that states are about to change."""

    def open(self, slot: GradSlot) -> None:
        """Give a gradient that is about to be written its place, if it has none now."""

    def note_dropped(self, slot: GradSlot) -> None:
        """Note that the program has dropped a gradient."""


class GradSlot:
    """A parameter's gradient in the flat space: its state and its tensors on `grads` and on `reduced`.

    Attributes:
        state: NONE, LOCAL, REDUCED or SENT; may be set, except to NONE, which `drop` sets.
        dropped: number of gradients dropped so far.
        local: the tensor on `grads`, or in a block of memory while the gradient exists.
        reduced: the tensor on `reduced`.
    """

    __slots__ = ("_gradient", "dropped", "local", "reduced", "space", "state", "written_at")

    def __init__(self, space: SlotOwner) -> None:
        self.space = space
        self.written_at = -1  # see LazyParameter
        self.state = NONE  # no property, as every step reads and sets it for each parameter
        self.dropped = 0
        self.local: Tensor = None  # type: ignore[assignment]
        self.reduced: Tensor = None  # type: ignore[assignment]
        self._gradient: Gradient | None = None

    def drop(self) -> None:
        """Set the state to NONE: a Gradient that was kept raises ArgumentError from now on."""
        if self.state != NONE:
            self.state = NONE
            self.dropped += 1
            self._gradient = None

    def gradient(self) -> Tensor | None:
        """Return the gradient, None before the first backward."""
        if self.state == NONE:
            return None
        if self._gradient is None:
            self._gradient = Gradient.of(self, self.local.shape)
        return self._gradient

    def current(self) -> Tensor:
        """Return the tensor that holds the gradient, to be read."""
        return self.reduced if self.state == REDUCED else self.local

    def own(self) -> Tensor:
        """Return the gradient in this rank's memory; an averaged one is copied there first."""
        return self.for_update() if self.state == REDUCED else self.local

    def claim(self) -> Tensor | None:
        """Return the tensor to write a first gradient to; None if there is a gradient already."""
        if self.state != NONE:
            return None
        self.space.note_states()
        self.space.open(self)
        self.state = LOCAL
        return self.local

    def for_update(self) -> Tensor:
        """Return this rank's own gradient; after a synchronisation it starts as a copy of the average."""
        self.require_not_sent()
        self.space.note_states()
        if self.state == REDUCED and self.reduced.buffer is not self.local.buffer:
            copy_into(self.local, self.reduced)
        self.state = LOCAL
        return self.local

    def assign(self, value: Tensor | None) -> None:
        """Set the gradient to a copy of `value`; None: drop it."""
        if value is None:
            self.require_not_sent()
        else:
            self.require_changeable()
        self.space.note_states()
        if value is None:
            self.drop()
            self.space.note_dropped(self)
        else:
            self.space.open(self)
            if value.buffer is not self.local.buffer:
                copy_into(self.local, value)
            self.state = LOCAL

    def release(self) -> Tensor | None:
        """Return the gradient in this rank's memory, or None, as its parameter leaves the flat space."""
        self.require_not_sent()
        return None if self.state == NONE else self.own()

    def make_own(self) -> None:
        """Fill `local` with this rank's own gradient, MISSING if there is none."""
        if self.state == NONE:
            device, size = self.local.device, self.local.numel()
            device.launch(device.kernel("elementwise", "fill"), *device.grid(size), self.local, MISSING, size)
        else:
            self.for_update()

    def require_changeable(self) -> None:
        """Raise ArgumentError where the program must not change the gradient, nor hand it to a kernel."""
        self.require_not_sent()
        if self.space.step_averages:
            raise ArgumentError(
                "gradient: expected no change between sync_gradients() and the DistributedOptimizer's step, which "
                "averages it; clip with clcomm.clip_grad_norm, change it before, or read p.grad.numpy()"
            )

    def require_not_sent(self) -> None:
        """Raise ArgumentError if the gradient's all-reduce is in flight."""
        if self.state == SENT:
            raise ArgumentError(
                "gradient: expected sync_gradients() after the last backward, as its all-reduce is in flight; "
                "with overlap, put all micro-batches but the last into no_sync()"
            )


# --- Short-lived gradients: units of parameters take turns in a few blocks of memory. ---


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
