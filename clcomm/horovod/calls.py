"""How Horovod's operations run and are started, and the checks of their arguments.

Names are labels of the Communicator's stats. Unlike Horovod, which matches operations by their names, ranks call them
in the same order; where they do not, every rank raises the same MismatchError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from clcomm.errors import ArgumentError
from clcomm.horovod import background, joined, world
from clcomm.horovod.handles import Handle
from clcomm.horovod.lost_ranks import raising_internal_errors
from clcomm.horovod.movement import ReduceOp
from clcomm.horovod.world import ProcessSet, global_process_set

Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product


T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Operation(Generic[R]):
    """An operation on a set's ranks: a function of `movement`, and of `background` where it can be started.

    Attributes:
        process_set: the ranks.
        name: the function's.
        arguments: the function's, after the Communicator.
        change: makes the program's result of the function's.
    """

    process_set: ProcessSet
    name: str
    arguments: tuple[Any, ...]
    change: Callable[[Any], R]

    def single(self: Operation[list[T]]) -> Operation[T]:
        """Return the same of a group of one, whose result is that tensor instead of a list."""
        return Operation(self.process_set, self.name, self.arguments, lambda found: self.change(found)[0])

    def start(self) -> Handle:
        """Start it in the background; it runs at once while ranks have joined."""
        comm = self.process_set.communicator()
        if world.some_joined():
            result = self.run()
            return Handle(background.Started((), lambda: result))
        return Handle(getattr(background, self.name)(comm, *self.arguments).then(self.change))

    @raising_internal_errors()
    def run(self) -> R:
        """Run it and return the result; again, if it told this rank that others have joined."""
        comm = self.process_set.communicator()
        if not world.some_joined():
            try:
                return self.change(background.run(comm, self.name, self.arguments))
            except ArgumentError as error:
                if not joined.is_notice(error):
                    raise
        if self.process_set is not global_process_set:
            raise ArgumentError(
                "process_set: expected all ranks while some have joined, got a set; call it after join()"
            )
        joined.announce(self.name, self.arguments)
        return self.change(background.run(comm, self.name, self.arguments))


def chosen_op(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """Return the operation of the arguments `op` and `average`, of which the second is Horovod's older one."""
    if op is not None and average is not None:
        raise ArgumentError("op: expected op or average, got both")
    if op is None:
        return Sum if average is False else Average
    if not isinstance(op, ReduceOp):
        raise ArgumentError(f"op: expected hvd.Average, Sum, Adasum, Min, Max or Product, got {op!r}")
    return op


def like(tensors: Sequence[torch.Tensor], in_place: bool = False) -> Callable[[Any], list[torch.Tensor]]:
    """Return what brings results, in a list, to the devices of these tensors; in place: to these tensors themselves."""

    @torch.no_grad()
    def change(found: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        pairs = zip(tensors, found, strict=True)
        return [each.copy_(value) if in_place else value.to(each.device) for each, value in pairs]

    return change


def listed(tensors: object) -> list[torch.Tensor]:
    """Return an operation's tensors; ArgumentError for anything but a list of them."""
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
        raise ArgumentError(f"tensors: expected a list of tensors, got {type(tensors).__name__}")
    return list(tensors)


def root_in(process_set: ProcessSet, root_rank: int) -> int:
    """Return the rank in a set of a rank in the world; ArgumentError where it does not belong to it."""
    ranks = process_set._require_added()
    if isinstance(root_rank, bool) or root_rank not in ranks:
        raise ArgumentError(f"root_rank: expected one of the ranks {ranks}, got {root_rank!r}")
    return ranks.index(root_rank)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the set has called it."""
    Operation(process_set, "barrier", (), lambda found: found).run()
