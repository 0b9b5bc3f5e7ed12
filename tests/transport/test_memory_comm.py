"""The communicator without MPI: its messages and collectives, against what was sent."""

from __future__ import annotations

import random

import numpy as np
import pytest

from clcomm.comm.transport.memory_comm import MemoryComm
from clcomm.comm.transport.mpi_runtime import world

pytestmark = pytest.mark.mpi(min_size=1)


@pytest.fixture
def comm():
    """All ranks; the meeting place is MPI's communicator."""
    return MemoryComm.of(world())


def values(seed: object, size: int) -> np.ndarray:
    """Return bytes that are the same on every rank."""
    return np.frombuffer(random.Random(str(seed)).randbytes(size), np.uint8)


@pytest.mark.parametrize("seed", range(3))
def test_drawn_messages_arrive_in_the_order_of_sending(comm, seed):
    """Of any length, also above a ring's, by several communicators and tags; receives come before or after."""
    draw, ranks, rank = random.Random(seed), comm.Get_size(), comm.Get_rank()
    comms = comm, comm.Dup()
    messages = [
        (which, draw.randrange(ranks), draw.randrange(ranks), draw.randrange(3), draw.choice([0, 1, 40, 5000, 900_000]))
        for which in draw.choices(range(2), k=40)
    ]
    calls = [(number, way) for number in range(len(messages)) for way in ("send", "receive")]
    own = random.Random(seed * 100 + rank)
    sends = [number for number, way in calls if way == "send" and messages[number][1] == rank]
    receives = [number for number, way in calls if way == "receive" and messages[number][2] == rank]
    started, rooms = [], {}
    while sends or receives:
        if sends and (not receives or own.random() < 0.5):
            number = sends.pop(0)
            which, _, to, tag, size = messages[number]
            started.append(comms[which].Isend([values(number, size), None], to, tag))
        else:
            number = receives.pop(0)
            which, source, _, tag, size = messages[number]
            rooms[number] = np.empty(size, np.uint8)
            started.append(comms[which].Irecv([rooms[number], None], source, tag))
    for request in started:
        request.Wait()
    for number, room in rooms.items():
        assert np.array_equal(room, values(number, messages[number][-1])), number


def test_any_rank_and_too_long_a_message(comm):
    ranks, rank = comm.Get_size(), comm.Get_rank()
    sent = comm.Isend(np.full(5, rank, np.uint8), 0, 7)
    if rank == 0:
        rows = np.empty((ranks, 5), np.uint8)
        for row in rows:
            comm.Recv(row, None, 7)
        assert sorted(rows[:, 0].tolist()) == list(range(ranks)) and (rows == rows[:, :1]).all()
    sent.Wait()
    late = comm.Isend(np.zeros(9, np.uint8), (rank + 1) % ranks, 8)
    with pytest.raises(ValueError, match="a message of 9 bytes"):
        comm.Recv(np.empty(4, np.uint8), (rank - 1) % ranks, 8)
    late.Wait()


def test_objects_parts_and_barriers(comm):
    ranks, rank = comm.Get_size(), comm.Get_rank()
    assert comm.allgather({"rank": rank}) == [{"rank": other} for other in range(ranks)]
    assert comm.bcast(f"from {rank}", ranks - 1) == f"from {ranks - 1}"
    part = comm.Split(rank % 2 if rank else None, -rank)
    assert (part is None) == (rank == 0)
    if part is not None:
        members = [other for other in reversed(range(1, ranks)) if other % 2 == rank % 2]
        assert part.allgather(rank) == members and part.Get_rank() == members.index(rank)
        assert part.members == tuple(members)
    counts = [(rank + other) % 3 for other in range(ranks)]
    starts = [4 * other for other in range(ranks)]
    sent = np.repeat(np.arange(ranks, dtype=np.uint8) + 10 * rank, 4)
    got = np.full(4 * ranks, 255, np.uint8)
    comm.Alltoallv([sent, counts, starts, None], [got, counts, starts, None])
    for other, start in enumerate(starts):
        want = [10 * other + rank] * counts[other] + [255] * (4 - counts[other])
        assert got[start : start + 4].tolist() == want
    comm.Barrier()
    everyone = bytearray(ranks)  # as the end of a job, which needs no NumPy
    comm.Iallgather(bytearray([rank]), everyone).Wait()
    assert everyone == bytes(range(ranks))


def test_windows_are_one_memory(comm):
    ranks, rank = comm.Get_size(), comm.Get_rank()
    window = comm.window(1000 * (rank + 1))
    parts = [np.frombuffer(window.Shared_query(other)[0], np.uint8) for other in range(ranks)]
    assert [part.any() for part in parts] == [False] * ranks and all(p.ctypes.data % 4096 == 0 for p in parts)
    comm.Barrier()
    parts[(rank + 1) % ranks][:1000] = rank + 1
    window.Sync()
    comm.Barrier()
    assert parts[rank][999] == (rank - 1) % ranks + 1
    window.Free()
    assert parts[rank][999] == (rank - 1) % ranks + 1, "the memory lives as long as arrays in it"
