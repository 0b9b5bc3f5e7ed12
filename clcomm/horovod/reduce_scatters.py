"""Horovod's reduce-scatters: all-reduces of which each rank gets its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from clcomm.base.errors import ArgumentError
from clcomm.comm.tensors.arrays import scaled
from clcomm.horovod.calls import Adasum, Average, OperationCall, Sum, chosen_op, like, listed, refused_in_set, sources
from clcomm.horovod.compression import Compression
from clcomm.horovod.copies import allgather
from clcomm.horovod.handles import Handle
from clcomm.horovod.operations import ReduceOp, ReduceScatter
from clcomm.horovod.world import ProcessSet, global_process_set


class UnsupportedError(ArgumentError, RuntimeError):
    """An operation that Horovod does not have either, and for which it raises RuntimeError."""


@refused_in_set
def _call(
    tensors: Sequence[torch.Tensor], name: str | None, op: ReduceOp, process_set: ProcessSet, prescale_factor: float,
    postscale_factor: float,
) -> OperationCall:  # fmt: skip
    wanted, given, label = chosen_op(op, None), listed(tensors), name or ""
    own = sources(given, process_set, label)
    if wanted is Adasum:
        raise UnsupportedError("op: expected another than Adasum for a reduce-scatter, got Adasum")
    for each in own:
        if each.dim() == 0:
            raise ArgumentError("tensor: expected at least one dimension to scatter, got a number")
    operation = ReduceScatter(own, label, wanted, prescale_factor, postscale_factor)
    return OperationCall(process_set, operation, like(given, process_set, label))


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start an all-reduce of which each rank gets its rows; see `reducescatter`."""
    return _call([tensor], name, op, process_set, prescale_factor, postscale_factor).single().start()


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start `reducescatter` of several tensors; `synchronize` returns the list of results."""
    return _call(tensors, name, op, process_set, prescale_factor, postscale_factor).start()


class _Reducescatter(torch.autograd.Function):
    """Backward gathers the rows' gradients, for a sum times the number of ranks, as Horovod defines it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        ctx.arguments = arguments
        return _call([tensor], **arguments).single().run()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        process_set = ctx.arguments["process_set"]
        factor = ctx.arguments["prescale_factor"] * ctx.arguments["postscale_factor"]
        factor *= process_set.size() if ctx.arguments["op"] is Sum else 1
        return allgather(scaled(gradient, factor), process_set=process_set), None


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the reduced tensor, in rank order; differentiable.

    Where the number of rows is no multiple of the ranks' the first ranks get one more.
    """
    arguments = {
        "name": name, "op": op, "process_set": process_set, "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
    }  # fmt: skip
    small, context = compression.compress(tensor)
    return compression.decompress(_Reducescatter.apply(small, arguments), context)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: object = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return several tensors' `reducescatter`; differentiable."""
    return [
        reducescatter(each, name, compression, op, process_set, prescale_factor, postscale_factor)
        for each in listed(tensors)
    ]
