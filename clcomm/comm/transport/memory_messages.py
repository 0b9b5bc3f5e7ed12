"""Messages between the processes of a host through memory that they share, without MPI.

Each pair of ranks has two rings of bytes, one each way, with a counter of the bytes written and one of those read. A
message is a header and its bytes, in pieces where the ring is full. Its receiver finds the array that it is for, as MPI
does: by context, sender and tag, in the order of sending; what nobody has asked for yet is kept. Every call that waits
or tests advances all messages of the process.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from clcomm.base.errors import LaunchError, name_ranks
from clcomm.base.host.host_processes import stat_fields

#: Bytes before a ring: its counters, on cache lines of their own. Bytes of a header: context, tag and length, int64.
_COUNTERS, _HEADER = 128, 24
#: The bytes of a rank's rings for reading, and the least of one.
_READ_BYTES, _LEAST_BYTES = 1 << 20, 32 << 10
#: Tests of a request before a rank that waits for it sleeps, for how long then, and after how many it looks for deaths.
_TESTS, _PAUSE_S, _TESTS_BETWEEN_LOOKS = 200, 1e-4, 20_000


def fence() -> None:
    """Order this thread's writes and reads of memory before it and after it: a new lock takes an atomic operation."""
    threading.Lock().acquire()


class Mail:
    """This rank's messages to and from the others of a world.

    Args:
        memory: `nbytes(len(pids))` zeroed bytes, shared by all ranks.
        rank: this rank's number.
        pids: all ranks' processes.
    """

    def __init__(self, memory: memoryview, rank: int, pids: Sequence[int]):
        ranks = range(len(pids))
        rings = np.frombuffer(memory, np.uint8).reshape(len(pids), len(pids), -1)
        self.rank, self._pids, self._lock = rank, pids, threading.Lock()
        self._rings_to, self._rings_from = (
            [_Ring(rings[rank, r]) for r in ranks],
            [_Ring(rings[r, rank]) for r in ranks],
        )
        self._to_send: list[deque[Sending]] = [deque() for _ in ranks]
        self._arriving: list[_Arriving | None] = [None for _ in ranks]
        self._expected: dict[int, list[Receiving]] = defaultdict(list)  # by context
        self._kept: dict[int, list[_Arriving]] = defaultdict(list)

    @staticmethod
    def nbytes(ranks: int) -> int:
        """Return the bytes that the rings of `ranks` ranks need."""
        return ranks * ranks * (_COUNTERS + max(_LEAST_BYTES, _READ_BYTES // ranks // 64 * 64))

    def send(self, octets: np.ndarray, rank: int, context: int, tag: int) -> Sending:
        """Start to send bytes, which may not be written before the request is complete."""
        head = np.array([context, tag, octets.size], np.int64).view(np.uint8)
        request = Sending(self, (head, octets))
        with self._lock:
            self._to_send[rank].append(request)
        self.advance()
        return request

    def receive(self, octets: np.ndarray | None, rank: int | None, context: int, tag: int) -> Receiving:
        """Start to receive into an array, which may be longer; None: into a new one. rank None: from any rank."""
        request = Receiving(self, octets, rank, tag)
        with self._lock:
            kept = self._kept[context]
            found = next((each for each in kept if request.takes(each.source, each.tag)), None)
            if found is None:
                self._expected[context].append(request)
            else:
                kept.remove(found)
                request.found = found
        return request

    def advance(self) -> None:
        """Write and read what the rings have room for, unless another thread does."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            for rank, requests in enumerate(self._to_send):
                while requests and self._rings_to[rank].write(requests[0]):
                    requests[0].is_sent = True
                    requests.popleft()
            for rank, ring in enumerate(self._rings_from):
                while ring.unread() and self._read(rank, ring):
                    pass
        finally:
            self._lock.release()

    def _read(self, rank: int, ring: _Ring) -> bool:
        """Read what there is of the next message from a rank; return whether it is complete."""
        message = self._arriving[rank]
        if message is None:
            head = np.empty(_HEADER, np.uint8)
            if ring.unread() < _HEADER:
                return False
            ring.read(head)
            context, tag, size = head.view(np.int64).tolist()
            expected = self._expected[context]
            request = next((each for each in expected if each.takes(rank, tag)), None)
            room = None if request is None else request.octets
            if room is None or room.size < size:
                room = np.empty(size, np.uint8)
            message = _Arriving(rank, tag, room[:size])
            if request is None:
                self._kept[context].append(message)
            else:
                expected.remove(request)
                request.found = message
            self._arriving[rank] = message
        message.left = message.left[ring.read(message.left) :]
        if message.left.size:
            return False
        self._arriving[rank] = None
        return True

    def require_all_live(self) -> None:
        """Raise LaunchError if a rank's process has ended."""
        ended = [rank for rank, pid in enumerate(self._pids) if (stat_fields(pid) or "Z")[0] in ("Z", "X")]
        if ended:
            raise LaunchError(f"ranks: expected all {len(self._pids)} to run, but {name_ranks(ended)} ended before")


class _Ring:
    """Bytes on their way from one rank to another."""

    def __init__(self, memory: np.ndarray):
        counters = memory[:_COUNTERS].view(np.int64).data
        self._written, self._read, self._bytes = counters[:1], counters[8:9], memory[_COUNTERS:]

    def unread(self) -> int:
        return self._written[0] - self._read[0]

    def write(self, message: Sending) -> bool:
        """Write what there is room for of a message; return whether all of it is written."""
        while message.left:
            part, at = message.left[0], self._written[0]
            count = min(part.size, len(self._bytes) - self.unread())
            if part.size and not count:
                return False
            for here, there in self._spans(at, count):
                self._bytes[here] = part[there]
            fence()
            message.left = [part[count:], *message.left[1:]] if count < part.size else message.left[1:]
            self._written[0] = at + count
        return True

    def read(self, out: np.ndarray) -> int:
        """Read into an array what there is, at most as much as it holds; return the number of bytes."""
        at, count = self._read[0], min(out.size, self.unread())
        fence()
        for here, there in self._spans(at, count):
            out[there] = self._bytes[here]
        fence()
        self._read[0] = at + count
        return count

    def _spans(self, at: int, count: int) -> list[tuple[slice, slice]]:
        """Return where `count` bytes from `at` on are in the ring, and in an array of them."""
        start = at % len(self._bytes)
        first = min(count, len(self._bytes) - start)
        spans = [(slice(start, start + first), slice(0, first)), (slice(0, count - first), slice(first, count))]
        return spans if first < count else spans[:1]


class _Arriving:
    """A message that is being read; left: the rest of its bytes."""

    def __init__(self, source: int, tag: int, octets: np.ndarray):
        self.source, self.tag, self.octets, self.left = source, tag, octets, octets


class Waiting:
    """A request like MPI's: `Test` and `Wait`."""

    mail: Mail

    def Test(self, status: Any = None) -> bool:
        raise NotImplementedError

    def Wait(self) -> None:
        """Block until it is complete; raises LaunchError once a rank has ended without completing it."""
        tests = 0
        while not self.Test():
            tests += 1
            if tests < _TESTS:
                os.sched_yield()
                continue
            time.sleep(_PAUSE_S)
            if tests % _TESTS_BETWEEN_LOOKS == 0 and not self.Test():
                self.mail.require_all_live()


class Sending(Waiting):
    """A message to another rank; left: the parts that are not written."""

    def __init__(self, mail: Mail, parts: Sequence[np.ndarray]):
        self.mail, self.left, self.is_sent = mail, list(parts), False

    def Test(self, status: Any = None) -> bool:
        if not self.is_sent:
            self.mail.advance()
        return self.is_sent


class Receiving(Waiting):
    """A message that this rank has asked for; found: the one that is for it."""

    def __init__(self, mail: Mail, octets: np.ndarray | None, source: int | None, tag: int):
        self.mail, self.octets, self._source, self._tag = mail, octets, source, tag
        self.found: _Arriving | None = None
        self._is_complete = False

    def takes(self, source: int, tag: int) -> bool:
        """Return whether a message of this sender and tag is meant."""
        return self._source in (None, source) and self._tag == tag

    def Test(self, status: Any = None) -> bool:
        """Return whether it is complete; ValueError for one longer than the array."""
        if not self._is_complete:
            self.mail.advance()
            if self.found is None or self.found.left.size:
                return False
            got = self.found.octets
            if self.octets is None:
                self.octets = got
            elif got.size > self.octets.size:
                raise ValueError(f"a message of {got.size:,} bytes")
            elif not np.may_share_memory(got, self.octets):
                self.octets[: got.size] = got
            self._is_complete = True
        if status is not None and self.found is not None:
            status.take(self.found.source, self.found.octets.size)
        return True


class AllOf(Waiting):
    """Several requests as one."""

    def __init__(self, mail: Mail, requests: list[Waiting]):
        self.mail, self._left = mail, requests

    def Test(self, status: Any = None) -> bool:
        self._left = [each for each in self._left if not each.Test()]
        return not self._left
