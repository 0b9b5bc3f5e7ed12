"""Horovod's all-gathers, broadcasts, all-to-alls and reduce-scatters: blocking, in place, and started."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from clcomm.base.errors import ArgumentError
from clcomm.comm.tensors.arrays import scaled
from clcomm.horovod import world
from clcomm.horovod.calls import (
    Adasum,
    Average,
    Differentiable,
    OperationCall,
    Sum,
    allreduce,
    call_of,
    chosen_op,
    like,
    listed,
    refused_in_set,
    root_in,
    sources,
)
from clcomm.horovod.handles import Handle
from clcomm.horovod.operations import AllGather, AllToAll, Broadcast, Compression, ReduceOp, ReduceScatter
from clcomm.horovod.world import ProcessSet, global_process_set

# --- all-gather ---


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start gathering the ranks' tensors, which may differ in their first dimension; see `allgather`."""
    return call_of(AllGather, [tensor], process_set, name).single().start()


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the ranks' tensors, concatenated along the first dimension in rank order; differentiable.

    Raises MismatchError on every rank where they differ in dtype or in another dimension than the first.
    """

    def back(gradient: torch.Tensor) -> list[torch.Tensor]:
        """Return the part of the ranks' mean gradient that belongs to this rank's rows."""
        rows = shape[0] if shape else 1
        mean = allreduce(gradient, op=Average, process_set=process_set)
        first = int(allgather(torch.tensor([rows]), process_set=process_set)[: process_set.rank()].sum())
        return [mean[first : first + rows].reshape(shape)]

    call = partial(call_of, AllGather, process_set=process_set, name=name)
    found = Differentiable.apply(lambda own: call([own]).single().run(), back, tensor)
    shape = tensor.shape
    return found


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start gathering several tensors; `synchronize` returns the list of results."""
    return call_of(AllGather, tensors, process_set, name).start()


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Return several tensors' `allgather`; differentiable."""
    return [allgather(each, name, process_set) for each in listed(tensors)]


# --- broadcast ---


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start sending root's tensor to all ranks of the set; root_rank is its rank in the world."""
    return _sending(tensor, root_rank, name, process_set).start()


@refused_in_set
def _sending(
    tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet, *, in_place: bool = False
) -> OperationCall:
    root = root_in(process_set, root_rank)
    return call_of(Broadcast, [tensor], process_set, name, root, in_place=in_place, called="tensor").single()


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start replacing a tensor by root's."""
    return _sending(tensor, root_rank, name, process_set, in_place=True).start()


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return root's tensor on every rank; differentiable. Every rank gives one of the same shape and dtype."""

    def back(gradient: torch.Tensor) -> list[torch.Tensor]:
        """Return the ranks' mean gradient on root, zero elsewhere."""
        mean = allreduce(gradient, op=Average, process_set=process_set)
        return [mean if world.rank() == root_rank else torch.zeros_like(mean)]

    return Differentiable.apply(lambda own: _sending(own, root_rank, name, process_set).run(), back, tensor)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Replace a tensor by root's, in place, and return it."""
    return _sending(tensor, root_rank, name, process_set, in_place=True).run()


# --- all-to-all ---


def alltoall_async(
    tensor: torch.Tensor,
    splits: object = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an exchange of rows; `synchronize` returns the rows received, and how many came from each rank (int32).

    splits: integers, how many rows go to each rank; None: equally many, where their number allows.
    """
    return _exchange(tensor, splits, name, process_set).start()


@refused_in_set
def _exchange(tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> OperationCall:
    label = name or ""
    (own,) = sources([tensor], process_set, label, name="tensor")
    counts, back = _splits(own, splits, process_set.size()), like([tensor], process_set, label)

    def change(found: tuple[torch.Tensor, list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        return back([found[0]])[0], torch.tensor(found[1], dtype=torch.int32)

    return OperationCall(process_set, AllToAll(own, counts, label), change)


def _splits(tensor: torch.Tensor, splits: Any, ranks: int) -> list[int]:
    rows = tensor.shape[0] if tensor.dim() else 0
    if tensor.dim() == 0 or (splits is None and rows % ranks):
        raise ArgumentError(
            f"tensor: expected a first dimension that {ranks} ranks divide, or splits, got {list(tensor.shape)}"
        )
    counts = [rows // ranks] * ranks if splits is None else [int(each) for each in splits]
    if len(counts) != ranks or min(counts) < 0 or sum(counts) != rows:
        raise ArgumentError(f"splits: expected {ranks} numbers of rows, {rows} together, got {counts}")
    return counts


def alltoall(
    tensor: torch.Tensor,
    splits: object = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the rows that the ranks send to this one, in rank order; differentiable.

    With `splits` also how many came from each rank; see `alltoall_async`.
    """

    def back(gradient: torch.Tensor, _: Any) -> list[torch.Tensor]:
        """Return the gradients of the rows, sent back to where these came from."""
        return [_exchange(gradient, received, None, process_set).run()[0]]

    call = partial(_exchange, splits=splits, name=name, process_set=process_set)
    rows, received = Differentiable.apply(lambda own: call(own).run(), back, tensor)
    return rows if splits is None else (rows, received)


# --- Horovod's reduce-scatters: all-reduces of which each rank gets its rows. ---


class UnsupportedError(ArgumentError, RuntimeError):
    """An operation that Horovod does not have either, and for which it raises RuntimeError."""


@refused_in_set
def _call(
    tensors: Any, name: str | None, op: ReduceOp, process_set: ProcessSet, prescale_factor: float,
    postscale_factor: float,
) -> OperationCall:  # fmt: skip
    if chosen_op(op, None) is Adasum:
        raise UnsupportedError("op: expected another than Adasum for a reduce-scatter, got Adasum")
    call = call_of(ReduceScatter, tensors, process_set, name, op, prescale_factor, postscale_factor)
    if any(each.dim() == 0 for each in tensors):
        raise ArgumentError("tensor: expected at least one dimension to scatter, got a number")
    return call


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

    def back(gradient: torch.Tensor) -> list[torch.Tensor]:
        """Gather the rows' gradients, for a sum times the number of ranks, as Horovod defines it."""
        factor = prescale_factor * postscale_factor * (process_set.size() if op is Sum else 1)
        return [allgather(scaled(gradient, factor), process_set=process_set)]

    call = partial(_call, name=name, op=op, process_set=process_set, prescale_factor=prescale_factor,
                   postscale_factor=postscale_factor)  # fmt: skip
    small, context = compression.compress(tensor)
    return compression.decompress(Differentiable.apply(lambda own: call([own]).single().run(), back, small), context)


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
