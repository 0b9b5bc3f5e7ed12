"""One parameter's gradient in the flat space: whose it is at the moment, and where it lies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from clcomm.engine.tensor import FLOAT32, Shape, Tensor, copy_into
from clcomm.errors import ArgumentError

if TYPE_CHECKING:
    from clcomm.engine.flat import FlatSpace

#: What a parameter's place in `grads` holds: nothing yet, this rank's gradient, or the averaged one (in `reduced`);
#: or this rank's gradient on its way to the others, which nobody may change.
NONE, LOCAL, REDUCED, SENT = range(4)


class Gradient(Tensor):
    """A parameter's gradient as its user has it: wherever it lies now, and never in memory that ranks share.

    The averaged gradient is read where it is. What may write, any use of `buffer` among it, first moves it to memory of
    this rank's own. ArgumentError once it is forgotten, as its memory is that of the parameter's next gradient.
    """

    __slots__ = ("_number", "_place")

    _place: GradSlot
    _number: int  # which of the place's gradients this is

    @property
    def _slot(self) -> GradSlot:
        if self._number != self._place.forgotten:
            raise ArgumentError(
                "gradient: expected the one that the parameter has now, got one that zero_grad() or `p.grad = None` "
                "has forgotten; keep p.grad.numpy() instead"
            )
        return self._place

    @classmethod
    def of(cls, slot: GradSlot, shape: Shape) -> Gradient:
        """Return the gradient of a slot in some shape."""
        gradient = cls.__new__(cls)
        gradient._place, gradient._number = slot, slot.forgotten
        gradient.device, gradient.shape = slot.local.device, shape
        gradient.dtype, gradient._requires_grad = FLOAT32, False
        gradient._grad = gradient._node = gradient._hooks = None
        return gradient

    @property
    def buffer(self) -> Any:
        """The device's buffer: this rank's own, as nothing says what a kernel does with it."""
        return self._slot.own().buffer

    def numpy(self) -> np.ndarray:
        array = np.empty(self.shape, self.dtype)
        self.device.read(self._slot.current().buffer, array)
        return array

    def copy_from(self, array_like: Any) -> None:
        self._slot.require_here()
        super().copy_from(array_like)

    def alias(self, shape: Shape) -> Tensor:
        return Gradient.of(self._slot, shape)


class GradSlot:
    """A parameter's gradient in the flat space: its state and its tensors on `grads` and on `reduced`."""

    __slots__ = ("_gradient", "_state", "forgotten", "local", "reduced", "space")

    def __init__(self, space: FlatSpace) -> None:
        self.space = space
        self._state = NONE
        self.forgotten = 0  # how many gradients
        self.local: Tensor = None  # type: ignore[assignment]
        self.reduced: Tensor = None  # type: ignore[assignment]
        self._gradient: Gradient | None = None

    @property
    def state(self) -> int:
        """NONE, LOCAL, REDUCED or SENT."""
        return self._state

    @state.setter
    def state(self, state: int) -> None:
        if state == NONE and self._state != NONE:
            self.forgotten += 1
            self._gradient = None
        self._state = state

    def gradient(self) -> Tensor | None:
        """Return the gradient, None before the first backward."""
        if self.state == NONE:
            return None
        if self._gradient is None:
            self._gradient = Gradient.of(self, self.local.shape)
        return self._gradient

    def current(self) -> Tensor:
        """Return where the gradient lies, to be read."""
        return self.reduced if self.state == REDUCED else self.local

    def own(self) -> Tensor:
        """Return the gradient in this rank's memory, to which the averaged one is copied first."""
        return self.for_update() if self.state == REDUCED else self.local

    def claim(self) -> Tensor | None:
        """Return where the first gradient is to be written, or None when there is a gradient already."""
        if self.state != NONE:
            return None
        self.space.note_states()
        self.state = LOCAL
        return self.local

    def for_update(self) -> Tensor:
        """Return this rank's own gradient, which starts from the averaged one after a synchronisation."""
        self.require_here()
        self.space.note_states()
        if self.state == REDUCED and self.reduced.buffer is not self.local.buffer:
            copy_into(self.local, self.reduced)
        self.state = LOCAL
        return self.local

    def assign(self, value: Tensor | None) -> None:
        """Set the gradient to a copy of `value`; None means that there is none."""
        self.require_here()
        self.space.note_states()
        if value is None:
            self.state = NONE
        else:
            if value.buffer is not self.local.buffer:
                copy_into(self.local, value)
            self.state = LOCAL

    def release(self) -> Tensor | None:
        """Return the gradient in this rank's memory, None where there is none, when its parameter leaves."""
        self.require_here()
        return None if self.state == NONE else self.own()

    def make_own(self) -> None:
        """Let `local` hold this rank's own gradient, zeros where there is none."""
        if self.state == NONE:
            device, size = self.local.device, self.local.size
            device.launch(device.kernel("elementwise", "fill"), *device.grid(size), self.local, 0.0, size)
        else:
            self.for_update()

    def require_here(self) -> None:
        """Raise ArgumentError for a gradient that was begun to be averaged."""
        if self.state == SENT:
            raise ArgumentError(
                "gradient: expected sync_gradients() after the last backward, as its average is on the way; "
                "with overlap, all but the last micro-batch belong into no_sync()"
            )
