"""A communicator without MPI: what clcomm uses of mpi4py's, between the ranks of one host that share memory.

Ranks that torchrun or another program has started meet somewhere, as at PyTorch's store, and share memory for their
messages. Collectives are messages to all and from all, in a context of their own, with the number of the call as tag.
Windows are memory that has no name in /dev/shm, so that nothing is left of a job that is killed.
"""

from __future__ import annotations

import os
import pickle
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np

from clcomm.base.errors import LaunchError, ResourceError
from clcomm.base.host.arrays import PAGE
from clcomm.comm.transport.common_memory import common_memory
from clcomm.comm.transport.memory_messages import AllOf, Mail, Receiving, Waiting, fence

_NOTHING = np.empty(0, np.uint8)


class Meeting(Protocol):
    """Where ranks meet first: the part of a communicator that is needed to make one."""

    def Get_rank(self) -> int: ...
    def bcast(self, obj: Any, root: int) -> Any: ...
    def allgather(self, obj: Any) -> list[Any]: ...


class MemoryStatus:
    """The sender and the length of a received message, as mpi4py's Status."""

    def __init__(self, comm: MemoryComm):
        self._members, self._got = comm.members, (-1, 0)

    def take(self, source: int, nbytes: int) -> None:
        self._got = self._members.index(source), nbytes

    def Get_source(self) -> int:
        return self._got[0]

    def Get_count(self, datatype: object) -> int:
        return self._got[1]


class MemoryComm:
    """Ranks of one host; methods have the names and arguments of mpi4py's Intracomm.

    Buffers are arrays, or lists of an array and, for parts of different lengths, counts and starts in bytes; a datatype
    at their end is a byte's.

    Args:
        mail: this process's messages.
        members: the ranks' numbers in the world, in order.
        name: the same on all of them, and no other communicator's of this world.
    """

    most_tag = (1 << 31) - 1

    def __init__(self, mail: Mail, members: Sequence[int], name: str = "world"):
        self.mail, self.members, self._name = mail, tuple(members), name
        self._rank, self._size = self.members.index(mail.rank), len(self.members)
        self._context, self._of_collectives = (_number(name + end) for end in (".", "*"))
        self._calls, self._made = 0, Counter[object]()

    @classmethod
    def of(cls, meeting: Meeting) -> MemoryComm:
        """Return the world of the ranks that meet; collective.

        Raises LaunchError on every rank where they can't share memory.
        """
        pids = meeting.allgather(os.getpid())
        memory, descriptor = common_memory(meeting, "clcomm-messages", Mail.nbytes(len(pids)))
        if descriptor >= 0:
            os.close(descriptor)
        if memory is None:
            raise LaunchError(
                "ranks: expected processes of one user and one host, which can open each other's memory under /proc, "
                "got others; start them with `clcomm run -n N script.py`"
            )
        return cls(Mail(memory, meeting.Get_rank(), pids), range(len(pids)))

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._size

    # --- other communicators ---

    def of_ranks(self, ranks: Sequence[int], tag: object) -> MemoryComm:
        """Return a communicator of these ranks, in this order; collective over them alone."""
        members = [self.members[rank] for rank in ranks]
        self._made[key := (*members, tag)] += 1
        return MemoryComm(self.mail, members, f"{self._name}/{key}#{self._made[key]}")

    def Dup(self) -> MemoryComm:
        return self.of_ranks(range(self._size), "dup")

    of_host = Dup

    def Idup(self) -> tuple[MemoryComm, Waiting]:
        return self.Dup(), AllOf(self.mail, [])

    def Split(self, color: int | None, key: int) -> MemoryComm | None:
        """Return a communicator of the ranks with this color, ordered by key; None: of none."""
        places = sorted(
            (each, rank) for rank, (other, each) in enumerate(self.allgather((color, key))) if other == color
        )
        return None if color is None else self.of_ranks([rank for _, rank in places], "split")

    def Free(self) -> None:
        """Do nothing: memory is free once nobody uses it."""

    # --- messages ---

    def new_status(self) -> MemoryStatus:
        return MemoryStatus(self)

    def Isend(self, buffer: Any, rank: int, tag: int = 0) -> Waiting:
        return self.mail.send(_octets(buffer), self.members[rank], self._context, tag)

    def Irecv(self, buffer: Any, rank: int | None, tag: int = 0) -> Waiting:
        source = None if rank is None else self.members[rank]
        return self.mail.receive(_octets(buffer), source, self._context, tag)

    def Send(self, buffer: Any, rank: int, tag: int = 0) -> None:
        self.Isend(buffer, rank, tag).Wait()

    def Recv(self, buffer: Any, rank: int | None, tag: int = 0) -> None:
        self.Irecv(buffer, rank, tag).Wait()

    def Sendrecv(self, sent: Any, rank: int, tag: int, received: Any, source: int, its_tag: int) -> None:
        AllOf(self.mail, [self.Irecv(received, source, its_tag), self.Isend(sent, rank, tag)]).Wait()

    def Iprobe(self) -> None:
        """Advance all messages of this process."""
        self.mail.advance()

    # --- collectives ---

    def _exchange(self, sends: Sequence[np.ndarray | None], receives: Sequence[np.ndarray | None]) -> Waiting:
        """Send to each rank and receive from each; None: nothing."""
        self._calls += 1
        requests: list[Waiting] = []
        for rank, (member, sent, room) in enumerate(zip(self.members, sends, receives, strict=True)):
            if rank == self._rank:
                if sent is not None and room is not None:
                    np.copyto(room, sent)
                continue
            if room is not None:
                requests.append(self.mail.receive(room, member, self._of_collectives, self._calls))
            if sent is not None:
                requests.append(self.mail.send(sent, member, self._of_collectives, self._calls))
        return AllOf(self.mail, requests)

    def Ialltoallv(self, sent: Any, received: Any) -> Waiting:
        return self._exchange(self._blocks(sent), self._blocks(received))

    def Iallgatherv(self, sent: Any, received: Any) -> Waiting:
        return self._exchange([_octets(sent)] * self._size, self._blocks(received))

    Iallgather = Iallgatherv

    def Ibarrier(self) -> Waiting:
        return self._exchange([_NOTHING] * self._size, [_NOTHING] * self._size)

    def Alltoallv(self, sent: Any, received: Any) -> None:
        self.Ialltoallv(sent, received).Wait()

    Alltoall = Alltoallv

    def Allgather(self, sent: Any, received: Any) -> None:
        self.Iallgatherv(sent, received).Wait()

    def Barrier(self) -> None:
        self.Ibarrier().Wait()

    def Bcast(self, buffer: Any, root: int) -> None:
        octets = _octets(buffer)
        sends = [octets if self._rank == root else None] * self._size
        self._exchange(sends, [octets if rank == root else None for rank in range(self._size)]).Wait()

    def allgather(self, obj: Any) -> list[Any]:
        """Return all ranks' objects."""
        self._calls += 1
        own = np.frombuffer(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), np.uint8)
        context, tag = self._of_collectives, self._calls
        received = [self.mail.receive(None, member, context, tag) for member in self.members]
        AllOf(self.mail, [*received, *(self.mail.send(own, member, context, tag) for member in self.members)]).Wait()
        return [_object(each) for each in received]

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the root's object."""
        return self.allgather(obj if self._rank == root else None)[root]

    def _blocks(self, buffer: Any) -> list[np.ndarray]:
        """Return a buffer's part for each rank."""
        octets, rest = _octets(buffer), buffer[1:-1] if isinstance(buffer, list) else []
        step = octets.size // self._size
        counts, starts = rest or ([step] * self._size, [rank * step for rank in range(self._size)])
        return [octets[start : start + count] for start, count in zip(starts, counts, strict=True)]

    # --- memory ---

    def window(self, nbytes: int) -> MemoryWindow:
        """Return a window with `nbytes` of this rank; collective."""
        return MemoryWindow(self, nbytes)


class MemoryWindow:
    """Memory with a part of each rank, as mpi4py's Win of shared memory."""

    Sync = staticmethod(fence)

    def __init__(self, comm: MemoryComm, nbytes: int):
        ends = [0, *accumulate(-(-each // PAGE) * PAGE for each in comm.allgather(nbytes))]
        self._spans = list(pairwise(ends))
        self._memory, descriptor = common_memory(comm, "clcomm-window", ends[-1])
        if descriptor >= 0:
            os.close(descriptor)
        if self._memory is None:
            raise ResourceError(
                f"allocate: expected {ends[-1]:,} bytes that the ranks share, got none: is memory free?"
            )

    def Shared_query(self, rank: int) -> tuple[memoryview]:
        """Return a rank's part, first of all that MPI says of it."""
        assert self._memory is not None
        return (self._memory[slice(*self._spans[rank])],)

    def Lock_all(self) -> None:
        """Do nothing: ranks read and write the memory as their own."""

    Unlock_all = Lock_all

    def Free(self) -> None:
        """Forget the memory, which is free once no array in it is used."""
        self._memory = None


def _octets(buffer: Any) -> np.ndarray:
    """Return a buffer's whole array as bytes."""
    array = buffer[0] if isinstance(buffer, list) else buffer
    if isinstance(array, np.ndarray):
        return array.reshape(-1).view(np.uint8)
    return np.frombuffer(array, np.uint8)


def _object(message: Receiving) -> Any:
    assert message.octets is not None
    return pickle.loads(message.octets.tobytes())


def _number(name: str) -> int:
    """Return the number of a context, 63 bits, which no two names have but by an unlikely chance."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
