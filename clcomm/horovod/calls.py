"""How a program's calls become operations, with what ranks do while others have joined; and Horovod's all-reduces.

Names are labels of the Communicator's stats. Unlike Horovod, which matches operations by their names, ranks call them
in the same order; where they do not, every rank raises the same MismatchError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from clcomm.base.errors import ArgumentError
from clcomm.comm.collectives.runner import CollectiveRunner, refused_on_all
from clcomm.comm.tensors.background import Started
from clcomm.comm.tensors.collectives import TensorCollectives
from clcomm.horovod import joined
from clcomm.horovod.handles import Handle, run_ended
from clcomm.horovod.operations import (
    AllReduce,
    Barrier,
    Compression,
    Operation,
    ReduceOp,
    SparseAllReduce,
    TensorOperation,
    raising_internal_errors,
)
from clcomm.horovod.world import ProcessSet, global_process_set

Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product


class OperationCall(NamedTuple):
    """A program's call of an operation on a set's ranks; change: makes the program's result of the operation's."""

    process_set: ProcessSet
    operation: Operation
    change: Callable[[Any], Any]

    def single(self) -> OperationCall:
        """Return the same of a group of one, whose result is that tensor instead of a list."""
        return self._replace(change=lambda found: self.change(found)[0])

    def start(self) -> Handle:
        """Start it in the background; it runs at once while ranks have joined."""
        ranks = _collectives(self.process_set)
        if global_process_set.some_joined:
            return Handle(Started.of(self.run()))
        started = self.operation.start(ranks).then(self.change)
        return Handle(started, self.run if self.process_set is global_process_set else None)

    @raising_internal_errors()
    def run(self) -> Any:
        """Run it and return the result; again, if it told this rank that others have joined."""
        ranks = _collectives(self.process_set)
        if not global_process_set.some_joined:
            try:
                return self.change(self.operation.run(ranks))
            except ArgumentError as error:
                if not joined.is_notice(error):
                    raise
                run_ended()
        if self.process_set is not global_process_set:
            raise ArgumentError(
                "process_set: expected all ranks while some have joined, got a set; call it after join()"
            )
        joined.announce(self.operation)
        return self.change(self.operation.run(ranks))


def _runner_of(*args: object, **kwargs: object) -> CollectiveRunner | None:
    ranks = next((each for each in (*args, *kwargs.values()) if isinstance(each, ProcessSet)), global_process_set)
    return None if ranks.collectives is None else ranks.collectives.comm.runner


#: Lets a mistake of one rank in a call of a process set's ranks be raised on all of them.
refused_in_set = partial(refused_on_all, runner_of=_runner_of)


def chosen_op(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """Return the operation of the arguments `op` and `average`, of which the second is Horovod's older one."""
    if op is not None and average is not None:
        raise ArgumentError("op: expected op or average, got both")
    if op is None:
        return Sum if average is False else Average
    if not isinstance(op, ReduceOp):
        raise ArgumentError(f"op: expected hvd.Average, Sum, Adasum, Min, Max or Product, got {op!r}")
    return op


@refused_in_set
def call_of(
    kind: Callable[..., TensorOperation], tensors: Any, process_set: ProcessSet, name: str | None, *fields: Any,
    in_place: bool = False, called: str = "tensors",
) -> OperationCall:  # fmt: skip
    """Return the call of an operation on the values of a list of tensors.

    Args:
        kind: makes the operation of the values on the host, the label, and `fields`.
        in_place: whether the tensors get the results.
        called: what an error calls a tensor.
    """
    given, label = listed(tensors), name or ""
    operation = kind(sources(given, process_set, label, name=called), label, *fields)
    return OperationCall(process_set, operation, like(given, process_set, label, in_place=in_place))


class Differentiable(torch.autograd.Function):
    """A call through which gradients flow: of its results' gradients `back` makes those of its tensors."""

    @staticmethod
    def forward(ctx: Any, call: Callable[..., Any], back: Callable[..., Sequence[Any]], *tensors: Any) -> Any:
        ctx.back = back
        return call(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.back(*gradients)


def _collectives(process_set: ProcessSet) -> TensorCollectives:
    return process_set.collectives or process_set.require_collectives()


def sources(
    tensors: Sequence[torch.Tensor], process_set: ProcessSet, label: str = "", *, name: str = "tensors"
) -> list[torch.Tensor]:
    """Return tensors' values on the host, as operations take them; label, name: see `HostCopies.on_host`."""
    copies = _collectives(process_set).copies
    return [copies.on_host(each, label, name=name) for each in tensors]


def like(
    tensors: Sequence[torch.Tensor], process_set: ProcessSet, label: str = "", *, in_place: bool = False
) -> Callable[[Any], list[torch.Tensor]]:
    """Return what brings results, in a list, to the devices of these tensors; in place: to these tensors themselves."""

    @torch.no_grad()
    def change(found: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        copies, pairs = _collectives(process_set).copies, list(zip(tensors, found, strict=True))
        if not in_place:
            return [copies.to_device_of(each, value, label) for each, value in pairs]
        for each, value in pairs:
            copies.give_back(value, each, label)
        return list(tensors)

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
    OperationCall(process_set, Barrier(), lambda found: found).run()


# --- all-reduces ---


@refused_in_set
def _call(
    tensors: Any, average: bool | None, name: str | None, op: ReduceOp | None, prescale_factor: float,
    postscale_factor: float, process_set: ProcessSet, *, in_place: bool = False,
) -> OperationCall:  # fmt: skip
    """Return the call with the arguments of `grouped_allreduce_async`."""
    factors = prescale_factor, postscale_factor
    return call_of(AllReduce, tensors, process_set, name, chosen_op(op, average), *factors, in_place=in_place)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an all-reduce of several tensors; `synchronize` returns the list of results.

    Args:
        tensors: of any dtypes, the same shapes on every rank; not to be changed until the operation is complete.
        average: True: op=Average; False: op=Sum. Use `op`.
        name: the label in stats and messages.
        op: Average (the default), Sum, Min, Max, Product or Adasum.
        prescale_factor, postscale_factor: numbers by which the operands and the result are multiplied.
        process_set: the ranks.
    """
    return _call(tensors, average, name, op, prescale_factor, postscale_factor, process_set).start()


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an all-reduce of several tensors in place; arguments as for `grouped_allreduce_async`."""
    return _call(tensors, average, name, op, prescale_factor, postscale_factor, process_set, in_place=True).start()


@refused_in_set
def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return several tensors' all-reduces; differentiable. compression: `Compression.fp16` sends halves."""
    wanted, given = chosen_op(op, average), listed(tensors)

    def reduced(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(_call([*operands], None, name, wanted, prescale_factor, postscale_factor, process_set).run())

    if compression is Compression.none:
        return list(Differentiable.apply(reduced, reduced, *given))
    small = [compression.compress(each) for each in given]
    found = Differentiable.apply(reduced, reduced, *(each for each, _ in small))
    return [compression.decompress(each, context) for each, (_, context) in zip(found, small, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors over the ranks, in place, and return them."""
    return _call(tensors, average, name, op, prescale_factor, postscale_factor, process_set, in_place=True).run()


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an all-reduce; arguments as for `grouped_allreduce_async`, of one tensor."""
    return _call([tensor], average, name, op, prescale_factor, postscale_factor, process_set).single().start()


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an all-reduce in place; arguments as for `grouped_allreduce_async`, of one tensor."""
    call = _call([tensor], average, name, op, prescale_factor, postscale_factor, process_set, in_place=True)
    return call.single().start()


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: object = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return a tensor's all-reduce; differentiable. Arguments as for `grouped_allreduce`, of one tensor."""
    return grouped_allreduce([tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set)[
        0
    ]


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over the ranks, in place, and return it."""
    return grouped_allreduce_([tensor], average, name, op, prescale_factor, postscale_factor, process_set)[0]


@refused_in_set
def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None = None, op: ReduceOp = Average, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start the sum, or with Average the mean, of sparse COO tensors: indices and values are gathered."""
    if op not in (Average, Sum):
        raise ArgumentError(f"op: expected Average or Sum for a sparse tensor, got {op}")
    copies, label = process_set.require_collectives().copies, name or ""

    def change(total: torch.Tensor) -> torch.Tensor:
        return copies.to_device_of(tensor, total / process_set.size() if op is Average else total, label)

    return OperationCall(process_set, SparseAllReduce(copies.sparse_on_host(tensor, label), label), change).start()
