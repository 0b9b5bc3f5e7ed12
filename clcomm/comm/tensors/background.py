"""Collectives on tensors in the background, as a Communicator's own; all of them return new tensors.

An all-reduce is one; the others gather the parts that each rank has for the others, which may be empty, and each rank
takes its own. Results have the bits of the blocking collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from clcomm.comm.communicator import Communicator
from clcomm.comm.tensors.arrays import (
    Together,
    array_of,
    as_tensor,
    bytes_of,
    divide_by,
    is_mean_of_integers,
    require_summable,
)
from clcomm.comm.tensors.started import Started


def all_reduce(
    comm: Communicator, tensors: Sequence[torch.Tensor], op: str, label: str = ""
) -> Started[list[torch.Tensor]]:
    """Start to reduce tensors of one dtype, contiguous on the host, together; they are summed in their own dtype."""
    together = Together(tensors)
    require_summable(together.values.dtype)
    averages_integers = is_mean_of_integers(op, together.values.dtype)
    handle = comm.all_reduce_async(
        array_of(together.values), "sum" if averages_integers else op, out=array_of(together.reduced), label=label,
        compared=together.compared(label) + " for a mean" * averages_integers,
    )  # fmt: skip

    def parts() -> list[torch.Tensor]:
        if averages_integers:
            divide_by(comm.size, together.reduced)
        return together.parts()

    return Started([handle], parts)


def sparse_sum(comm: Communicator, tensor: torch.Tensor, label: str = "") -> Started[torch.Tensor]:
    """Start the sum of sparse COO tensors of one shape, on the host: gathered, and added in rank order."""
    own = tensor.coalesce()
    parts = own.indices(), own.values().resolve_conj()
    started = [gather_rows(comm, each.contiguous(), label, "all_reduce", shape=tuple(own.shape)) for each in parts]

    def added(found: list[list[torch.Tensor]]) -> torch.Tensor:
        total = torch.zeros_like(own)
        for places, values in zip(*found, strict=True):
            indices = places.reshape(own.sparse_dim(), len(places) // own.sparse_dim())
            values = values.reshape(indices.shape[1], *own.values().shape[1:])
            total = total + torch.sparse_coo_tensor(indices, values, own.shape, check_invariants=True)
        return total.coalesce()

    return Started.together(started).then(added)


def gather_rows(
    comm: Communicator, tensor: torch.Tensor, label: str = "", operation: str = "all_gather", **compared: Any
) -> Started[list[torch.Tensor]]:
    """Start to gather all ranks' tensors of one dtype, contiguous on the host, of any lengths; they come back flat."""
    dtype = array_of(tensor).dtype
    handle = comm.all_gather_rows_async(bytes_of(tensor), label=label, operation=operation, dtype=dtype, **compared)
    return Started([handle], lambda: [as_tensor(row.view(dtype), tensor) for row in handle.wait()])


def all_gather(
    comm: Communicator, tensor: torch.Tensor, label: str = "", operation: str = "all_gather"
) -> Started[torch.Tensor]:
    """Start to put ranks' tensors after one another, which may differ in their first dimension; a number is a row."""
    own = tensor.reshape(1) if tensor.dim() == 0 else tensor
    tail = own.shape[1:]
    if not tail.numel():  # of rows without elements their number is sent
        ones = gather_rows(comm, own.new_ones(len(own)), label, operation, shape=(-1, *tail))
        return ones.then(lambda rows: own.new_empty((sum(map(len, rows)), *tail)))
    started = gather_rows(comm, own, label, operation, shape=(-1, *tail))
    return started.then(lambda rows: torch.cat([row.reshape(-1, *tail) for row in rows]))


def broadcast(
    comm: Communicator, tensors: Sequence[torch.Tensor], root: int, label: str = ""
) -> Started[list[torch.Tensor]]:
    """Start to send root's tensors to all ranks."""

    def of_root(own: torch.Tensor) -> Started[torch.Tensor]:
        sent = own if comm.rank == root else own.new_empty(0)
        rows = gather_rows(comm, sent, label, "broadcast", shape=tuple(own.shape), root=root)
        return rows.then(lambda found: found[root].reshape(own.shape))

    return Started.together([of_root(each) for each in tensors])


def all_to_all(
    comm: Communicator, tensor: torch.Tensor, splits: Sequence[int], label: str = ""
) -> Started[tuple[torch.Tensor, list[int]]]:
    """Start `TensorCollectives.all_to_all_rows`; every rank gets all ranks' rows, and takes its own."""
    counts = gather_rows(comm, torch.tensor(splits), label, "all_to_all").then(lambda rows: torch.stack(rows))
    rows = all_gather(comm, tensor, label, "all_to_all")

    def taken(found: list[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
        lengths = found[0].tolist()
        everyone = found[1].split([sum(each) for each in lengths])
        parts = [theirs.split(each)[comm.rank] for theirs, each in zip(everyone, lengths, strict=True)]
        return torch.cat(parts), [each[comm.rank] for each in lengths]

    return Started.together([counts, rows]).then(taken)
