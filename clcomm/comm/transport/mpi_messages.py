"""Messages from rank to rank, of any length, and the exchange of arrays of different lengths made of them."""

from __future__ import annotations

import os
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Integral

import numpy as np

from clcomm.base.errors import ArgumentError, MismatchError
from clcomm.comm.transport.mpi_communicators import names_of
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
        self._comm, (self._byte, self._any, self._new_status, most_tag) = comm, names_of(comm)
        self.most_tag = most_tag - FIRST_TAG

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
        MismatchError: a message has another length; on every rank, before any is sent.
    """
    messages, own, size = Messages(comm), comm.Get_rank(), comm.Get_size()
    table = np.empty((size, 2, size), np.int64)
    comm.Allgather(np.array([each.nbytes for each in (*sends, *receives)], np.int64), table)
    for sender, receiver in np.argwhere(table[:, 0] != table[:, 1].T):
        raise MismatchError(
            f"all_to_all: expected {table[receiver, 1, sender]:,} bytes for rank {receiver} from rank {sender}, got "
            f"{table[sender, 0, receiver]:,}"
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


# --- Messages that say their dtype and shape: one of another kind than its receiver expects is refused. ---
# A message begins with a header and its first bytes, so that a short one is a single message of MPI. The header has the
# tag of the rest of a longer one, whose receiver posts it once it knows the sender and has compared. If it expects
# another kind it replies with that, so that both ranks raise.

#: A header: the message's bytes and the tag of its rest, int64; then its kind as text, filled with zeros.
_NUMBERS, _HEADER_BYTES = 2, 256
_KIND_BYTES = _HEADER_BYTES - _NUMBERS * 8
#: The most bytes that travel with a header: what MPI copies anyway, as it sends them without waiting for the receiver.
_FIRST_BYTES = 16 << 10
#: Tags of rests, used in turn, above those of this package's other messages; those of replies and a program's follow.
_REST_TAGS = range(64, 1088)
_OWN_TAGS = _REST_TAGS.stop + len(_REST_TAGS)


class DescribedMessages:
    """Sends and receives arrays of a kind, which both sides give: a text, such as a tensor's shape and dtype.

    Args:
        comm: an mpi4py communicator, still owned by the caller; None: the one rank sends to itself.
    """

    def __init__(self, comm: Intracomm | None):
        self.plain: Messages | OwnMessages = OwnMessages() if comm is None else Messages(comm)
        self._most_tag = self.plain.most_tag - _OWN_TAGS
        self._rests, self._rank = 0, 0 if comm is None else comm.Get_rank()

    def send(self, array: np.ndarray, kind: str, rank: int, tag: int) -> Sent:
        """Start to send contiguous bytes; they may not be written before the message is complete."""
        tag, first = self._own_tag(tag), min(array.size, _FIRST_BYTES)
        rest_tag = _REST_TAGS[self._rests % len(_REST_TAGS)]
        head = np.zeros(_HEADER_BYTES + first, np.uint8)
        head[: _NUMBERS * 8].view(np.int64)[:] = array.size, rest_tag
        head[_NUMBERS * 8 : _HEADER_BYTES] = _bytes_of(kind)
        head[_HEADER_BYTES:] = array[:first]
        parts, reply = [self.plain.send(head, rank, tag)], np.zeros(_KIND_BYTES, np.uint8)
        if array.size > first:
            self._rests += 1
            parts.append(self.plain.send(array[first:], rank, rest_tag))
            if isinstance(self.plain, Messages):  # one rank alone learns of it as the receiver
                parts.append(self.plain.receive(reply, rank, rest_tag + len(_REST_TAGS)))
        return Sent(parts, reply, partial(_refused, rank, self._rank, kind))

    def receive(self, room_for: Callable[[str], np.ndarray], kind: str, rank: int | None, tag: int) -> Received:
        """Start to receive; rank None: from any rank.

        room_for: returns contiguous bytes for a message of a kind. kind: the only one that is accepted; "": any.
        """
        return Received(self.plain, room_for, kind, rank, self._own_tag(tag), self._rank)

    def _own_tag(self, tag: int) -> int:
        if not isinstance(tag, Integral) or not 0 <= tag <= self._most_tag:
            raise ArgumentError(f"tag: expected 0 to {self._most_tag}, the same on both sides, got {tag!r}")
        return _OWN_TAGS + int(tag)


class Sent:
    """A message that this rank has sent.

    Args:
        parts: MPI's messages, with the one that replies.
        reply: the kind that the receiver of a long message expects; zeros: this one, or the message is short.
        refused: returns the error for such a kind.
    """

    source = -1

    def __init__(self, parts: list[Message | OwnMessage], reply: np.ndarray, refused: Callable[[str], MismatchError]):
        self._parts, self._reply, self._refused = parts, reply, refused

    def done(self) -> bool:
        """Return, without blocking, whether it has left; MismatchError if its receiver has refused it."""
        self._parts = [part for part in self._parts if not part.done()]
        if not self._parts and self._reply[0]:
            raise self._refused(_text(self._reply))
        return not self._parts


class Received:
    """A message that this rank expects.

    Args:
        messages: that receive it.
        room_for, kind: see `DescribedMessages.receive`.
        rank: the sender; None: any.
        tag: of its beginning.
        own: this rank.
    """

    def __init__(
        self, messages: Messages | OwnMessages, room_for: Callable[[str], np.ndarray], kind: str, rank: int | None,
        tag: int, own: int,
    ):  # fmt: skip
        self._messages, self._room_for, self._kind = messages, room_for, _bytes_of(kind)
        self._head = np.empty(_HEADER_BYTES + _FIRST_BYTES, np.uint8)
        self._on_way: list[Message | OwnMessage] = [messages.receive(self._head, rank, tag, at_most=True)]
        self._sent_kind, self._is_other, self._own = "", False, own
        #: The rank that sent it; -1 until its beginning has arrived.
        self.source = -1

    def done(self) -> bool:
        """Return, without blocking, whether it is complete; MismatchError if it is of another kind than the array.

        It is received whole all the same, as its sender may wait for that.
        """
        while self._on_way:
            if not self._on_way[-1].done():
                return False
            if self.source < 0:
                self._on_way = self._begin_rest(self._on_way[0].source)
            else:
                self._on_way.pop()
        if self._is_other:
            raise _refused(self._own, self.source, self._sent_kind, _text(self._kind))
        return True

    def _begin_rest(self, source: int) -> list[Message | OwnMessage]:
        """Compare the header, take what came with it, and start to receive the rest and to reply."""
        self.source, self._sent_kind = source, _text(self._head[_NUMBERS * 8 : _HEADER_BYTES])
        size, rest_tag = self._head[: _NUMBERS * 8].view(np.int64).tolist()
        expected = _text(self._kind)
        self._is_other = expected not in ("", self._sent_kind)
        array = np.empty(size, np.uint8) if self._is_other else self._room_for(self._sent_kind)
        first = min(size, _FIRST_BYTES)
        array[:first] = self._head[_HEADER_BYTES:][:first]
        if size == first:
            return []
        on_way = [self._messages.receive(array[first:], source, rest_tag)]
        if isinstance(self._messages, Messages):
            reply = self._kind if self._is_other else np.zeros_like(self._kind)
            on_way.append(self._messages.send(reply, source, rest_tag + len(_REST_TAGS)))
        return on_way


def _refused(receiver: int, sender: int, sent: str, expected: str) -> MismatchError:
    """Return the error of both ranks, of which the job's last line has one."""
    return MismatchError(
        f"recv: expected {expected} on rank {receiver}, got {sent} from rank {sender}; send and receive equal shapes "
        f"and dtypes"
    )


def _bytes_of(kind: str) -> np.ndarray:
    """Return a kind as a header has it: a long one ends in its checksum."""
    text = kind.encode()
    if len(text) > _KIND_BYTES:
        checksum = f" {zlib.crc32(text):08x}".encode()
        text = text[: _KIND_BYTES - len(checksum)] + checksum
    return np.frombuffer(text.ljust(_KIND_BYTES, b"\0"), np.uint8)


def _text(kind: np.ndarray) -> str:
    return kind.tobytes().rstrip(b"\0").decode(errors="replace")


class OwnMessages:
    """Messages of a world's one rank to itself, with the methods of `Messages`: each is copied when it is sent."""

    most_tag = 32767

    def __init__(self) -> None:
        self._sent: dict[int, deque[np.ndarray]] = defaultdict(deque)
        self._expected: dict[int, deque[OwnMessage]] = defaultdict(deque)

    def send(self, array: np.ndarray, rank: int, tag: int) -> OwnMessage:
        """Send contiguous bytes, which may be written at once."""
        self._sent[tag].append(array.copy())
        self._match(tag)
        return OwnMessage(None)

    def receive(self, array: np.ndarray, rank: int | None, tag: int, *, at_most: bool = False) -> OwnMessage:
        """Start to receive into contiguous bytes, at least as many as are sent."""
        message = OwnMessage(array)
        self._expected[tag].append(message)
        self._match(tag)
        return message

    def _match(self, tag: int) -> None:
        while self._sent[tag] and self._expected[tag]:
            self._expected[tag].popleft().take(self._sent[tag].popleft())


class OwnMessage:
    """A message of this rank's to itself; array: receives it; None: it is sent."""

    source = 0

    def __init__(self, array: np.ndarray | None):
        self._array = array

    def take(self, sent: np.ndarray) -> None:
        """Receive what was sent."""
        if self._array is not None:
            self._array[: sent.size] = sent
        self._array = None

    def done(self) -> bool:
        """Return whether it is complete."""
        return self._array is None
