"""Horovod's asynchronous calls as collectives of the Communicator in the background.

An all-reduce is one; the others gather what each rank has for the others, which may be nothing, and each rank takes its
part. `movement` has the blocking forms of those that have faster ones. Results have the same bits, but for Adasum's of
long tensors, whose scalar products are summed in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from clcomm.communicator import Communicator
from clcomm.horovod import movement
from clcomm.horovod.movement import ReduceOp, Whole, adaptive_dtype, by_dtype, rows_of
from clcomm.horovod.tensors import scaled
from clcomm.sync.adasum import of_rows
from clcomm.tensors.arrays import array_of, as_tensor, bytes_of, described


class Started(NamedTuple):
    """The Communicator's handles, and what makes the operation's result of theirs."""

    handles: Sequence[Any]
    finish: Callable[[], Any]

    def then(self, change: Callable[[Any], Any]) -> Started:
        """Return the same with a result that is changed in the end."""
        return Started(self.handles, lambda: change(self.finish()))


def run(comm: Communicator, name: str, arguments: Sequence[Any]) -> Any:
    """Return the result of an operation by its name: of `movement`'s function, else of one of this module."""
    function = getattr(movement, name, None)
    if function is not None:
        return function(comm, *arguments)
    started = globals()[name](comm, *arguments)
    for handle in started.handles:
        handle.wait()
    return started.finish()


def _together(started: Sequence[Started]) -> Started:
    """Return several as one, whose result is the list of theirs."""
    return Started([handle for each in started for handle in each.handles], lambda: [each.finish() for each in started])


def all_reduce(
    comm: Communicator, tensors: Sequence[torch.Tensor], op: ReduceOp, label: str, prescale: float, postscale: float
) -> Started:
    """Start `movement.all_reduce`."""
    start = _adasum if op is ReduceOp.Adasum else _reduce
    groups = by_dtype(tensors)
    started = [start(comm, [scaled(tensors[index], prescale) for index in places], op, label) for places in groups]

    def in_order(reduced: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        pairs = [pair for places, each in zip(groups, reduced, strict=True) for pair in zip(places, each, strict=True)]
        return [scaled(tensor, postscale) for _, tensor in sorted(pairs, key=lambda pair: pair[0])]

    return _together(started).then(in_order)


def _reduce(comm: Communicator, tensors: list[torch.Tensor], op: ReduceOp, label: str) -> Started:
    whole = Whole(tensors, op, label)
    source, out = array_of(whole.source), array_of(whole.reduced)
    handle = comm.all_reduce_async(source, whole.name, out=out, label=label, compared=whole.compared)
    return Started([handle], partial(whole.parts, comm.size))


def _adasum(comm: Communicator, tensors: list[torch.Tensor], op: ReduceOp, label: str) -> Started:
    summed = adaptive_dtype(tensors[0].dtype)
    started = [
        _rows(comm, tensor.to(summed), label, f"Adasum of {described(tensors)}", shape=tuple(tensor.shape))
        for tensor in tensors
    ]

    def added(everyone: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        with np.errstate(all="ignore"):
            found = [as_tensor(of_rows([array_of(row) for row in rows]), rows[0]) for rows in everyone]
        return [each.to(like.dtype).reshape(like.shape) for each, like in zip(found, tensors, strict=True)]

    return _together(started).then(added)


def _rows(comm: Communicator, sent: torch.Tensor, label: str, operation: str, **compared: Any) -> Started:
    """Start to gather all ranks' tensors of one dtype, flat, of any lengths."""
    dtype = array_of(sent).dtype
    handle = comm.all_gather_rows_async(bytes_of(sent), label=label, operation=operation, dtype=dtype, **compared)
    return Started([handle], lambda: [as_tensor(row.view(dtype), sent) for row in handle.wait()])


def all_gathers(comm: Communicator, tensors: Sequence[torch.Tensor], label: str) -> Started:
    """Start to put ranks' tensors after one another, which may differ in their first dimension; a number is a row."""
    return _together([_all_gather(comm, each, label) for each in tensors])


def _all_gather(comm: Communicator, tensor: torch.Tensor, label: str, operation: str = "all_gather") -> Started:
    own = tensor.reshape(1) if tensor.dim() == 0 else tensor
    tail = own.shape[1:]
    if not tail.numel():  # of rows without elements their number is sent
        ones = _rows(comm, own.new_ones(len(own)), label, operation, shape=(-1, *tail))
        return ones.then(lambda rows: own.new_empty(sum(map(len, rows)), *tail))
    started = _rows(comm, own, label, operation, shape=(-1, *tail))
    return started.then(lambda rows: torch.cat([row.reshape(-1, *tail) for row in rows]))


def broadcast(comm: Communicator, tensors: Sequence[torch.Tensor], root: int, label: str) -> Started:
    """Start `movement.broadcast`."""
    sent = [each if comm.rank == root else each.new_empty(0) for each in tensors]
    started = [
        _rows(comm, own, label, "broadcast", shape=tuple(each.shape), root=root)
        for own, each in zip(sent, tensors, strict=True)
    ]
    whole = _together(started)
    return whole.then(lambda rows: [own[root].reshape(each.shape) for own, each in zip(rows, tensors, strict=True)])


def all_to_all(comm: Communicator, tensor: torch.Tensor, splits: Sequence[int], label: str) -> Started:
    """Start `movement.all_to_all`; every rank gets all ranks' rows, and takes its own."""
    counts = _rows(comm, torch.tensor(splits), label, "all_to_all")
    rows = _all_gather(comm, tensor, label, "all_to_all")

    def taken(found: list[Any]) -> tuple[torch.Tensor, list[int]]:
        lengths = torch.stack(found[0]).tolist()
        everyone = found[1].split([sum(each) for each in lengths])
        parts = [theirs.split(each)[comm.rank] for theirs, each in zip(everyone, lengths, strict=True)]
        return torch.cat(parts), [each[comm.rank] for each in lengths]

    return _together([counts, rows]).then(taken)


def reduce_scatters(
    comm: Communicator, tensors: Sequence[torch.Tensor], op: ReduceOp, label: str, prescale: float, postscale: float
) -> Started:
    """Start `movement.reduce_scatters`: all-reduces of which each rank takes its rows."""
    parts = [slice(*rows_of(len(each), comm.rank, comm.size)) for each in tensors]
    whole = all_reduce(comm, tensors, op, label, prescale, postscale)
    return whole.then(lambda found: [each[part].clone() for each, part in zip(found, parts, strict=True)])
