"""Links: what one stage sends to the next, in slots that kernels write and read in place.

A link carries the outputs of one stage, or their gradients back. Both ends do the same: `take` a slot, once it is free
to be written or has arrived, use it, and `give` it to the other end. Slots are memory that both ranks see where they
share a host; else MPI's messages fill the receiver's. On a device that shares the host's memory a slot's tensor lies on
top of it; on others it is copied to and from the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import numpy as np

from clcomm.base.host.arrays import aligned_zeros
from clcomm.comm.communicator import Communicator
from clcomm.comm.stats.events import Collective
from clcomm.comm.transport.mpi_messages import Messages
from clcomm.comm.transport.slots import ReceivedSlots, SentSlots, SharedSlots, shared_bytes
from clcomm.engine.device import Device
from clcomm.engine.tensor import FLOAT32, Shape, Tensor, copy_into, empty
from clcomm.sync.agreement import require_agreement

#: The labels of links, under which their messages are counted.
ACTIVATIONS, GRADIENTS = "activations", "activation gradients"
#: MPI's tag of the first link; the others follow. Messages of two sets of links never are on their way at once.
_FIRST_TAG = 256

T = TypeVar("T")


class LinkPlan(NamedTuple):
    """A link to open: arrays of one kind, of which `slots` may be in use at once.

    `stage` is the one whose outputs they are, or the gradients of these.
    """

    label: str
    stage: int
    sender: int
    receiver: int
    slots: int
    shape: Shape
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Slot(Tensor):
    """A slot as a leaf of the tape.

    Attributes:
        memory: of the slot, which the tensor lies on unless `is_staged`.
        gradient_slot: in whose place backward writes this tensor's gradient; None: in new memory.
    """

    __slots__ = ("gradient_slot", "is_staged", "memory")

    def __init__(self, memory: np.ndarray, plan: LinkPlan, device: Device):
        self.memory = memory.view(plan.dtype).reshape(plan.shape)
        super().__init__(self.memory, device, np.dtype(plan.dtype) == FLOAT32, copy=False)
        self.is_staged = not (device.shares_host_memory and device.lies_on(self.memory, self.buffer))
        self.gradient_slot: Slot | None = None

    def claim_gradient(self) -> Tensor | None:
        if self._grad is not None:
            return None
        target = self.gradient_slot
        self._grad = empty(self.device, self.shape) if target is None or target.is_staged else target
        return self._grad

    def put(self, tensor: Tensor | None) -> None:
        """Queue the update of the slot from a tensor, unless that lies on it; None: zeros.

        A staged slot waits for the queue; others are up to date once the queue is finished.
        """
        if tensor is None:
            self.memory[...] = 0  # no kernel in the queue writes to it
        elif self.is_staged:
            self.device.read(tensor.buffer, self.memory)
        elif tensor.buffer is not self.buffer:
            copy_into(self, tensor)


class LinkEnd:
    """This rank's end of a link.

    Args:
        ring: the slots, of `clcomm.comm.transport.slots`.
        sends: whether it is the sender's end.

    Attributes:
        held_bytes: of received slots that are not given back.
    """

    def __init__(self, comm: Communicator, device: Device, plan: LinkPlan, ring: Any, sends: bool):
        self.plan, self.held_bytes = plan, 0
        self._comm, self._ring, self._sends = comm, ring, sends
        self._operation, way, peer = ("send", "to", plan.receiver) if sends else ("recv", "from", plan.sender)
        self._peer = f"{way} {comm.name_ranks([peer])}"
        self._slots = [Slot(memory, plan, device) for memory in ring.slots]
        self._began_s = self._waited_s = 0.0  # of the latest wait for a slot

    def expect(self, count: int) -> None:
        """Announce `count` arrays that will arrive; the earlier ones have been received."""
        self._ring.expect(count)

    def take(self, micro_batch: int) -> Slot:
        """Return the next slot, once it is free to be written, or has arrived."""
        ring, self._began_s, self._waited_s = self._ring, perf_counter(), 0.0
        is_there, wait = (
            (ring.has_room, ring.wait_for_room) if self._sends else (ring.has_arrived, ring.wait_for_arrival)
        )
        if not is_there():
            with self._shown(f"micro-batch {micro_batch},"):
                wait()
            self._waited_s = perf_counter() - self._began_s
        index: int = ring.next_slot() if self._sends else self._counted(ring.take)
        slot = self._slots[index]
        if not self._sends:
            self.held_bytes += self.plan.nbytes
            if slot.is_staged:
                slot.device.write(slot.buffer, slot.memory)
        return slot

    def give(self) -> None:
        """Send the slot that was taken; of received ones, give the oldest back."""
        if self._sends:
            self._counted(self._ring.send)
        else:
            self._ring.release()
            self.held_bytes -= self.plan.nbytes

    def complete(self) -> None:
        """Block until everything sent has left this rank's memory."""
        if isinstance(self._ring, SentSlots):
            with self._shown("the last ones"):
                self._ring.complete()

    def _shown(self, what: str) -> AbstractContextManager[None]:
        """Return a context in which the watchdog sees that this rank waits, before the next collective of all ranks."""
        name = f"{self.plan.label} of stage {self.plan.stage}, {what} {self._peer}"
        return self._comm.runner.waiting_for(self._operation, name, before_next=True)

    def _counted(self, move: Callable[[], T]) -> T:
        """Move a message; it has taken the time of the wait before too."""
        from_s, plan = perf_counter(), self.plan
        result = move()
        seconds = self._waited_s + perf_counter() - from_s
        self._comm.notifier.notify_message(Collective(
            self._operation, plan.label, plan.nbytes, seconds, self._ring.name, self._comm.sequence,
            began_s=self._began_s if self._waited_s else from_s, wait_s=self._waited_s, exposed_s=seconds,
        ))  # fmt: skip
        return result


class Links:
    """This rank's ends of all links of a pipeline for one shape of micro-batches; collective.

    Until all that was sent is received, no other links of these ranks may be in use. Raises MismatchError, on every
    rank, where the plans differ.

    Attributes:
        sent, received: the ends by label and stage.
        nbytes: of all slots on this rank.
    """

    def __init__(self, comm: Communicator, device: Device, plans: Sequence[LinkPlan]):
        require_agreement(comm, "links", [*map(str, plans)], "give every rank the same pipeline and batch")
        self.sent: dict[tuple[str, int], LinkEnd] = {}
        self.received: dict[tuple[str, int], LinkEnd] = {}
        messages: Any = None if comm.comm is None else Messages(comm.comm)
        for tag, (plan, memory) in enumerate(zip(plans, _shared_memories(comm, plans), strict=True), _FIRST_TAG):
            sends, receives = comm.rank == plan.sender, comm.rank == plan.receiver
            size, ring = (plan.slots, plan.nbytes), None
            if sends and receives:
                ring = SharedSlots(aligned_zeros(shared_bytes(*size)), *size, None)
            elif memory is not None:
                ring = SharedSlots(memory, *size, comm.memory.of_host)
            for ends, is_own, peer, through_mpi in (
                (self.sent, sends, plan.receiver, SentSlots), (self.received, receives, plan.sender, ReceivedSlots),
            ):  # fmt: skip
                if is_own:
                    slots = ring or through_mpi(messages, peer, tag, *size)
                    ends[plan.label, plan.stage] = LinkEnd(comm, device, plan, slots, ends is self.sent)
        own_plans = [plan for plan in plans if comm.rank in (plan.sender, plan.receiver)]
        self.nbytes = sum(plan.nbytes * plan.slots for plan in own_plans)

    @property
    def held_bytes(self) -> int:
        return sum(each.held_bytes for each in self.received.values())


def _shared_memories(comm: Communicator, plans: Sequence[LinkPlan]) -> list[np.ndarray | None]:
    """Return each link's shared memory; None for those within a rank, or through MPI. Collective."""
    hosts = comm.all_gather_object(comm.host, label="links")
    sizes = [0 if hosts[each.sender] != hosts[each.receiver] or each.sender == each.receiver
             else shared_bytes(each.slots, each.nbytes) for each in plans]  # fmt: skip
    memory = comm.allocate_common(sum(sizes)) if any(sizes) and comm.shares_memory else None
    if memory is None or not comm.is_common_on_host(memory):  # there was no room: all of the Communicator's ranks know
        return [None] * len(plans)
    stops = np.cumsum(sizes)
    return [memory[stop - size : stop] if size else None for stop, size in zip(stops.tolist(), sizes, strict=True)]
