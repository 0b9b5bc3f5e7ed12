"""Messages from rank to rank: arrays that are sent and received, checked, counted and timed."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from clcomm.base.errors import ArgumentError, RankNames
from clcomm.base.host.arrays import BFLOAT16, dtype_name, host_array, note_write
from clcomm.comm.collectives.arguments import check_peer, check_separate, flat, writable
from clcomm.comm.collectives.in_flight import Notifier
from clcomm.comm.collectives.runner import CollectiveRunner
from clcomm.comm.collectives.world import World
from clcomm.comm.stats.events import Collective
from clcomm.comm.transport.mpi_communicators import ANY_RANK
from clcomm.comm.transport.pending import advance_with_others, wait_until

if TYPE_CHECKING:
    from clcomm.comm.transport.mpi_messages import DescribedMessages, Received, Sent


class MessageHandle:
    """A started message: `wait()` returns a received array, `done()` returns without blocking whether it is complete.

    Args:
        message: on its way; None: to or from nobody, which is complete.
        finish: called once, when it is complete, by any thread; returns what `wait` does.
        waiting: returns a context for the time in which the caller blocks, for the watchdog.
        notify: called with its event once it is complete.
        begun: the event as far as it is known.
    """

    def __init__(
        self,
        message: Sent | Received | None,
        finish: Callable[[], Any],
        waiting: Callable[[], AbstractContextManager[None]],
        notify: Callable[[Collective], object],
        begun: Collective,
    ):
        self._message, self._waiting, self._notify, self._begun = message, waiting, notify, begun
        self._finish: Callable[[], Any] | None = finish
        self._lock, self._waits_from_s = threading.Lock(), math.inf
        self._result: Any = None
        #: What `wait` raises; None: nothing.
        self.error: Exception | None = None

    def wait(self, block: Callable[[Callable[[], bool]], object] = wait_until) -> Any:
        """Block until it is complete, return the received array, None for a sent one, and raise its error."""
        if not self.done():
            self._waits_from_s = perf_counter()
            with self._waiting():
                block(self.done)
        if self.error is not None:
            raise self.error
        return self._result

    Wait = wait  # mpi4py's name

    def done(self) -> bool:
        """Return whether it is complete; a sent array may then be written, a received one read."""
        with self._lock:
            if self._finish is None:
                return True
            try:
                if self._message is not None and not self._message.done():
                    return False
                self._result = self._finish()
            except Exception as error:
                self.error = error
            self._finish = None
            if self._message is not None:
                self._notify(self._event())
            return True

    Test = done

    @property
    def source(self) -> int:
        """The rank that sent it; -1 until it has arrived, and for a sent one."""
        return -1 if self._message is None else self._message.source

    def _event(self) -> Collective:
        now_s, event, got = perf_counter(), self._begun, self._result
        waits = ((self._waits_from_s, now_s),) if self._waits_from_s < now_s else ()
        if got is not None:
            event = event._replace(nbytes=got.nbytes, shape=got.shape, dtype=dtype_name(got.dtype))
        return event._replace(
            seconds=now_s - event.began_s, failed=self.error is not None,
            exposed_s=sum(end - at for at, end in waits), exposed=waits,
        )  # fmt: skip


class StartedMessages:
    """A Communicator's messages: what starts them, and those that are not complete."""

    def __init__(self, world: World, runner: CollectiveRunner, notifier: Notifier, name_ranks: RankNames):
        self._world, self._runner, self._notifier, self._name_ranks = world, runner, notifier, name_ranks
        self._described: DescribedMessages | None = None
        self._open: list[tuple[str, MessageHandle]] = []

    def described(self) -> DescribedMessages:
        """Return what sends and receives them."""
        self._runner.require_open()
        if self._described is None:
            from clcomm.comm.transport.mpi_messages import DescribedMessages  # here, as most programs send none

            self._described = DescribedMessages(self._world.comm)
        return self._described

    def begin(
        self, operation: str, message: Sent | Received | None, peer: int | str | None, tag: int, label: str,
        array: np.ndarray | None, finish: Callable[[], Any],
    ) -> MessageHandle:  # fmt: skip
        """Return the handle of a message that has been started, which waits of this thread advance."""
        other = "any rank" if isinstance(peer, str) else "nobody" if peer is None else self._name_ranks([peer])
        name = f"{operation} {'to' if operation == 'send' else 'from'} {other} with tag {tag}"
        begun = Collective(operation, label, 0 if array is None else array.nbytes, 0.0, self._world.base.name,
                           self._runner.sequence, began_s=perf_counter(), wait_s=None,
                           shape=None if array is None else array.shape,
                           dtype="" if array is None else dtype_name(array.dtype))  # fmt: skip
        waits = partial(self._runner.waiting_for, name, label, peer=None if isinstance(peer, str) else peer)
        waiting = partial(_refuse_to_wait, name) if self._world.comm is None else waits
        handle = MessageHandle(message, finish, waiting, self._notifier.notify_message, begun)
        if not handle.done():
            self._open = [(each, other) for each, other in self._open if not other.done()]
            self._open.append((name, handle))
            advance_with_others(handle.done)
        return handle

    def require_complete(self) -> None:
        """Raise ArgumentError, on every rank, if a message that this rank has started is not complete; collective."""
        left = [name for name, handle in self._open if not handle.done()]
        if left:
            self._runner.refuse(
                f"finalize: expected messages that are complete, got {len(left)} that are not, the first {left[0]}; "
                f"call wait() of what isend and irecv return"
            )


def _refuse_to_wait(name: str) -> AbstractContextManager[None]:
    raise ArgumentError(f"{name}: expected it to be sent before, as no other rank can send it; use sendrecv or isend")


class MessageCalls:
    """The Communicator's messages between two ranks (a base class of it).

    A message is matched by its two ranks and its tag; those of equal ranks and tag arrive in the order in which they
    were sent. `dest` and `source` are ranks, or None: nobody, as beyond the edge of a grid, and the call does nothing;
    mpi4py's PROC_NULL and ANY_SOURCE are None and "any".
    """

    size: int
    runner: CollectiveRunner
    messages: StartedMessages

    def send(self, array: np.ndarray, dest: int | None, tag: int = 0, *, label: str = "") -> None:
        """Send an array, and return when it may be written again: maybe before, maybe after it is received.

        Args:
            array: any shape and numeric dtype; what is not contiguous is copied first.
            dest: the rank that receives it, which gives the same tag, shape and dtype.
            tag: a number from 0 up that sets messages apart.
            label: the name under which it is counted.

        Raises:
            MismatchError: the receiver has refused an array above 16 KiB, as of another shape or dtype than it expects.
        """
        self.isend(array, dest, tag, label=label).wait()

    def isend(self, array: np.ndarray, dest: int | None, tag: int = 0, *, label: str = "") -> MessageHandle:
        """Start to send an array, which is not to be written before `wait()` of the handle; arguments as for `send`.

        Long messages make progress in calls to the Communicator.
        """
        peer, array = check_peer(dest, "dest", self.size), host_array(array, "array")
        source, messages = flat(array, "array"), self.messages.described()
        sent = None
        if isinstance(peer, int):
            sent = messages.send(source.view(np.uint8), _kind(array), peer, tag)
        return self.messages.begin("send", sent, peer, tag, label, array, lambda: None)

    def recv(
        self, out: np.ndarray | None = None, source: int | str | None = ANY_RANK, tag: int = 0, *, label: str = ""
    ) -> Any:
        """Receive an array, and return it.

        Args:
            out: receives it, of the shape and dtype that are sent; None: a new array.
            source: the rank that sends it; "any": whichever does.
            tag: the sender's.
            label: the name under which it is counted.

        Raises:
            MismatchError: the array is of another shape or dtype than `out`; above 16 KiB on its sender too.
        """
        return self.irecv(out, source, tag, label=label).wait()

    def irecv(
        self, out: np.ndarray | None = None, source: int | str | None = ANY_RANK, tag: int = 0, *, label: str = ""
    ) -> MessageHandle:
        """Start to receive an array, which `wait()` of the handle returns; arguments as for `recv`.

        `source` of the handle is then the sender's rank.
        """
        peer, room = check_peer(source, "source", self.size, takes_any=True), _Room(out)
        messages, received = self.messages.described(), None
        if peer is not None:
            rank = None if isinstance(peer, str) else peer
            received = messages.receive(room.bytes_for, room.kind, rank, tag)
        return self.messages.begin("recv", received, peer, tag, label, room.array, room.finish)

    def sendrecv(
        self,
        array: np.ndarray,
        dest: int | None,
        sendtag: int = 0,
        out: np.ndarray | None = None,
        source: int | str | None = ANY_RANK,
        recvtag: int = 0,
        *,
        label: str = "",
    ) -> Any:
        """Send an array to one rank while receiving one from another, and return that; arguments as there."""
        if out is not None:
            check_separate((name, each) for name, each in (("array", array), ("out", out))
                           if isinstance(each, np.ndarray) and each.flags.c_contiguous)  # fmt: skip
        received = self.irecv(out, source, recvtag, label=label)
        self.isend(array, dest, sendtag, label=label).wait()
        return received.wait()


class _Room:
    """The memory for a message.

    Attributes:
        array: receives it; None: what is sent says its shape and dtype.
        kind: of the array in words; "": any.
    """

    def __init__(self, out: np.ndarray | None):
        self.array = self._given = out
        self.kind = ""
        if out is not None:
            self.array = host_array(out, "out")
            self.kind = _kind(self.array)
            self._flat, self._copy_back = writable(self.array, "out")

    def bytes_for(self, kind: str) -> np.ndarray:
        """Return the memory as bytes."""
        if self.array is None:
            name, _, shape = kind.partition(" ")
            self._given = np.empty(json.loads(shape), BFLOAT16 if name == "bfloat16" else np.dtype(name))
            return self._given.reshape(-1).view(np.uint8)
        return self._flat.view(np.uint8)

    def finish(self) -> np.ndarray | None:
        """Return the received array."""
        if self.array is not None:
            self._copy_back()
            note_write(self.array)
        return self._given


def _kind(array: np.ndarray) -> str:
    """Return what a message says of its array: "float32 [3, 4]"."""
    name = dtype_name(array.dtype)
    if " " in name:
        raise ArgumentError(f"array: expected numbers of one dtype, got {name}; send the fields one by one")
    return f"{name} {list(array.shape)}"
