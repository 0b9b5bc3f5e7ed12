"""Channels: arrays from rank to rank, counted and timed, and named in the watchdog's messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from typing import NamedTuple

import numpy as np

from clcomm.base.errors import MismatchError
from clcomm.base.host.arrays import aligned_zeros
from clcomm.comm.communicator import Communicator
from clcomm.comm.stats.events import Collective
from clcomm.comm.transport.mpi_messages import Messages
from clcomm.comm.transport.slots import ReceivedSlots, SentSlots, SharedSlots, shared_bytes

#: MPI's tag of the first channel; the others follow. Messages of two sets of channels never are on their way at once.
_FIRST_TAG = 256
_CHANNELS = "channels"


class ChannelPlan(NamedTuple):
    """A channel to open: `slots` arrays of `nbytes` may be in use at once; `label` names it."""

    sender: int
    receiver: int
    nbytes: int
    slots: int
    label: str


class Sender:
    """The sender's end of a channel.

    Attributes:
        slots: the memory of each slot, uint8.
    """

    def __init__(self, comm: Communicator, plan: ChannelPlan, slots: SharedSlots | SentSlots):
        self._messages = _CountedMessages(comm, plan, slots.name, "send")
        self._slots, self.slots = slots, slots.slots

    def reserve(self, what: str) -> int:
        """Return the index of the next slot to write, once it is free.

        what: the array's name in messages of the watchdog.
        """
        self._messages.wait(self._slots.has_room, self._slots.wait_for_room, what)
        return self._slots.next_slot()

    def send(self) -> None:
        """Send the slot that was reserved last."""
        began_s = perf_counter()
        self._slots.send()
        self._messages.finished(began_s)

    def complete(self) -> None:
        """Block until everything sent has left this rank's memory."""
        if isinstance(self._slots, SentSlots):
            with self._messages.shown("the last ones"):
                self._slots.complete()


class Receiver:
    """The receiver's end of a channel.

    Attributes:
        slots: the memory of each slot, uint8.
    """

    def __init__(self, comm: Communicator, plan: ChannelPlan, slots: SharedSlots | ReceivedSlots):
        self._messages = _CountedMessages(comm, plan, slots.name, "recv")
        self._slots, self.slots = slots, slots.slots

    def expect(self, count: int) -> None:
        """Announce `count` arrays; the earlier ones have been received."""
        self._slots.expect(count)

    def receive(self, what: str) -> int:
        """Return the index of the slot with the next array, once it has arrived; it stays until it is released.

        what: the array's name in messages of the watchdog.
        """
        self._messages.wait(self._slots.has_arrived, self._slots.wait_for_arrival, what)
        began_s = perf_counter()
        index = self._slots.take()
        self._messages.finished(began_s)
        return index

    def release(self) -> None:
        """Release the oldest unreleased slot."""
        self._slots.release()


class _CountedMessages:
    """Times one end's messages, and shows the watchdog the array that this rank waits for."""

    def __init__(self, comm: Communicator, plan: ChannelPlan, transport: str, operation: str):
        self._comm, self._operation, self._transport = comm, operation, transport
        self._label, self._nbytes = plan.label, plan.nbytes
        other = plan.receiver if operation == "send" else plan.sender
        self._peer = f"{'to' if operation == 'send' else 'from'} {comm.name_ranks([other])}"
        self._began_s = self._waited_s = 0.0

    def wait(self, is_there: Callable[[], bool], block: Callable[[], None], what: str) -> None:
        """Wait until `is_there`; the time counts for the next message."""
        self._waited_s = 0.0
        if not is_there():
            self._began_s = perf_counter()
            with self.shown(what):
                block()
            self._waited_s = perf_counter() - self._began_s

    def shown(self, what: str) -> AbstractContextManager[None]:
        """Return a context in which the watchdog sees that this rank waits, before the next collective of all ranks."""
        return self._comm.runner.waiting_for(self._operation, f"{what} {self._peer}", before_next=True)

    def finished(self, moved_from_s: float) -> None:
        """Count a message; `moved_from_s` is its begin by time.perf_counter()."""
        began_s = self._began_s if self._waited_s else moved_from_s
        seconds, label = self._waited_s + perf_counter() - moved_from_s, self._label
        event = Collective(
            self._operation, label, self._nbytes, seconds, self._transport, self._comm.sequence, began_s=began_s,
            wait_s=self._waited_s, exposed_s=seconds,
        )  # fmt: skip
        self._comm.notifier.notify_message(event)


class Ends(NamedTuple):
    """This rank's ends of a channel: both where it sends to itself, None where it has none."""

    sender: Sender | None
    receiver: Receiver | None


def open_channels(comm: Communicator, plans: Sequence[ChannelPlan]) -> list[Ends]:
    """Open channels between ranks, in shared memory where both are on one host; collective.

    Until all that was sent is received, no other channels of these ranks may be in use. Raises MismatchError,
    on every rank, where the plans differ.
    """
    everyone = comm.all_gather_object((comm.host, list(plans)), label=_CHANNELS)
    for rank, (_, theirs) in enumerate(everyone):
        if theirs != everyone[0][1]:
            at = next((n for n, pair in enumerate(zip(theirs, everyone[0][1], strict=False)) if pair[0] != pair[1]), -1)
            raise MismatchError(
                f"channels: expected the same on every rank, got {len(everyone[0][1])} on {comm.name_ranks([0])} and "
                f"{len(theirs)} on {comm.name_ranks([rank])}, of which number {at} differs"
            )
    hosts = [host for host, _ in everyone]
    memories = _shared_memories(comm, plans, hosts)
    messages = None if comm.comm is None else Messages(comm.comm)
    return [_ends(comm, plan, number, memories[number], messages) for number, plan in enumerate(plans)]


def _shared_memories(comm: Communicator, plans: Sequence[ChannelPlan], hosts: list[int]) -> list[np.ndarray | None]:
    """Return each channel's shared memory; None for those through MPI. Collective."""
    sizes = [0 if hosts[each.sender] != hosts[each.receiver] or each.sender == each.receiver
             else shared_bytes(each.slots, each.nbytes) for each in plans]  # fmt: skip
    if not any(sizes) or not comm.shares_memory:
        return [None] * len(plans)
    memory = comm.allocate_common(sum(sizes))
    if not comm.is_common_on_host(memory):  # there was no room: all of the Communicator's ranks know
        return [None] * len(plans)
    stops = np.cumsum(sizes)
    return [memory[stop - size : stop] if size else None for stop, size in zip(stops.tolist(), sizes, strict=True)]


def _ends(
    comm: Communicator, plan: ChannelPlan, number: int, memory: np.ndarray | None, messages: Messages | None
) -> Ends:
    sends, receives = comm.rank == plan.sender, comm.rank == plan.receiver
    shape = plan.slots, plan.nbytes
    if memory is not None or (sends and receives):
        own = aligned_zeros(shared_bytes(*shape)) if memory is None else memory
        slots = SharedSlots(own, *shape, None if sends and receives else comm.memory.of_host)
        return Ends(Sender(comm, plan, slots) if sends else None, Receiver(comm, plan, slots) if receives else None)
    if not (sends or receives):
        return Ends(None, None)
    assert messages is not None, "several ranks without MPI"
    tag = _FIRST_TAG + number
    if sends:
        return Ends(Sender(comm, plan, SentSlots(messages, plan.receiver, tag, *shape)), None)
    return Ends(None, Receiver(comm, plan, ReceivedSlots(messages, plan.sender, tag, *shape)))
