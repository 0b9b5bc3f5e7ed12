"""One parameter's gradient in the flat space: whose it is at the moment, and where it lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clcomm.engine.tensor import Tensor, copy_into
from clcomm.errors import ArgumentError

if TYPE_CHECKING:
    from clcomm.engine.flat import FlatSpace

#: What a parameter's place in `grads` holds: nothing yet, this rank's gradient, or the averaged one (in `reduced`);
#: or this rank's gradient on its way to the others, which nobody may change.
NONE, LOCAL, REDUCED, SENT = range(4)


class GradSlot:
    """A parameter's gradient in the flat space: its state and its tensors on `grads` and on `reduced`."""

    __slots__ = ("local", "reduced", "space", "state")

    def __init__(self, space: FlatSpace) -> None:
        self.space = space
        self.state = NONE
        self.local: Tensor = None  # type: ignore[assignment]
        self.reduced: Tensor = None  # type: ignore[assignment]

    def gradient(self) -> Tensor | None:
        """Return the gradient, None before the first backward."""
        if self.state == NONE:
            return None
        return self.reduced if self.state == REDUCED else self.local

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
