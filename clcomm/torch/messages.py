"""Messages between two ranks of a group, without blocking."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch

from clcomm.communicator import Communicator
from clcomm.errors import ArgumentError
from clcomm.tensors.arrays import bytes_of
from clcomm.torch.tensors import give_back, on_host
from clcomm.torch.work import OwnWork
from clcomm.transport.mpi_messages import Message, Messages

#: Tests of a message before the rank that waits for it gives its core away, and the pauses then.
_TESTS, _PAUSE_S = 2000, 2e-4


class GroupMessages:
    """Starts the messages of a group's rank.

    Args:
        comm: the group's Communicator.
    """

    def __init__(self, comm: Communicator):
        self._comm = comm
        self._messages = None if comm.comm is None else Messages(comm.comm)

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> MessageWork:
        """Start to send a tensor; it may not be written before the work is complete."""
        values = on_host(tensor)
        message = self._open().send(bytes_of(values), rank, tag)
        return MessageWork(self._comm, message, [values], f"send to rank {rank}", lambda: None)

    def receive(self, tensor: torch.Tensor, rank: int | None, tag: int) -> MessageWork:
        """Start to receive a tensor; rank None: from any rank."""
        values = on_host(tensor)
        message = self._open().receive(bytes_of(values), rank, tag)
        name = "recv from any rank" if rank is None else f"recv from rank {rank}"
        return MessageWork(self._comm, message, [tensor], name, lambda: give_back(values, tensor))

    def _open(self) -> Messages:
        if self._messages is None:
            self._refuse()
        return self._messages

    def _refuse(self) -> NoReturn:
        raise ArgumentError("dst, src: expected another rank of the group, which has only this one")


class MessageWork(OwnWork):
    """A message on its way.

    Args:
        comm: the group's Communicator.
        message: MPI's part.
        outputs: the tensors that belong to it.
        name: what messages of the watchdog call it.
        finish: called once, when it is complete.
    """

    def __init__(
        self, comm: Communicator, message: Message, outputs: list[torch.Tensor], name: str, finish: Callable[[], None]
    ):
        super().__init__(outputs, name)
        self._comm, self._message = comm, message
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until it is complete, and raise its error; a timeout above 0 raises one too."""
        if not self.is_completed():
            with self._comm.waiting_for(self._name):
                self._wait(timeout.total_seconds())
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
            return True

    def source_rank(self) -> int:
        """Return the rank in the group that sent it."""
        return self._message.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """Return a future of the list of tensors, complete when a thread of its own has seen the message complete."""
        future: torch.futures.Future = torch.futures.Future()

        def complete() -> None:
            try:
                self.wait()
                future.set_result(self._outputs)
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=complete, name="clcomm-message", daemon=True).start()
        return future
