"""What Horovod's calls move: dense host tensors through a Communicator, at once; the calls queue and check."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, proxy

import numpy as np
import torch

from clcomm.communicator import Communicator
from clcomm.errors import ArgumentError
from clcomm.horovod.tensors import divided, scaled
from clcomm.stats.call import describe_shapes
from clcomm.sync.adasum import adasum
from clcomm.sync.agreement import require_agreement
from clcomm.tensors.arrays import array_of, as_tensor, described, flat, require_summable
from clcomm.tensors.staging import Staging


class ReduceOp(Enum):
    """What an all-reduce computes; the value is the Communicator's name of it."""

    Average = "mean"
    Sum = "sum"
    Adasum = "adasum"
    Min = "min"
    Max = "max"
    Product = "prod"


_staging: WeakKeyDictionary[Communicator, Staging] = WeakKeyDictionary()


def all_reduce(
    comm: Communicator,
    tensors: Sequence[torch.Tensor],
    op: ReduceOp,
    label: str,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> list[torch.Tensor]:
    """Return the reduced tensors, new ones of the same shapes; those of one dtype are reduced together."""
    found: dict[int, torch.Tensor] = {}
    for places in by_dtype(tensors):
        chosen = [scaled(tensors[index], prescale) for index in places]
        reduced = _adasum(comm, chosen, label) if op is ReduceOp.Adasum else _reduce(comm, chosen, op, label)
        found |= dict(zip(places, (scaled(tensor, postscale) for tensor in reduced), strict=True))
    return [found[index] for index in range(len(tensors))]


def by_dtype(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the places of the tensors of each dtype."""
    dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
    return [[index for index, tensor in enumerate(tensors) if tensor.dtype == dtype] for dtype in dtypes]


class Whole:
    """Tensors of one dtype as one, `source`, and room for what the ranks' sum to, `reduced`: flat arrays."""

    def __init__(self, tensors: Sequence[torch.Tensor], op: ReduceOp, label: str):
        dtype, flattened = tensors[0].dtype, [flat(tensor) for tensor in tensors]
        require_summable(dtype)
        self._tensors = tensors
        self._averages_integers = op is ReduceOp.Average and not (dtype.is_floating_point or dtype.is_complex)
        self.name = "sum" if self._averages_integers else op.value
        self.source = flattened[0] if len(flattened) == 1 else torch.cat(flattened)
        self.reduced = torch.empty_like(self.source)
        self.compared = f"{label} {described(tensors)}".strip()

    def parts(self, ranks: int) -> list[torch.Tensor]:
        """Return each tensor's result, once all are reduced."""
        reduced = divided(self.reduced, ranks) if self._averages_integers else self.reduced
        parts = reduced.split([tensor.numel() for tensor in self._tensors])
        return [part.reshape(tensor.shape) for part, tensor in zip(parts, self._tensors, strict=True)]


def _reduce(comm: Communicator, tensors: list[torch.Tensor], op: ReduceOp, label: str) -> list[torch.Tensor]:
    whole = Whole(tensors, op, label)
    options: dict[str, Any] = {"label": label, "compared": whole.compared}
    if comm.shares_memory:
        summed = whole.source.dtype
        _staging_of(comm).all_reduce(whole.source, whole.reduced, whole.name, summed=summed, **options)
    else:
        comm.all_reduce(array_of(whole.source), whole.name, out=array_of(whole.reduced), **options)
    return whole.parts(comm.size)


def _staging_of(comm: Communicator) -> Staging:
    found = _staging.get(comm)
    if found is None:
        found = _staging[comm] = Staging(proxy(comm))  # of a proxy, or the Communicator would never be collected
    return found


def _adasum(comm: Communicator, tensors: list[torch.Tensor], label: str) -> list[torch.Tensor]:
    """Return the adaptive sum of each tensor: of whole tensors, as they are vectors of their own."""
    dtype, summed = tensors[0].dtype, adaptive_dtype(tensors[0].dtype)
    results = [flat(tensor).to(summed, copy=True) for tensor in tensors]
    vectors = [array_of(each) for each in results]
    move = partial(adasum, comm, vectors, f"Adasum of {described(tensors)}", label)
    comm.run_as_all_reduce(move, label=label, nbytes=sum(each.nbytes for each in tensors))
    return [each.to(dtype).reshape(tensor.shape) for each, tensor in zip(results, tensors, strict=True)]


def adaptive_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which Adasum adds tensors; ArgumentError where it cannot."""
    if not dtype.is_floating_point:
        raise ArgumentError(f"op: Adasum needs a real floating dtype, got {dtype}")
    require_summable(dtype)
    return torch.float32 if dtype == torch.bfloat16 else dtype


def all_to_all(
    comm: Communicator, tensor: torch.Tensor, splits: Sequence[int], label: str
) -> tuple[torch.Tensor, list[int]]:
    """Return the parts that the other ranks have for this one, in rank order, and how many rows each of them has.

    splits: how many rows go to each rank; their sum is the tensor's first dimension.
    """
    kind = f"{label} {describe_shapes([(-1, *tensor.shape[1:])])} {tensor.dtype}".strip()
    received = comm.all_gather(np.array(splits, np.int64), label=kind)[:, comm.rank].tolist()
    found = tensor.new_empty((sum(received), *tensor.shape[1:]))
    sends, receives = (
        [array_of(part) for part in whole.split(rows)] for whole, rows in ((tensor, splits), (found, received))
    )
    comm.all_to_all(sends, receives, label=label)
    return found, received


def reduce_scatters(
    comm: Communicator, tensors: Sequence[torch.Tensor], op: ReduceOp, label: str, prescale: float, postscale: float
) -> list[torch.Tensor]:
    """Return `reduce_scatter` of several tensors, scaled before and after the sum."""
    return [scaled(reduce_scatter(comm, scaled(each, prescale), op, label), postscale) for each in tensors]


def reduce_scatter(comm: Communicator, tensor: torch.Tensor, op: ReduceOp, label: str) -> torch.Tensor:
    """Return this rank's rows of the reduced tensor; the first ranks have one more where they cannot be equal."""
    length, integers = tensor.shape[0], not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    if length % comm.size or not tensor.numel():
        start, stop = rows_of(length, comm.rank, comm.size)
        return all_reduce(comm, [tensor], op, label)[0][start:stop].clone()
    require_summable(tensor.dtype)
    averages_integers = op is ReduceOp.Average and integers
    shape = (length // comm.size, *tensor.shape[1:])
    source = array_of(tensor).reshape(tensor.shape)
    reduced = comm.reduce_scatter(source, "sum" if averages_integers else op.value, label=label)
    found = as_tensor(reduced.reshape(-1), tensor).reshape(shape)
    return divided(found, comm.size) if averages_integers else found


def rows_of(length: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the range of rows that a rank gets of `length`; of n left over the first n ranks get one more each."""
    least, more = divmod(length, ranks)
    return rank * least + min(rank, more), (rank + 1) * least + min(rank + 1, more)


def broadcast(
    comm: Communicator, tensors: Sequence[torch.Tensor], root: int, label: str, lines: Sequence[str] = ()
) -> list[torch.Tensor]:
    """Return root's tensors, new ones; those of one dtype are sent together. lines: about a model, to compare first."""
    if lines:
        require_agreement(comm, "parameters", lines, "build the same model on every rank")
    found: dict[int, torch.Tensor] = {}
    for places in by_dtype(tensors):
        chosen = [tensors[index] for index in places]
        whole = np.concatenate([array_of(tensor) for tensor in chosen])
        if len(chosen) == 1:
            whole = whole.reshape(chosen[0].shape)  # which ranks compare
        sent = as_tensor(comm.broadcast(whole, root, label=label), chosen[0])
        sent = sent.reshape(-1).split([each.numel() for each in chosen])
        found |= {at: part.reshape(tensors[at].shape) for at, part in zip(places, sent, strict=True)}
    return [found[index] for index in range(len(tensors))]


def barrier(comm: Communicator) -> None:
    """Return when all ranks are here."""
    comm.barrier()


def broadcast_object(comm: Communicator, obj: object, root: int, label: str) -> Any:
    """Return root's object."""
    return comm.broadcast_object(obj, root, label=label)


def all_gather_object(comm: Communicator, obj: object, label: str) -> list[Any]:
    """Return all ranks' objects."""
    return comm.all_gather_object(obj, label=label)
