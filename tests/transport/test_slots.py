"""Slots: arrays arrive in order and unchanged, stay until they are released, and no sender overtakes its receiver."""

from __future__ import annotations

import itertools
from collections import deque

import pytest

from clcomm import Communicator
from clcomm.base.host.arrays import PAGE, aligned_zeros
from clcomm.comm.transport import mpi_communicators
from clcomm.comm.transport.slots import SharedSlots, shared_bytes
from clcomm.parallel.pipeline.link import LinkEnd, LinkPlan, Links, Slot
from tests.helpers import cpu_device
from tests.transport.references import LAYOUTS, layout_hosts, pretended_host

MESSAGES = 40
#: Layout of the hosts, number of slots, bytes of each.
CASES = [
    *itertools.product(["", "mpi"], [1, 2, 3], [4, 4096, 300_000]),
    *((layout, *case) for layout in LAYOUTS for case in ((1, 300_000), (3, 4096))),
]


@pytest.mark.parametrize("nbytes", [1, 7, PAGE, PAGE + 1])
@pytest.mark.parametrize("slots", [1, 2, 5])
def test_slots_are_apart_and_begin_at_pages(slots, nbytes):
    memory = aligned_zeros(shared_bytes(slots, nbytes))
    ring = SharedSlots(memory, slots, nbytes, None)
    for number, slot in enumerate(ring.slots):
        assert slot.nbytes == nbytes and (slot.__array_interface__["data"][0]) % PAGE == 0
        slot[...] = number + 1
    assert [int(slot[0]) for slot in ring.slots] == list(range(1, slots + 1))
    assert [ring.has_room(), ring.has_arrived()] == [True, False]  # counters lie apart from the slots
    for number in range(slots):
        assert ring.next_slot() == number
        ring.send()
    assert not ring.has_room()
    assert [ring.take() for _ in range(slots)] == list(range(slots)) and not ring.has_arrived()
    ring.release()
    assert ring.has_room() and ring.next_slot() == 0
    with pytest.raises(AssertionError, match="a rank waits for itself"):
        ring.wait_for_arrival()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("layout", "slots", "nbytes"), CASES)
def test_what_is_sent_arrives_in_order(monkeypatch, layout, slots, nbytes):
    """Each rank sends to the next one, receives from the one before, and holds what it received as long as it may."""
    with monkeypatch.context() as patch:
        if layout in LAYOUTS:
            patch.setattr(mpi_communicators, "host_of", lambda comm: pretended_host(layout, comm))
        comm = Communicator(transport="mpi" if layout == "mpi" else "auto")
    size, rank = comm.size, comm.rank
    plans = [LinkPlan("x", each, each, (each + 1) % size, slots, (nbytes // 4,), "<i4") for each in range(size)]
    links = Links(comm, cpu_device("cpu"), plans)
    before = (rank - 1) % size
    assert links.sent.keys() == {("x", rank)} and links.received.keys() == {("x", before)}
    sender, receiver = links.sent["x", rank], links.received["x", before]
    for _ in range(2):
        receiver.expect(MESSAGES)
        held: deque[tuple[Slot, int]] = deque()
        for number in range(MESSAGES):
            sender.take(number).memory[...] = number + 7 * rank
            sender.give()
            held.append((receiver.take(number), number))
            if len(held) == slots:  # else the one before would wait for ever
                _release(receiver, held, before)
        while held:
            _release(receiver, held, before)
        assert links.held_bytes == 0
        sender.complete()
        comm.barrier()
    hosts = [list(each) for each in layout_hosts(layout, size)] if layout in LAYOUTS else [list(range(size))]
    together = any({rank, (rank + 1) % size} <= set(each) for each in hosts) and layout != "mpi"
    sent = next(tally for key, tally in comm.stats.tallies.items() if key[0] == "send") if _flushed(comm) else None
    assert sent is not None and (sent.calls, sent.nbytes) == (2 * MESSAGES, 2 * MESSAGES * nbytes)
    assert sent.transport == ("shared" if together else "mpi")
    comm.finalize()


def _release(receiver: LinkEnd, held: deque[tuple[Slot, int]], sender: int) -> None:
    """Compare the oldest slot with what its sender wrote, and give it back."""
    assert receiver.held_bytes == len(held) * receiver.plan.nbytes
    slot, number = held.popleft()
    assert (slot.memory == number + 7 * sender).all() and (slot.numpy() == slot.memory).all()
    receiver.give()


def _flushed(comm: Communicator) -> bool:
    comm.stats.flush()
    return True
