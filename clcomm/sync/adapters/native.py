"""The native engine's modules under the Synchronizer: their flat space moves into the Communicator's memory.

On a device that shares the host's memory nothing is copied: kernels write gradients to memory that the other ranks of
the host read, and the optimizer reads the averaged ones where they were reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.buckets import Bucket
from clcomm.base.flat_space.layout import FlatLayout, require_same_parameters, require_same_trainable
from clcomm.engine.codec import DeviceCodec, hash_buffer
from clcomm.engine.fold import DeviceFold
from clcomm.engine.grad_slot import NONE
from clcomm.engine.launch_queue import QueueMark
from clcomm.engine.modes import current_backward
from clcomm.engine.random_stream import RandomStream

if TYPE_CHECKING:
    from clcomm.comm.stats.events import Phase
    from clcomm.engine.flat import FlatSpace
    from clcomm.sync.adapters.adapter import FlatArrays, OnComplete

_REMEDY = "freeze or unfreeze before the module's first optimizer, or make a new Synchronizer"


class NativeAdapter:
    """A `clcomm.engine` module; its parameters lie in one flat space, which `attach` binds to the given arrays.

    Raises ArgumentError when nothing in the module is trainable, or the layout is not the module's own.
    """

    def __init__(self, model: Any):
        self._model = model
        self.flat_space: FlatSpace = model.flat_space()
        self.specs = self.flat_space.layout.specs
        self.fold, self.codec = DeviceFold.on(self.flat_space.device), DeviceCodec.on(self.flat_space.device)
        self._members = dict(model.named_parameters())
        self._checked = -1  # the device's revision at the last check of the parameters
        if not self.specs:
            raise ArgumentError("model: expected at least one parameter that requires a gradient, got none")

    def record(self, synchronise: Callable[[], None]) -> bool:
        return False  # a Replay is refused below

    def count_copies(self, notify: Callable[[Phase], None]) -> None:
        """Report nothing: parameters lie in the arrays, or the engine reports its transfers."""

    def require_unchanged(self) -> None:
        """Raise ArgumentError where parameters were replaced, frozen or unfrozen, and within a Replay.

        A synchronisation moves data between ranks, which a replay cannot do.
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
        if layout.signature() != self.flat_space.layout.signature():
            raise ArgumentError("layout: expected that of the module's flat space, got another")
        self.flat_space.rebind(arrays.params, arrays.grads, arrays.reduced)
        self.flat_space.stepped_with.clear()  # ranks that go on without a lost one may have stepped or not
        self.flat_space.new_settings.clear()

    def pull_parameters(self) -> None:
        self.flat_space.pull_params()

    def hash_parameters(self) -> int:
        return hash_buffer(self.flat_space.device, self.flat_space.params, self.flat_space.params_nbytes)

    def push_parameters(self) -> None:
        self.flat_space.push_params()

    def has_gradients(self) -> bool:
        return any(slot.state != NONE for slot in self.flat_space.slots)

    def drop_gradients(self) -> None:
        self.flat_space.zero_grad()

    def random_numbers(self) -> RandomStream:
        return RandomStream.of(self.flat_space.device)

    def decides_bits(self) -> list[str]:
        return [f"device: {self.flat_space.device.family}"]

    def new_settings(self) -> dict[object, str]:
        return self.flat_space.new_settings

    def seed(self) -> None:
        """Return None: the device's stream has each shard's numbers."""

    def shard_block(self, seed: int) -> AbstractContextManager[None]:
        return nullcontext()

    def set_aside(self) -> Callable[[], None]:
        if self.has_gradients():
            raise ArgumentError(
                "shards: expected no gradients before a step's first shard, got those of another backward; call "
                "optimizer.zero_grad(), and run all of a shard's micro-batches in its block"
            )
        return lambda: None

    def pull_gradients(self, bucket: Bucket) -> None:
        self.flat_space.moves.pull(bucket.start, bucket.stop)

    def send_gradients(self, bucket: Bucket, mark: Any) -> None:
        self.flat_space.moves.send(bucket.start, bucket.stop, mark)

    def push_gradients(self, bucket: Bucket) -> None:
        self.flat_space.moves.push(bucket.start, bucket.stop)

    def pull_written(self) -> tuple[str, ...]:
        return self.flat_space.moves.pull_own()

    def push_written(self, names: Sequence[str]) -> None:
        self.flat_space.moves.push_own(names)

    def moves_in_place(self) -> tuple[Callable[[], None], Callable[[], None]] | None:
        space = self.flat_space
        if space.is_staged:
            return None
        return space.moves.of_range(0, space.layout.span)

    def watch_gradients(self, complete: OnComplete, begins: Callable[[], None] | None = None) -> Callable[[], None]:
        """Call `complete(name)` once the last kernel of a parameter's gradient is queued, then the returned action.

        A Replay calls `complete` in the run that it records, and runs the returned action in each replay.
        """
        space = self.flat_space
        latest: tuple[int, Any] = -1, None  # number of the last backward, and its recorder

        def hook_of(name: str) -> Callable[[object], object]:
            def hook(_: object) -> object:
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
            for place, parameter in zip(space.layout.ranges, space.parameters, strict=True)
        ]

        def stop() -> None:
            for remove in removers:
                remove()

        return stop

    def mark(self) -> QueueMark | None:
        device = self.flat_space.device
        return None if device.runs_in_caller else QueueMark(device)

    def extra_state(self) -> dict[str, np.ndarray]:
        return {name: tensor.numpy().copy() for name, tensor in self._untrained().items()}

    def load_extra_state(self, state: dict[str, np.ndarray]) -> None:
        for name, tensor in self._untrained().items():
            tensor.copy_from(state[name])

    def _untrained(self) -> dict[str, Any]:
        trained = {spec.name for spec in self.specs}
        frozen = {name: p for name, p in self._model.named_parameters() if name not in trained}
        return frozen | dict(self._model.named_buffers())

    def buffers(self) -> dict[str, np.ndarray]:
        return {name: buffer.numpy().copy() for name, buffer in self._model.named_buffers()}

    def load_buffers(self, state: dict[str, np.ndarray]) -> None:
        buffers = dict(self._model.named_buffers())
        for name, array in state.items():
            buffers[name].copy_from(array)
