"""Slots: arrays of one length that go from one rank to another, in a ring of places that are used in turn.

The sender waits until the next slot is free, writes it and sends it; the receiver waits until it has arrived, reads it
in place, as long as it likes, and releases it. Between ranks of one host a slot is memory that both see, and two
counters say how many were sent and released: nothing is copied. Otherwise each side has slots of its own, and MPI's
messages fill the receiver's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from clcomm.base.host.arrays import PAGE, aligned_zeros
from clcomm.comm.transport.host_memory import HostMemory
from clcomm.comm.transport.mpi_messages import Message, Messages
from clcomm.comm.transport.pending import wait_until

#: Counters are on cache lines of their own, as the two ranks write one each.
_LINE = 64


def shared_bytes(slots: int, nbytes: int) -> int:
    """Return the bytes of shared memory that `slots` slots of `nbytes` need."""
    return PAGE + slots * _stride(nbytes)


def _stride(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


class SharedSlots:
    """Slots in memory that both ranks see: both ends, of which each rank uses its own.

    Those through MPI have a class for each end, with these methods.

    Attributes:
        name: the transport's: "shared" or "mpi".
        slots: their memory: uint8.

    Args:
        memory: `shared_bytes(slots, nbytes)` bytes that begin at a page, zeroed before first use.
        slots: how many there are.
        nbytes: the length of each.
        host: the host's ranks, at whose rendezvous the two wait; None: both ends are this rank's, which never waits.
    """

    name = "shared"

    def __init__(self, memory: np.ndarray, slots: int, nbytes: int, host: HostMemory | None):
        starts = range(PAGE, PAGE + slots * _stride(nbytes), _stride(nbytes))
        self.slots = [memory[start : start + nbytes] for start in starts]
        self._sent = memory[:8].view(np.int64).data
        self._released = memory[_LINE : _LINE + 8].view(np.int64).data
        self._taken = self._released[0]
        self._host = host

    # --- the sender ---

    def has_room(self) -> bool:
        """Return, without blocking, whether the next slot is free."""
        return self._released[0] + len(self.slots) > self._sent[0]

    def wait_for_room(self) -> None:
        """Block until the next slot is free."""
        self._wait(self._released, self._sent[0] - len(self.slots) + 1)

    def next_slot(self) -> int:
        """Return the index of the next slot to write."""
        return self._sent[0] % len(self.slots)

    def send(self) -> None:
        """Send the next slot, which is written."""
        self._advance(self._sent)

    # --- the receiver ---

    def expect(self, count: int) -> None:
        """Note that so many slots will be sent from now on; the earlier ones have been received."""

    def has_arrived(self) -> bool:
        """Return, without blocking, whether the next slot has arrived."""
        return self._sent[0] > self._taken

    def wait_for_arrival(self) -> None:
        """Block until the next slot has arrived."""
        self._wait(self._sent, self._taken + 1)

    def take(self) -> int:
        """Return the index of the next slot, which has arrived; it stays as it is until it is released."""
        if self._host is not None:
            self._host.fence()  # what was written before the counter is read after it
        self._taken += 1
        return (self._taken - 1) % len(self.slots)

    def release(self) -> None:
        """Let the sender use the slot again that was taken first of those that are not released."""
        self._advance(self._released)

    # --- counters ---

    def _advance(self, counter: memoryview) -> None:
        if self._host is None:
            counter[0] += 1
            return
        self._host.fence()
        counter[0] += 1
        self._host.fence()
        self._host.rendezvous.wake()

    def _wait(self, counter: memoryview, count: int) -> None:
        if counter[0] < count:
            assert self._host is not None, "a rank waits for itself"
            self._host.rendezvous.wait_for(counter, count)


class SentSlots:
    """The sender's end of slots that go through MPI; for its methods see SharedSlots.

    Args:
        messages: of the ranks' communicator.
        receiver: the other rank.
        tag: sets these messages apart from others between the two.
        slots: how many there are.
        nbytes: the length of each.
    """

    name = "mpi"

    def __init__(self, messages: Messages, receiver: int, tag: int, slots: int, nbytes: int):
        self.slots = [aligned_zeros(nbytes) for _ in range(slots)]
        self._start: Callable[[np.ndarray], Message] = lambda slot: messages.send(slot, receiver, tag)
        self._on_way: list[Message | None] = [None] * slots
        self._sent = 0

    def has_room(self) -> bool:
        message = self._on_way[self.next_slot()]
        return message is None or message.done()

    def wait_for_room(self) -> None:
        wait_until(self.has_room)

    def next_slot(self) -> int:
        return self._sent % len(self.slots)

    def send(self) -> None:
        slot = self.next_slot()
        self._on_way[slot] = self._start(self.slots[slot])
        self._sent += 1

    def complete(self) -> None:
        """Block until everything sent has left."""
        wait_until(lambda: all(message is None or message.done() for message in self._on_way))


class ReceivedSlots:
    """The receiver's end of slots that go through MPI; the arguments are those of SentSlots."""

    name = "mpi"

    def __init__(self, messages: Messages, sender: int, tag: int, slots: int, nbytes: int):
        self.slots = [aligned_zeros(nbytes) for _ in range(slots)]
        self._start: Callable[[np.ndarray], Message] = lambda slot: messages.receive(slot, sender, tag)
        self._on_way: list[Message | None] = [None] * slots
        self._expected = self._started = self._taken = self._released = 0

    def expect(self, count: int) -> None:
        self._expected = self._started + count
        self._receive()

    def has_arrived(self) -> bool:
        message = self._on_way[self._taken % len(self.slots)]
        return self._taken < self._started and message is not None and message.done()

    def wait_for_arrival(self) -> None:
        wait_until(self.has_arrived)

    def take(self) -> int:
        self._taken += 1
        return (self._taken - 1) % len(self.slots)

    def release(self) -> None:
        self._released += 1
        self._receive()

    def _receive(self) -> None:
        """Start to receive what is expected, as far as slots are free; none is on its way between two steps."""
        while self._started < min(self._expected, self._released + len(self.slots)):
            slot = self._started % len(self.slots)
            self._on_way[slot] = self._start(self.slots[slot])
            self._started += 1
