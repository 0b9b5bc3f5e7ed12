"""Ranks that have joined: how they learn what the other ranks do next, and what they contribute to it.

As long as nobody has joined, operations cost nothing more. A rank that joins starts an all-gather that the others do
not know of, so their next operation raises its notice on every rank, or their next step has its gradients, which say
so too. From then on they tell it in that all-gather what comes next, before every step and operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from clcomm.communicator import Communicator
from clcomm.errors import ArgumentError
from clcomm.horovod import background, world
from clcomm.horovod.movement import ReduceOp

#: What a rank tells the others: that it has joined, or that an operation follows; from 0 up: a step of that optimizer.
HAS_JOINED, OPERATES = -1, -2
_NOTICE = "join: expected operations that are waited for at once while ranks have joined, got a started one"
#: The operations in which a rank that has joined takes part.
_SERVED = ("all_reduce", "all_gathers", "broadcast", "broadcast_object", "barrier")


def tell(number: int) -> Any:
    """Start telling all ranks what this one does next; `wait()` of the handle returns what each does."""
    comm = world.communicator()
    out = np.empty((comm.size, 1), np.int64)
    return comm.all_gather_async(np.array([number]), out=out, label="join")


def waiting(comm: Communicator) -> Any:
    """Return a block in which this rank has joined: operations that the others have not announced raise its notice."""
    return comm.refusing(_NOTICE)


def is_notice(error: Exception) -> bool:
    """Return whether an error is the notice of a rank that has joined; from now on all know of it."""
    found = isinstance(error, ArgumentError) and str(error).startswith(_NOTICE)
    if found:
        world.note_joined(True)
    return found


def announce(name: str, arguments: Sequence[object]) -> None:
    """Tell ranks that have joined which operation follows; collective. Raises ArgumentError on all others for some.

    name, arguments: a function of `movement`, and what it takes after the Communicator.
    """
    comm, everyone = world.communicator(), tell(OPERATES).wait().reshape(-1).tolist()
    if max(everyone) >= 0:
        raise ArgumentError(
            f"join: expected the same call on every rank, got {name} here and an optimizer's step elsewhere"
        )
    refused = ""
    if name not in _SERVED:
        refused = f"no {name} while ranks have joined; call it after join()"
    elif name.startswith("broadcast") and everyone[arguments[1]] == HAS_JOINED:
        refused = f"a root that has not joined, got rank {arguments[1]}"
    first, *rest = arguments or (None,)
    described = [(tuple(each.shape), each.dtype) for each in first] if isinstance(first, list) else None
    comm.broadcast_object(None if refused else (name, described, rest), _speaker(everyone), label="join")
    if refused:
        raise ArgumentError(f"join: expected {refused}")


def take_part(everyone: Sequence[int]) -> None:
    """Contribute nothing to the operation that the others have announced: zeros, no rows, or what changes no result."""
    comm = world.communicator()
    announced = comm.broadcast_object(None, _speaker(everyone), label="join")
    if announced is None:
        return
    name, described, rest = announced
    if name == "all_reduce":
        rest[2] = 1.0  # what is contributed is not scaled
    sent = None if described is None else [_contribution(name, rest, *each) for each in described]
    background.run(comm, name, [] if name == "barrier" else [sent, *rest])


def _speaker(everyone: Sequence[int]) -> int:
    return next(rank for rank, number in enumerate(everyone) if number != HAS_JOINED)


def _contribution(name: str, rest: Sequence[object], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if name == "all_gathers":
        return torch.zeros((0, *shape[1:]), dtype=dtype)
    value: float = 0
    if rest and rest[0] is ReduceOp.Product:
        value = 1
    elif rest and rest[0] in (ReduceOp.Min, ReduceOp.Max):
        is_least = rest[0] is ReduceOp.Max
        if dtype == torch.bool:
            value = not is_least
        else:
            limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
            value = limits.min if is_least else limits.max
    return torch.full(shape, value, dtype=dtype)
