"""Messages from rank to rank, of any length, and the exchange of arrays of different lengths made of them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from clcomm.base.errors import ArgumentError, MismatchError
from clcomm.comm.transport.mpi_communicators import byte
from clcomm.comm.transport.mpi_failures import is_lost_peer
from clcomm.comm.transport.mpi_runtime import Intracomm, Request
from clcomm.comm.transport.pending import advance_started

#: The most bytes of one MPI message: MPI before version 4 of the standard counts with 32 bits.
MOST_BYTES = 1 << 30
#: MPI's tag of messages with tag 0, and the tag of exchanges.
FIRST_TAG, _EXCHANGE_TAG = 64, 11


class Messages:
    """Sends and receives arrays between the ranks of a communicator, without blocking.

    Args:
        comm: an mpi4py communicator, still owned by the caller.
    """

    def __init__(self, comm: Intracomm):
        from mpi4py import MPI

        self._comm, self._byte, self._any, self._new_status = comm, byte(), MPI.ANY_SOURCE, MPI.Status
        self.most_tag = (comm.Get_attr(MPI.TAG_UB) or 32767) - FIRST_TAG

    def send(self, array: np.ndarray, rank: int, tag: int) -> Message:
        """Start to send a contiguous array; it may not be written before the message is complete."""
        tag = self._own_tag(tag)
        return Message(self, [self._comm.Isend([each, self._byte], rank, tag) for each in _pieces(array)])

    def receive(self, array: np.ndarray, rank: int | None, tag: int, *, at_most: bool = False) -> Message:
        """Start to receive into a contiguous array; rank None: from any rank; at_most: a message may be shorter."""
        source = self._any if rank is None else rank
        tag, pieces = self._own_tag(tag), _pieces(array)
        if rank is None and len(pieces) > 1:
            raise ArgumentError(f"source: expected a rank for a message above {MOST_BYTES} bytes, got any rank")
        requests = [self._comm.Irecv([each, self._byte], source, tag) for each in pieces]
        return Message(self, requests, [each.nbytes for each in pieces], at_most)

    def _own_tag(self, tag: int) -> int:
        if not 0 <= tag <= self.most_tag:
            raise ArgumentError(f"tag: expected 0 to {self.most_tag}, got {tag}")
        return tag + FIRST_TAG


class Message:
    """A message on its way.

    Args:
        messages: those of its communicator.
        requests: MPI's, one for each piece.
        expected: of a received message, the bytes of each piece.
        at_most: whether it may have less.
    """

    def __init__(
        self, messages: Messages, requests: list[Request], expected: Sequence[int] = (), at_most: bool = False
    ):
        self._messages, self._requests, self._expected, self._at_most = messages, requests, expected, at_most
        self._statuses = [messages._new_status() for _ in requests]
        self._left = len(requests)
        #: The rank that sent it; -1 until it is received, and for a sent one.
        self.source = -1

    def done(self) -> bool:
        """Return, without blocking, whether it is complete; MismatchError if it has another length than expected."""
        while self._left:
            at = len(self._requests) - self._left
            try:
                if not self._requests[at].Test(self._statuses[at]):
                    return False
            except Exception as error:
                if self._expected and not is_lost_peer(error):
                    raise MismatchError(
                        f"recv: expected {sum(self._expected):,} bytes, got an error: {error}"
                    ) from None
                raise
            self._left -= 1
            self._check(at)
        return True

    def _check(self, at: int) -> None:
        if self._expected:
            self.source = self._statuses[at].Get_source()
            got = self._statuses[at].Get_count(self._messages._byte)
            if got != self._expected[at] and not self._at_most:
                raise MismatchError(
                    f"recv: expected a message of {sum(self._expected):,} bytes, got {got:,} from rank {self.source}; "
                    f"send and receive arrays of equal length"
                )


def exchange_arrays(comm: Intracomm, sends: Sequence[np.ndarray], receives: Sequence[np.ndarray]) -> None:
    """Send array r of `sends` to rank r, and receive array r of `receives` from it; collective.

    Args:
        comm: an mpi4py communicator.
        sends: one contiguous array for each rank; empty ones are not sent.
        receives: one contiguous array for each rank; the others' `sends` have equal lengths.

    Raises:
        MismatchError: a message has another length.
    """
    messages, own = Messages(comm), comm.Get_rank()
    if receives[own].nbytes != sends[own].nbytes:
        raise MismatchError(
            f"all_to_all: expected {receives[own].nbytes:,} bytes for this rank from itself, got {sends[own].nbytes:,}"
        )
    started = [
        messages.receive(array, rank, _EXCHANGE_TAG)
        for rank, array in enumerate(receives)
        if rank != own and array.size
    ]
    started += [
        messages.send(array, rank, _EXCHANGE_TAG) for rank, array in enumerate(sends) if rank != own and array.size
    ]
    if receives[own].size:
        np.copyto(receives[own], sends[own])
    while started := [each for each in started if not each.done()]:
        advance_started()
        os.sched_yield()


def _pieces(array: np.ndarray) -> list[np.ndarray]:
    octets = array.reshape(-1).view(np.uint8)
    return [octets[start : start + MOST_BYTES] for start in range(0, max(octets.size, 1), MOST_BYTES)]
