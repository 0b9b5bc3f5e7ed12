"""Messages between two ranks of a group, without blocking."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import NoReturn

import torch

from clcomm.communicator import Communicator
from clcomm.errors import ArgumentError
from clcomm.stats.events import Collective, Phase
from clcomm.tensors.arrays import HostCopies, bytes_of, described
from clcomm.torch.interruptions import Interruptions
from clcomm.torch.work import OwnWork, untraced
from clcomm.transport.described_messages import DescribedMessages, Received, Sent

#: Tests of a message before the rank that waits for it gives its core away, and the pauses then.
_TESTS, _PAUSE_S = 2000, 2e-4


class GroupMessages:
    """Starts a rank's messages in a group."""

    def __init__(self, comm: Communicator, interruptions: Interruptions):
        self._counted = CountedMessages(comm)
        self._copies = HostCopies(self._counted.add)
        self._wait = interruptions.run
        self._messages = None if comm.comm is None else DescribedMessages(comm.comm)

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> MessageWork:
        """Start to send a tensor; it may not be written before the work is complete."""
        values = self._copies.on_host(tensor)
        message = self._open().send(bytes_of(values), described([tensor]), rank, tag)
        return MessageWork(self._counted, message, [values], f"send to rank {rank}", lambda: None, rank, self._wait)

    def receive(self, tensor: torch.Tensor, rank: int | None, tag: int) -> MessageWork:
        """Start to receive a tensor; rank None: from any rank. Waiting raises MismatchError for one of another kind."""
        values, give_back = self._copies.room_for(tensor), self._copies.give_back
        message = self._open().receive(bytes_of(values), described([tensor]), rank, tag)
        name = "recv from any rank" if rank is None else f"recv from rank {rank}"
        return MessageWork(self._counted, message, [tensor], name, lambda: give_back(values, tensor), rank, self._wait)

    def _open(self) -> DescribedMessages:
        if self._messages is None:
            self._refuse()
        return self._messages

    def _refuse(self) -> NoReturn:
        raise ArgumentError("dst, src: expected another rank of the group, which has only this one")


class CountedMessages:
    """Notifies a Communicator's observers of messages and their copies, which any thread may find complete.

    Observers are notified by one thread at a time: one that would have to wait leaves its events to the other.
    """

    def __init__(self, comm: Communicator):
        self.comm = comm
        self._finished: deque[Collective | Phase] = deque()
        self._notifies = threading.Lock()

    def add(self, event: Collective | Phase) -> None:
        self._finished.append(event)
        while self._finished and self._notifies.acquire(blocking=False):
            try:
                while self._finished:
                    finished, notifier = self._finished.popleft(), self.comm.notifier
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
        counted: counts the message once it is complete.
        name: in messages of the watchdog.
        finish: called once, when it is complete.
        peer: the other rank; None: any.
        run: calls a function that waits; see Interruptions.
    """

    def __init__(
        self,
        counted: CountedMessages,
        message: Sent | Received,
        outputs: list[torch.Tensor],
        name: str,
        finish: Callable[[], None],
        peer: int | None,
        run: Callable[[Callable[[], object]], None],
    ):
        super().__init__(outputs, name)
        self._counted, self._message, self._peer, self._run = counted, message, peer, run
        self._finish: Callable[[], None] | None = finish
        self._began_s, self._sequence = time.perf_counter(), counted.comm.sequence
        self._waits_from_s = math.inf

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until it is complete, and raise its error; a timeout above 0 raises one too."""
        if not self.is_completed():
            self._waits_from_s = time.perf_counter()
            with self._counted.comm.runner.waiting_for(self._name, peer=self._peer):
                self._run(partial(self._wait, timeout.total_seconds()))
        if self._error is not None:
            raise self._error
        return True

    def _wait(self, seconds: float) -> None:
        began, tests = time.perf_counter(), 0
        while not self.is_completed():
            tests += 1
            time.sleep(0 if tests < _TESTS else _PAUSE_S)
            if 0 < seconds < time.perf_counter() - began:
                raise self._late(seconds)

    def is_completed(self) -> bool:
        with self._lock:
            if self._finish is None:
                return True
            try:
                if not self._message.done():
                    return False
                self._finish()
            except Exception as error:
                self._error = error
            self._finish = None
            self._counted.add(self._event())
            return True

    def _event(self) -> Collective:
        now_s, operation = time.perf_counter(), self._name.split()[0]
        waits = ((self._waits_from_s, now_s),) if self._waits_from_s < now_s else ()
        return Collective(
            operation, "", sum(each.nbytes for each in self._outputs), now_s - self._began_s, "mpi", self._sequence,
            self._error is not None, began_s=self._began_s, wait_s=None, exposed_s=sum(end - at for at, end in waits),
            exposed=waits,
        )  # fmt: skip

    def source_rank(self) -> int:
        return self._message.source

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
