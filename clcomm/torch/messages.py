"""Messages between two ranks of a group, without blocking."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch

from clcomm.base.errors import ArgumentError
from clcomm.comm.collectives.messages import MessageHandle
from clcomm.comm.communicator import Communicator
from clcomm.comm.stats.events import Collective, Phase
from clcomm.comm.tensors.arrays import HostCopies, bytes_of, described
from clcomm.comm.transport.mpi_messages import DescribedMessages, Received, Sent
from clcomm.comm.transport.pending import advance_with_others, wait_until
from clcomm.torch.interruptions import Interruptions
from clcomm.torch.work import OwnWork, untraced


class GroupMessages:
    """Starts a rank's messages in a group, and notifies its observers of them, which any thread may find complete.

    Observers are notified by one thread at a time: one that would have to wait leaves its events to the other.
    """

    def __init__(self, comm: Communicator, interruptions: Interruptions):
        self._comm, self._copies = comm, HostCopies(self._add)
        self._finished: deque[Collective | Phase] = deque()
        self._notifies = threading.Lock()
        self._wait = interruptions.run
        self._messages = None if comm.comm is None else DescribedMessages(comm.comm)

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> MessageWork:
        """Start to send a tensor; it may not be written before the work is complete."""
        values = self._copies.on_host(tensor)
        message = self._open().send(bytes_of(values), described([tensor]), rank, tag)
        return self._work(message, [values], f"send to rank {rank}", lambda: None, rank)

    def receive(self, tensor: torch.Tensor, rank: int | None, tag: int) -> MessageWork:
        """Start to receive a tensor; rank None: from any rank. Waiting raises MismatchError for one of another kind."""
        values, give_back = self._copies.room_for(tensor), self._copies.give_back
        message = self._open().receive(lambda _: bytes_of(values), described([tensor]), rank, tag)
        name = "recv from any rank" if rank is None else f"recv from rank {rank}"
        return self._work(message, [tensor], name, lambda: give_back(values, tensor), rank)

    def _work(
        self, message: Sent | Received, outputs: list[torch.Tensor], name: str, finish: Callable[[], None],
        peer: int | None,
    ) -> MessageWork:  # fmt: skip
        comm, nbytes = self._comm, sum(each.nbytes for each in outputs)
        begun = Collective(name.split()[0], "", nbytes, 0.0, comm.world.base.name, comm.sequence,
                           began_s=time.perf_counter(), wait_s=None)  # fmt: skip
        waiting = partial(comm.runner.waiting_for, name, peer=peer)
        handle = MessageHandle(message, finish, waiting, self._add, begun)
        if not handle.done():  # two ranks may each wait for a long one that they send before one that they receive
            advance_with_others(handle.done)
        return MessageWork(handle, outputs, name, self._wait)

    def _open(self) -> DescribedMessages:
        if self._messages is None:
            raise ArgumentError("dst, src: expected another rank of the group, which has only this one")
        return self._messages

    def _add(self, event: Collective | Phase) -> None:
        self._finished.append(event)
        while self._finished and self._notifies.acquire(blocking=False):
            try:
                while self._finished:
                    finished, notifier = self._finished.popleft(), self._comm.notifier
                    if isinstance(finished, Phase):
                        notifier.notify_phase(finished)
                    else:
                        notifier.notify_message(finished)
            finally:
                self._notifies.release()


@untraced
class MessageWork(OwnWork):
    """A message on its way.

    Args:
        handle: its own.
        outputs, name: as OwnWork's.
        run: calls a function that waits; see Interruptions.
    """

    def __init__(
        self,
        handle: MessageHandle,
        outputs: list[torch.Tensor],
        name: str,
        run: Callable[[Callable[[], object]], None],
    ):
        super().__init__(outputs, name)
        self._handle, self._run = handle, run

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until it is complete, and raise its error; a timeout above 0 raises one too."""
        seconds = timeout.total_seconds()
        self._handle.wait(lambda done: self._run(partial(self._wait, done, seconds)))
        return True

    def _wait(self, done: Callable[[], bool], seconds: float) -> None:
        if not wait_until(done, seconds):
            raise self._late(seconds)

    def is_completed(self) -> bool:
        done = self._handle.done()
        self._error = self._handle.error
        return done

    def source_rank(self) -> int:
        return self._handle.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the list of tensors, complete when a thread of its own has seen the message complete."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

        def complete() -> None:
            try:
                self.wait()
                future.set_result(self._outputs)
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]

        threading.Thread(target=complete, name="clcomm-message", daemon=True).start()
        return future
