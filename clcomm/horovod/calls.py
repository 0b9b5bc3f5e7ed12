"""What Horovod's operations share: how they are queued, and the checks of their arguments.

Names are labels of the Communicator's stats. Unlike Horovod, which matches operations by their names, ranks call them
in the same order; where they do not, every rank raises the same MismatchError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from clcomm.communicator import Communicator
from clcomm.errors import ArgumentError
from clcomm.horovod import handles, world
from clcomm.horovod.handles import Handle, synchronize
from clcomm.horovod.movement import ReduceOp
from clcomm.horovod.world import ProcessSet, global_process_set

Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product


def start(process_set: ProcessSet, work: Callable[[Communicator], Any]) -> Handle:
    """Queue an operation on a set's ranks."""
    world.require_all()
    return handles.start(partial(work, process_set.communicator()))


def chosen_op(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """Return the operation of the arguments `op` and `average`, of which the second is Horovod's older one."""
    if op is not None and average is not None:
        raise ArgumentError("op: expected op or average, got both")
    if op is None:
        return Sum if average is False else Average
    if not isinstance(op, ReduceOp):
        raise ArgumentError(f"op: expected hvd.Average, Sum, Adasum, Min, Max or Product, got {op!r}")
    return op


def copied_onto(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Copy a value to a tensor, and return that."""
    with torch.no_grad():
        return target.copy_(value)


def listed(tensors: Any) -> list[torch.Tensor]:
    """Return an operation's tensors; ArgumentError for anything but a list of them."""
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
        raise ArgumentError(f"tensors: expected a list of tensors, got {type(tensors).__name__}")
    return list(tensors)


def single(handle: Handle) -> Handle:
    """Let a handle of a group of one return its tensor instead of a list."""
    handle.take_first()
    return handle


def root_in(process_set: ProcessSet, root_rank: int) -> int:
    """Return the rank in a set of a rank in the world; ArgumentError where it does not belong to it."""
    ranks = process_set._require_added()
    if isinstance(root_rank, bool) or root_rank not in ranks:
        raise ArgumentError(f"root_rank: expected one of the ranks {ranks}, got {root_rank!r}")
    return ranks.index(root_rank)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the set has called it."""
    synchronize(start(process_set, lambda comm: comm.barrier()))
