"""Messages that say what they hold: one of another dtype or shape than its receiver expects is refused, not read.

A message begins with a header and its first bytes, so that a short one is a single message of MPI. The header has the
tag of the rest of a longer one, whose receiver posts it once it knows the sender and has compared.
"""

from __future__ import annotations

import zlib

import numpy as np

from clcomm.errors import ArgumentError, MismatchError
from clcomm.transport.mpi_messages import Message, Messages
from clcomm.transport.mpi_runtime import Intracomm

#: A header: the message's bytes and the tag of its rest, int64; then its kind as text, filled with zeros.
_NUMBERS, _HEADER_BYTES = 2, 128
_KIND_BYTES = _HEADER_BYTES - _NUMBERS * 8
#: The most bytes that travel with a header: what MPI copies anyway, as it sends them without waiting for the receiver.
_FIRST_BYTES = 16 << 10
#: The tags of rests, used in turn, above those of this package's other messages; a program's tags follow.
_REST_TAGS = range(64, 1088)


class DescribedMessages:
    """Sends and receives arrays of a kind, which both sides give: a text, such as a tensor's shape and dtype.

    Args:
        comm: an mpi4py communicator, still owned by the caller.
    """

    def __init__(self, comm: Intracomm):
        self.plain = Messages(comm)
        self._most_tag = self.plain.most_tag - _REST_TAGS.stop
        self._rests = 0

    def send(self, array: np.ndarray, kind: str, rank: int, tag: int) -> Sent:
        """Start to send contiguous bytes; they may not be written before the message is complete."""
        tag, first = self._own_tag(tag), min(array.size, _FIRST_BYTES)
        rest_tag = _REST_TAGS[self._rests % len(_REST_TAGS)]
        head = np.zeros(_HEADER_BYTES + first, np.uint8)
        head[: _NUMBERS * 8].view(np.int64)[:] = array.size, rest_tag
        text = _shortened(kind)
        head[_NUMBERS * 8 :][: len(text)] = np.frombuffer(text, np.uint8)
        head[_HEADER_BYTES:] = array[:first]
        parts = [self.plain.send(head, rank, tag)]
        if array.size > first:
            self._rests += 1
            parts.append(self.plain.send(array[first:], rank, rest_tag))
        return Sent(parts)

    def receive(self, array: np.ndarray, kind: str, rank: int | None, tag: int) -> Received:
        """Start to receive contiguous bytes; rank None: from any rank."""
        return Received(self.plain, array, kind, rank, self._own_tag(tag))

    def _own_tag(self, tag: int) -> int:
        if not 0 <= tag <= self._most_tag:
            raise ArgumentError(f"tag: expected 0 to {self._most_tag}, got {tag}")
        return _REST_TAGS.stop + tag


class Sent:
    """A message that this rank has sent; parts: MPI's."""

    source = -1

    def __init__(self, parts: list[Message]):
        self._parts = parts

    def done(self) -> bool:
        """Return, without blocking, whether it has left."""
        self._parts = [part for part in self._parts if not part.done()]
        return not self._parts


class Received:
    """A message that this rank expects.

    Args:
        messages: that receive it.
        array: receives its bytes.
        kind: of the array.
        rank: the sender; None: any.
        tag: of its beginning.
    """

    def __init__(self, messages: Messages, array: np.ndarray, kind: str, rank: int | None, tag: int):
        self._messages, self._array, self._kind = messages, array, kind
        self._head = np.empty(_HEADER_BYTES + _FIRST_BYTES, np.uint8)
        self._on_way: Message | None = messages.receive(self._head, rank, tag, at_most=True)
        self._sent_kind = b""
        #: The rank that sent it; -1 until its beginning has arrived.
        self.source = -1

    def done(self) -> bool:
        """Return, without blocking, whether it is complete; MismatchError if it is of another kind than the array.

        It is received whole all the same, as its sender may wait for that.
        """
        while self._on_way is not None:
            if not self._on_way.done():
                return False
            self._on_way = self._begin_rest() if self.source < 0 else None
        if self._sent_kind != _shortened(self._kind):
            raise MismatchError(
                f"recv: expected {self._kind}, got {self._sent_kind.decode(errors='replace')} from rank "
                f"{self.source}; send and receive tensors of equal shape and dtype"
            )
        return True

    def _begin_rest(self) -> Message | None:
        """Compare the header, take what came with it, and start to receive the rest; None: there is none."""
        assert self._on_way is not None
        self.source = self._on_way.source
        size, rest_tag = self._head[: _NUMBERS * 8].view(np.int64).tolist()
        self._sent_kind = self._head[_NUMBERS * 8 : _HEADER_BYTES].tobytes().rstrip(b"\0")
        if self._sent_kind != _shortened(self._kind):
            self._array = np.empty(size, np.uint8)
        first = min(size, _FIRST_BYTES)
        self._array[:first] = self._head[_HEADER_BYTES:][:first]
        return self._messages.receive(self._array[first:], self.source, rest_tag) if size > first else None


def _shortened(kind: str) -> bytes:
    """Return a kind as a header has it: a long one ends in its checksum."""
    text = kind.encode()
    if len(text) <= _KIND_BYTES:
        return text
    checksum = f" {zlib.crc32(text):08x}".encode()
    return text[: _KIND_BYTES - len(checksum)] + checksum
