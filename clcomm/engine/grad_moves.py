"""Transfers of gradients between a device and the host arrays that the ranks reduce."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence

from clcomm.base.flat_space.missing import Beginnings
from clcomm.base.flat_space.parameters import ParameterRange
from clcomm.engine.flat_buffers import FlatBuffers
from clcomm.engine.grad_slot import LOCAL, NONE, REDUCED, SENT, GradSlot
from clcomm.engine.queue_mark import QueueMark


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
