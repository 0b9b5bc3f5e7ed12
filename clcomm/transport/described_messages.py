"""Messages that say what they hold: one of another dtype or shape than its receiver expects is refused, not read.

A message begins with a header and its first bytes, so that a short one is a single message of MPI. The header has the
tag of the rest of a longer one, whose receiver posts it once it knows the sender and has compared.
"""

from __future__ import annotations

import zlib
from collections import defaultdict, deque
from collections.abc import Callable
from numbers import Integral

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
        comm: an mpi4py communicator, still owned by the caller; None: the one rank sends to itself.
    """

    def __init__(self, comm: Intracomm | None):
        self.plain: Messages | OwnMessages = OwnMessages() if comm is None else Messages(comm)
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

    def receive(self, room_for: Callable[[str], np.ndarray], kind: str, rank: int | None, tag: int) -> Received:
        """Start to receive; rank None: from any rank.

        room_for: returns contiguous bytes for a message of a kind. kind: the only one that is accepted; "": any.
        """
        return Received(self.plain, room_for, kind, rank, self._own_tag(tag))

    def _own_tag(self, tag: int) -> int:
        if not isinstance(tag, Integral) or not 0 <= tag <= self._most_tag:
            raise ArgumentError(f"tag: expected 0 to {self._most_tag}, the same on both sides, got {tag!r}")
        return _REST_TAGS.stop + int(tag)


class Sent:
    """A message that this rank has sent; parts: MPI's."""

    source = -1

    def __init__(self, parts: list[Message | OwnMessage]):
        self._parts = parts

    def done(self) -> bool:
        """Return, without blocking, whether it has left."""
        self._parts = [part for part in self._parts if not part.done()]
        return not self._parts


class Received:
    """A message that this rank expects.

    Args:
        messages: that receive it.
        room_for, kind: see `DescribedMessages.receive`.
        rank: the sender; None: any.
        tag: of its beginning.
    """

    def __init__(
        self, messages: Messages | OwnMessages, room_for: Callable[[str], np.ndarray], kind: str, rank: int | None,
        tag: int,
    ):  # fmt: skip
        self._messages, self._room_for, self._kind = messages, room_for, _shortened(kind)
        self._head = np.empty(_HEADER_BYTES + _FIRST_BYTES, np.uint8)
        self._on_way: Message | OwnMessage | None = messages.receive(self._head, rank, tag, at_most=True)
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
        if self._is_other:
            raise MismatchError(
                f"recv: expected {self._kind.decode(errors='replace')}, got "
                f"{self._sent_kind.decode(errors='replace')} from rank {self.source}; send and receive equal "
                f"shapes and dtypes"
            )
        return True

    @property
    def _is_other(self) -> bool:
        return self._kind not in (b"", self._sent_kind)

    def _begin_rest(self) -> Message | OwnMessage | None:
        """Compare the header, take what came with it, and start to receive the rest; None: there is none."""
        assert self._on_way is not None
        self.source = self._on_way.source
        size, rest_tag = self._head[: _NUMBERS * 8].view(np.int64).tolist()
        self._sent_kind = self._head[_NUMBERS * 8 : _HEADER_BYTES].tobytes().rstrip(b"\0")
        array = np.empty(size, np.uint8) if self._is_other else self._room_for(self._sent_kind.decode())
        first = min(size, _FIRST_BYTES)
        array[:first] = self._head[_HEADER_BYTES:][:first]
        return self._messages.receive(array[first:], self.source, rest_tag) if size > first else None


def _shortened(kind: str) -> bytes:
    """Return a kind as a header has it: a long one ends in its checksum."""
    text = kind.encode()
    if len(text) <= _KIND_BYTES:
        return text
    checksum = f" {zlib.crc32(text):08x}".encode()
    return text[: _KIND_BYTES - len(checksum)] + checksum


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
