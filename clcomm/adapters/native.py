"""The native engine's modules under the Synchronizer: their flat space moves into the Communicator's memory.

On a device that shares the host's memory nothing is copied: kernels write gradients to where the other ranks of the
host read them, and the optimizer reads the averaged ones where they were summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from clcomm.adapters.trainable import require_same_parameters, require_same_trainable
from clcomm.buckets import Bucket
from clcomm.engine.autograd import current_backward
from clcomm.engine.codec import Codec
from clcomm.engine.fold import Fold
from clcomm.engine.hashing import hash_buffer
from clcomm.engine.mark import QueueMark
from clcomm.errors import ArgumentError
from clcomm.layout import FlatLayout

if TYPE_CHECKING:
    from clcomm.engine.flat import FlatSpace
    from clcomm.replica import FlatArrays, OnComplete

_REMEDY = "freeze or unfreeze before the module's first optimizer or Synchronizer"


class NativeReplica:
    """A `clcomm.engine` module; its parameters live in one flat space, which is bound to the arrays it is given.

    Raises ArgumentError when nothing in the module is trainable, or the layout is not the module's own.
    """

    def __init__(self, model: Any):
        self._model = model
        self.flat_space: FlatSpace = model.flat_space()
        self.specs = self.flat_space.layout.specs
        self.fold, self.codec = Fold.on(self.flat_space.device), Codec.on(self.flat_space.device)
        self._members = dict(model.named_parameters())
        self._checked = -1  # the device's revision when the parameters were looked at
        if not self.specs:
            raise ArgumentError("model: expected at least one parameter that requires a gradient, got none")

    def require_unchanged(self) -> None:
        """Raise ArgumentError where the module has other parameters than at first, or trains others.

        What follows moves data between ranks, which no replay can do.
        """
        self.flat_space.device.not_replayable("moves data between ranks")
        revision = self.flat_space.device.revision
        if revision != self._checked:
            now = dict(self._model.named_parameters())
            require_same_parameters(now, self._members)
            trained = (name for name, parameter in now.items() if parameter.requires_grad)
            require_same_trainable(trained, (spec.name for spec in self.specs), _REMEDY)
            self._checked = revision

    def attach(self, layout: FlatLayout, arrays: FlatArrays) -> None:
        """Move the module's parameters and gradients onto the arrays; their values are kept."""
        if layout.signature() != self.flat_space.layout.signature():
            raise ArgumentError("layout: expected that of the module's flat space, got another")
        self.flat_space.rebind(arrays.params, arrays.grads, arrays.reduced)

    def pull_parameters(self) -> None:
        """Make the host's array hold the parameters."""
        self.flat_space.pull_params()

    def hash_parameters(self) -> int:
        """Return the parameters' hash, computed on the device."""
        space = self.flat_space
        return hash_buffer(space.device, space.params, space.layout.span)

    def push_parameters(self) -> None:
        """Make the parameters those in the host's array."""
        self.flat_space.push_params()

    def pull_gradients(self, bucket: Bucket) -> None:
        """Make the bucket's range of the host's array hold the gradients; a missing one becomes zero."""
        self.flat_space.pull_grads(bucket.start, bucket.stop)

    def send_gradients(self, bucket: Bucket, mark: Any) -> None:
        """As `pull_gradients` once the device is at `mark`; until they are pushed backward refuses to add to them."""
        self.flat_space.send_grads(bucket.start, bucket.stop, mark)

    def push_gradients(self, bucket: Bucket) -> None:
        """Make the bucket's averaged gradients the parameters' gradients."""
        self.flat_space.push_grads(bucket.start, bucket.stop)

    def pull_written(self) -> tuple[str, ...]:
        """Copy gradients that were written since they were pushed to the host's array, and return their names."""
        return self.flat_space.pull_own_grads()

    def push_written(self, names: Sequence[str]) -> None:
        """Make these gradients those in the host's array of this rank's own."""
        self.flat_space.push_own_grads(names)

    def moves_in_place(self) -> tuple[Callable[[], None], Callable[[], None]] | None:
        """Return what pulls and what pushes all gradients; None where the device's memory is apart from the arrays."""
        space = self.flat_space
        if space.is_staged:
            return None
        return space.grad_moves(0, space.layout.span)

    def watch_gradients(self, complete: OnComplete, begins: Callable[[], None] | None = None) -> Callable[[], None]:
        """Call `complete(name)` once the last kernel of a parameter's gradient is queued, and then what that returns.

        A Replay calls `complete` in the run that it records, and what that returned in all later ones.
        """
        space = self.flat_space
        latest: tuple[int, Any] = -1, None  # the backward that was seen last, and who recorded it

        def hook_of(name: str) -> Callable[[Any], Any]:
            def hook(_: Any) -> Any:
                nonlocal latest
                backward, recorder = current_backward(), space.device.recorder
                if backward != latest[0]:
                    if recorder is not None and recorder is latest[1]:
                        recorder.refuse("it runs backward more than once")
                    latest = backward, recorder
                    if begins is not None:
                        begins()
                return complete(name)

            return hook

        removers = [
            parameter.register_post_accumulate_grad_hook(hook_of(place.name), planned=True)
            for place, parameter in zip(space.layout.slots, space.parameters, strict=True)
        ]

        def stop() -> None:
            for remove in removers:
                remove()

        return stop

    def mark(self) -> QueueMark | None:
        """Return a mark behind all that the device has queued; None where kernels run in the calling thread."""
        device = self.flat_space.device
        return None if device.runs_in_caller else QueueMark(device)

    def extra_state(self) -> dict[str, np.ndarray]:
        """Return frozen parameters and buffers by name: what the module's state holds beside trained parameters."""
        trained = {spec.name for spec in self.specs}
        return {name: array for name, array in self._model.state_dict().items() if name not in trained}

    def load_extra_state(self, state: dict[str, np.ndarray]) -> None:
        """Set what `extra_state` returned."""
        self._model.load_state_dict({**self._model.state_dict(), **state})
