"""The flat arrays of a model on a device, and the host arrays that mirror them or that they lie on."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.layout import FlatLayout
from clcomm.base.flat_space.parameters import FLOAT32, Beginnings, ParameterRange, Precision
from clcomm.engine.device import HOST_POINTER_ALIGNMENT, Device
from clcomm.engine.grad_slot import LOCAL, NONE, REDUCED, SENT, GradSlot
from clcomm.engine.launch_queue import QueueMark
from clcomm.engine.parameter import Storage


class FlatBuffers:
    """OpenCL buffers of `layout.span` bytes: parameters, gradients and averaged gradients.

    `reduced` is `grads` itself unless all three lie on top of host arrays and it has an array of its own. With
    `is_staged` the device's memory is separate from the host arrays, so that transfers copy.

    Parameters may be stored in a `precision` of 16 bits, at half the offset: `storage` then expands and rounds them.
    """

    def __init__(self, device: Device, layout: FlatLayout, params: np.ndarray):
        self.device, self.layout = device, layout
        self.params = device.memory.exact(copy_of=params)
        self.grads = self.reduced = device.memory.exact(copy_of=np.zeros_like(params))
        self.precision: Precision = FLOAT32
        self.storage: Storage | None = None
        self.is_staged = True
        self._host: dict[str, np.ndarray] | None = None

    @property
    def params_nbytes(self) -> int:
        """Bytes of the flat array of parameters, padding included."""
        return self.precision.nbytes(self.layout.span)

    def pull_params(self) -> None:
        """Bring the host's `params` array up to date."""
        if self.is_staged:
            self.device.read(self.params, self.host_array("params"))
        else:
            self.device.finish()

    def push_params(self) -> None:
        """Make the host's `params` array the device's parameters."""
        if self.is_staged:
            self.device.write(self.params, self.host_array("params"))
        else:
            self.device.finish()

    def _bind(self, params: np.ndarray, grads: np.ndarray, reduced: np.ndarray, gradients: np.ndarray) -> None:
        """Make buffers with the contents of `params` and `gradients`, on top of the host arrays where possible."""
        self._host = {"params": params, "grads": grads, "reduced": reduced}
        on_top = self.device.shares_host_memory and _are_aligned(params, grads, reduced) and self._sees_writes(grads)
        grads[...] = gradients
        self.params, self.grads = self._buffer(params, on_top), self._buffer(grads, on_top)
        is_third = on_top and reduced.ctypes.data != grads.ctypes.data  # one rank alone has one array for both
        self.reduced = self._buffer(reduced, on_top) if is_third else self.grads
        self.is_staged = not on_top

    def _buffer(self, array: np.ndarray, on_top: bool) -> Any:
        memory = self.device.memory
        return memory.exact(on_top_of=array) if on_top else memory.exact(copy_of=array)

    def _sees_writes(self, array: np.ndarray) -> bool:
        """Return whether a kernel's writes to a buffer on top of `array` appear in it without a copy."""
        device, buffer = self.device, self._buffer(array, on_top=True)
        array[-4:] = 255
        count = array.nbytes // 4
        device.launch(device.kernel("elementwise", "fill"), *device.grid(count), buffer, 0.0, count)
        device.finish()
        return not array[-4:].any()

    @staticmethod
    def _check_host_array(name: str, array: np.ndarray, nbytes: int) -> None:
        if array.dtype != np.uint8 or array.shape != (nbytes,) or not array.flags.c_contiguous:
            expected = f"{nbytes} contiguous uint8"
            raise ArgumentError(f"{name}: expected {expected}, got {array.dtype} of shape {array.shape}")

    def reduces_into(self, reduced: np.ndarray) -> bool:
        """Return whether the host's array of averaged gradients is this memory."""
        return self._host is not None and self._host["reduced"].ctypes.data == reduced.ctypes.data

    def host_array(self, name: str) -> np.ndarray:
        """Return the host's array of "params", "grads" or "reduced"; ArgumentError before there are any."""
        if self._host is None:
            raise ArgumentError("FlatSpace: no host arrays yet; call rebind() first")
        return self._host[name]

    def _drop_host_arrays(self, *names: str) -> None:
        if self._host is not None:
            self._host = {name: array for name, array in self._host.items() if name not in names}

    def read_grads(self, start: int, stop: int) -> None:
        """Copy bytes [start, stop) of the gradients to the host's array."""
        self.device.read(self.grads, self.host_array("grads")[start:stop], start)

    def write_grads(self, start: int, stop: int, source: str) -> None:
        """Copy bytes [start, stop) of the host's array `source` to the gradients."""
        self.device.write(self.grads, self.host_array(source)[start:stop], start)


def _are_aligned(*arrays: np.ndarray) -> bool:
    return all(array.ctypes.data % HOST_POINTER_ALIGNMENT == 0 for array in arrays)


# --- Transfers of gradients between a device and the host arrays that the ranks reduce. ---


class GradMoves:
    """Moves byte ranges of a flat space's gradients, and updates the states of their slots.

    On a device that shares the host's memory nothing is copied: a move waits for the device. A parameter belongs to the
    range in which it begins on its way to the host, and to the one in which it ends on its way back.
    """

    def __init__(self, buffers: FlatBuffers, slots: tuple[GradSlot, ...]):
        self._buffers, self._slots = buffers, slots
        ranges = buffers.layout.ranges  # in ascending order
        self._starts, self._stops = [place.start for place in ranges], [place.stop for place in ranges]
        self._kept: dict[tuple[int, int], tuple[Callable[[], None], Callable[[], None]]] = {}  # by range
        self._cuts: tuple[int, ...] = ()

    def forget(self) -> None:
        self._kept.clear()

    def divide(self, cuts: Sequence[int]) -> None:
        """Mark parts of gradients too, which begin at these bytes, as a rank that has one reads no more of the mean."""
        self._cuts = tuple(cuts)
        self.forget()

    def pull(self, start: int, stop: int) -> None:
        """Bring bytes [start, stop) of the host's `grads` up to date; MISSING where there is no gradient."""
        self.of_range(start, stop)[0]()

    def push(self, start: int, stop: int) -> None:
        """Make bytes [start, stop) of the host's `reduced` the gradients of the parameters that end there."""
        self.of_range(start, stop)[1]()

    def of_range(self, start: int, stop: int) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return functions that do `pull` and `push` of a range, to be called any number of times."""
        found = self._kept.get((start, stop))
        if found is None:
            found = self._kept[start, stop] = self._pull(start, stop), self._push(start, stop)
        return found

    def send(self, start: int, stop: int, mark: QueueMark | None) -> None:
        """Do `pull` as soon as the device has reached `mark`; None: once it has completed everything queued.

        Until `push` these gradients must not change.
        """
        opening, buffers = self._slots[self._opening(start, stop)], self._buffers
        if mark is None or any(slot.state != LOCAL for slot in opening):
            self.pull(start, stop)
        else:
            if buffers.is_staged:
                mark.read(buffers.grads, buffers.host_array("grads")[start:stop], start)
            else:
                mark.wait()
            self._beginnings(self._opening(start, stop)).mark(buffers.host_array("grads"))
        for slot in opening:
            slot.state = SENT

    def pull_own(self) -> tuple[str, ...]:
        """Bring this rank's own gradients up to date in the host's `grads`; return the names of their parameters."""
        own = [place for place, slot in self._places() if slot.state == LOCAL]
        if self._buffers.is_staged:
            for place in own:
                self._buffers.read_grads(place.start, place.stop)
        else:
            self._buffers.device.finish()  # also what still reads averages, which the caller may change
        return tuple([place.name for place in own])

    def push_own(self, names: Collection[str]) -> None:
        """Make these parameters' gradients those in the host's `grads`."""
        self.note_states()
        for place, slot in self._places():
            if place.name in names:
                if self._buffers.is_staged:
                    self._buffers.write_grads(place.start, place.stop, "grads")
                slot.state = LOCAL

    def note_states(self) -> None:
        recorder = self._buffers.device.recorder
        if recorder is not None:
            recorder.note_states(self._slots)

    def _places(self) -> zip[tuple[ParameterRange, GradSlot]]:
        return zip(self._buffers.layout.ranges, self._slots, strict=True)

    def _opening(self, start: int, stop: int) -> slice:
        return slice(bisect_left(self._starts, start), bisect_left(self._starts, stop))

    def _beginnings(self, which: slice) -> Beginnings:
        return Beginnings(self._buffers.layout.ranges[which], self._cuts)

    def _pull(self, start: int, stop: int) -> Callable[[], None]:
        which = self._opening(start, stop)
        places = [*zip(self._buffers.layout.ranges[which], self._slots[which], strict=True)]
        beginnings = self._beginnings(which)

        def pull() -> None:
            missing = []
            for place, slot in places:
                if slot.state != LOCAL:
                    slot.make_own()
                    if slot.state == NONE:
                        missing.append(place.name)
            if self._buffers.is_staged:
                self._buffers.read_grads(start, stop)
            else:
                self._buffers.device.finish()
            beginnings.mark(self._buffers.host_array("grads"), missing)

        return pull

    def _push(self, start: int, stop: int) -> Callable[[], None]:
        which = slice(bisect_right(self._stops, start), bisect_right(self._stops, stop))
        places = [*zip(self._buffers.layout.ranges[which], self._slots[which], strict=True)]
        beginnings = self._beginnings(which)

        def push() -> None:
            if self._buffers.is_staged:
                self._buffers.write_grads(start, stop, "reduced")
            self.note_states()
            missing = beginnings.missing(self._buffers.host_array("reduced"))
            for place, slot in places:
                if place.name in missing:
                    slot.drop()
                else:
                    slot.state = REDUCED

        return push
