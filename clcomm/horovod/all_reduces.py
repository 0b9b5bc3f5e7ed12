"""Horovod's all-reduces: blocking, in place, and started to be completed later; of one tensor, several, sparse ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from clcomm.base.errors import ArgumentError
from clcomm.horovod.calls import Average, OperationCall, Sum, chosen_op, like, listed, refused_in_set, sources
from clcomm.horovod.handles import Handle
from clcomm.horovod.operations import AllReduce, Compression, ReduceOp, SparseAllReduce
from clcomm.horovod.world import ProcessSet, global_process_set


@refused_in_set
def _call(
    tensors: Sequence[torch.Tensor], average: bool | None, name: str | None, op: ReduceOp | None,
    prescale_factor: float, postscale_factor: float, process_set: ProcessSet, *, in_place: bool = False,
) -> OperationCall:  # fmt: skip
    """Return the call with the arguments of `grouped_allreduce_async`."""
    wanted, given, label = chosen_op(op, average), listed(tensors), name or ""
    own = sources(given, process_set, label)
    operation = AllReduce(own, label, wanted, prescale_factor, postscale_factor)
    return OperationCall(process_set, operation, like(given, process_set, label, in_place=in_place))


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


class _GroupedAllreduce(torch.autograd.Function):
    """An all-reduce through which gradients flow: backward is the same all-reduce of them."""

    @staticmethod
    def forward(ctx: Any, arguments: dict[str, Any], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.arguments = arguments
        return tuple(_call(tensors, None, **arguments).run())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return (None, *_call(gradients, None, **ctx.arguments).run())


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
    arguments = {
        "op": chosen_op(op, average), "name": name, "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor, "process_set": process_set,
    }  # fmt: skip
    if compression is Compression.none:
        return list(_GroupedAllreduce.apply(arguments, *listed(tensors)))
    small = [compression.compress(each) for each in listed(tensors)]
    found = _GroupedAllreduce.apply(arguments, *(each for each, _ in small))
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
    return (
        _call([tensor], average, name, op, prescale_factor, postscale_factor, process_set, in_place=True)
        .single()
        .start()
    )


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
