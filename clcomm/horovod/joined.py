"""Ranks that have joined: how they learn what the other ranks do next, and what they contribute to it.

As long as nobody has joined, operations cost nothing more. A rank that joins starts an all-gather that the others do
not know of, so their next operation raises its notice on every rank, or their next step has its gradients, which say
so too. From then on they tell it in that all-gather what comes next, before every step and operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.comm.communicator import Communicator
from clcomm.horovod import world
from clcomm.horovod.operations import Operation
from clcomm.horovod.world import global_process_set

#: What a rank tells the others: that it has joined, or that an operation follows; from 0 up: a step of that optimizer.
HAS_JOINED, OPERATES = -1, -2


_NOTICE = "join: expected operations that are waited for at once while ranks have joined, got a started one"


def tell(number: int, has_older: bool = False) -> Any:
    """Start telling all ranks what this one does next; `wait()` of the handle returns what each does.

    has_older: whether this rank has begun to reduce gradients of a step that failed.
    """
    comm = world.communicator()
    out = np.empty((comm.size, 2), np.int64)
    return comm.all_gather_async(np.array([number, has_older]), out=out, label="step or join")


def waiting(comm: Communicator) -> Any:
    """Return a block in which this rank has joined: operations that the others have not announced raise its notice."""
    return comm.runner.refusing(_NOTICE)


def is_notice(error: Exception) -> bool:
    """Return whether an error is the notice of a rank that has joined; from now on all know of it."""
    found = isinstance(error, ArgumentError) and str(error).startswith(_NOTICE)
    if found:
        global_process_set.some_joined = True
    return found


def announce(operation: Operation) -> None:
    """Tell ranks that have joined which operation follows; collective. Raises ArgumentError on all others for some."""
    comm, (everyone, _) = world.communicator(), tell(OPERATES).wait().T.tolist()
    if max(everyone) >= 0:
        raise ArgumentError(
            f"join: expected the same call on every rank, got {operation.name} here and an optimizer's step elsewhere"
        )
    refused = ""
    if not operation.serves_joined:
        refused = f"no {operation.name} while ranks have joined; call it after join()"
    elif (sender := operation.sender()) is not None and everyone[sender] == HAS_JOINED:
        refused = f"a root that has not joined, got rank {sender}"
    comm.broadcast_object(None if refused else operation.without_values(), _speaker(everyone), label="join")
    if refused:
        raise ArgumentError(f"join: expected {refused}")


def take_part(everyone: Sequence[int]) -> None:
    """Contribute nothing to the operation that the others have announced: zeros, no rows, or what changes no result."""
    announced: Operation | None = world.communicator().broadcast_object(None, _speaker(everyone), label="join")
    if announced is not None:
        announced.contribution().run(global_process_set.require_collectives())


def _speaker(everyone: Sequence[int]) -> int:
    return next(rank for rank, number in enumerate(everyone) if number != HAS_JOINED)
