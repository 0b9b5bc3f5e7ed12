"""Horovod's operations and compressors as objects: ranks run one and wait for it, or start it and complete it later.

Tensors are contiguous ones on the host, and results are new ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch

from clcomm.comm.communicator import Communicator
from clcomm.comm.tensors import background
from clcomm.comm.tensors.arrays import adaptive_dtype, array_of, as_tensor, by_dtype, described, flat, scaled
from clcomm.comm.tensors.background import Started
from clcomm.comm.tensors.collectives import TensorCollectives, rows_of
from clcomm.sync.agreement import require_agreement
from clcomm.sync.elastic import is_lost_peer
from clcomm.sync.hooks import adasum, of_rows


class HorovodInternalError(RuntimeError):
    """A collective that failed because a rank was lost; a program may raise it to go back to the last commit."""


@contextmanager
def raising_internal_errors() -> Iterator[None]:
    """Raise HorovodInternalError in place of MPI's error for a lost rank in the block."""
    try:
        yield
    except Exception as error:
        if isinstance(error, HorovodInternalError) or not is_lost_peer(error):
            raise
        raise HorovodInternalError(f"a rank was lost: {error}; hvd.elastic.run goes on without it") from error


class ReduceOp(Enum):
    """The reductions; the value of each is the Communicator's name of it."""

    Average = "mean"
    Sum = "sum"
    Adasum = "adasum"
    Min = "min"
    Max = "max"
    Product = "prod"


class Operation:
    """An operation of a process set's ranks."""

    #: What messages call it.
    name: str
    #: Whether it can run while some ranks have joined, which then run its `contribution`.
    serves_joined = False

    def run(self, ranks: TensorCollectives) -> Any:
        """Run it and return its result."""
        return self.start(ranks, waits=True).wait()

    def start(self, ranks: TensorCollectives, waits: bool = False) -> Started[Any]:
        """Start it in the background; waits: the caller does nothing in between, so that it may block here."""
        raise NotImplementedError

    def sender(self) -> int | None:
        """Return the rank whose data all ranks get, which may not have joined; None: there is none."""
        return getattr(self, "root", None)

    def without_values(self) -> Operation:
        """Return it with the shapes and dtypes of its tensors alone, for ranks that have joined."""
        return self

    def contribution(self) -> Operation:
        """Return the same operation with what changes no result, from one `without_values`."""
        return self


@dataclass(frozen=True)
class TensorOperation(Operation):
    """An operation on a list of tensors; label: its name in stats and messages."""

    tensors: Sequence[torch.Tensor]
    label: str

    def without_values(self) -> Operation:
        return replace(self, tensors=[each.to("meta") for each in self.tensors])

    def contribution(self) -> Operation:
        return replace(self, tensors=[self._neutral(each) for each in self.tensors])

    def _neutral(self, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(like.shape, dtype=like.dtype)


@dataclass(frozen=True)
class AllReduce(TensorOperation):
    """An all-reduce, of the tensors of each dtype together; prescale, postscale: factors of operands and results."""

    op: ReduceOp
    prescale: float = 1.0
    postscale: float = 1.0
    name = "all_reduce"
    serves_joined = True

    def start(self, ranks: TensorCollectives, waits: bool = False) -> Started[list[torch.Tensor]]:
        groups = by_dtype(self.tensors)
        operands = [[scaled(self.tensors[index], self.prescale) for index in places] for places in groups]
        started = Started.together([self._start(ranks, each, waits) for each in operands])
        return started.then(lambda found: [scaled(each, self.postscale) for each in _in_order(groups, found)])

    def _start(
        self, ranks: TensorCollectives, tensors: Sequence[torch.Tensor], waits: bool
    ) -> Started[list[torch.Tensor]]:
        if self.op is ReduceOp.Adasum:
            if waits:
                return Started.of(_adaptive_sums(ranks, tensors, self.label))
            return _start_adaptive_sums(ranks.comm, tensors, self.label)
        if waits:
            return Started.of(ranks.all_reduce_together(tensors, self.op.value, self.label))
        return background.all_reduce(ranks.comm, tensors, self.op.value, self.label)

    def contribution(self) -> Operation:
        return replace(super().contribution(), prescale=1.0)  # type: ignore[type-var]

    def _neutral(self, like: torch.Tensor) -> torch.Tensor:
        value: float = int(self.op is ReduceOp.Product)
        if self.op in (ReduceOp.Min, ReduceOp.Max):
            is_least = self.op is ReduceOp.Max
            if like.dtype == torch.bool:
                value = not is_least
            else:
                limits = torch.finfo(like.dtype) if like.dtype.is_floating_point else torch.iinfo(like.dtype)
                value = limits.min if is_least else limits.max
        return torch.full(like.shape, value, dtype=like.dtype)


def _in_order(groups: Sequence[Sequence[int]], found: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the tensors of `by_dtype`'s groups in the order of their places."""
    pairs = [pair for places, each in zip(groups, found, strict=True) for pair in zip(places, each, strict=True)]
    return [tensor for _, tensor in sorted(pairs, key=lambda pair: pair[0])]


def _adaptive_sums(ranks: TensorCollectives, tensors: Sequence[torch.Tensor], label: str) -> list[torch.Tensor]:
    """Return the adaptive sum of each tensor: of whole tensors, as they are vectors of their own."""
    summed = adaptive_dtype(tensors[0].dtype)
    results = [flat(tensor).to(summed, copy=True) for tensor in tensors]
    vectors = [array_of(each) for each in results]
    move = partial(adasum, ranks.comm, vectors, f"Adasum of {described(tensors)}", label)
    ranks.comm.run_as_all_reduce(move, label=label, nbytes=sum(each.nbytes for each in tensors))
    return [each.to(tensor.dtype).reshape(tensor.shape) for each, tensor in zip(results, tensors, strict=True)]


def _start_adaptive_sums(
    comm: Communicator, tensors: Sequence[torch.Tensor], label: str
) -> Started[list[torch.Tensor]]:
    """Start `_adaptive_sums`; long tensors' have other bits, as scalar products are summed in another order."""
    summed, compared = adaptive_dtype(tensors[0].dtype), f"Adasum of {described(tensors)}"
    started = [
        background.gather_rows(comm, each.to(summed), label, compared, shape=tuple(each.shape)) for each in tensors
    ]

    def added(everyone: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        with np.errstate(all="ignore"):
            found = [as_tensor(of_rows([array_of(row) for row in rows]), rows[0]) for rows in everyone]
        return [each.to(like.dtype).reshape(like.shape) for each, like in zip(found, tensors, strict=True)]

    return Started.together(started).then(added)


@dataclass(frozen=True)
class SparseAllReduce(Operation):
    """The sum of a sparse COO tensor over the ranks."""

    tensor: torch.Tensor
    label: str
    name = "sparse all_reduce"
    serves_joined = True

    def start(self, ranks: TensorCollectives, waits: bool = False) -> Started[torch.Tensor]:
        return background.sparse_sum(ranks.comm, self.tensor, self.label)

    def without_values(self) -> Operation:
        return replace(self, tensor=torch.zeros_like(self.tensor))  # which has no values


@dataclass(frozen=True)
class AllGather(TensorOperation):
    """The ranks' tensors after one another, along their first dimension, in which they may differ."""

    name = "all_gather"
    serves_joined = True

    def start(self, ranks: TensorCollectives, waits: bool = False) -> Started[list[torch.Tensor]]:
        return Started.together([background.all_gather(ranks.comm, each, self.label) for each in self.tensors])

    def _neutral(self, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros((0, *like.shape[1:]), dtype=like.dtype)


@dataclass(frozen=True)
class Broadcast(TensorOperation):
    """Root's tensors; those of one dtype are sent together. names: of a model's, which ranks compare first."""

    root: int
    names: Sequence[str] = ()
    name = "broadcast"
    serves_joined = True

    def start(self, ranks: TensorCollectives, waits: bool = False) -> Started[list[torch.Tensor]]:
        if not waits:
            return background.broadcast(ranks.comm, self.tensors, self.root, self.label)
        if self.names:
            given = zip(self.names, self.tensors, strict=True)
            lines = [f"{name} {tuple(each.shape)} {each.dtype}" for name, each in given]
            require_agreement(ranks.comm, "parameters", lines, "build the same model on every rank")
        groups = by_dtype(self.tensors)
        sent = [
            ranks.broadcast_together([self.tensors[index] for index in places], self.root, self.label)
            for places in groups
        ]
        return Started.of(_in_order(groups, sent))


@dataclass(frozen=True)
class AllToAll(Operation):
    """Rows of a tensor to each rank: the rows received, and how many of each rank; splits: how many go to each."""

    tensor: torch.Tensor
    splits: Sequence[int]
    label: str
    name = "all_to_all"

    def start(self, ranks: TensorCollectives, waits: bool = False) -> Started[tuple[torch.Tensor, list[int]]]:
        if waits:
            return Started.of(ranks.all_to_all_rows(self.tensor, self.splits, self.label))
        return background.all_to_all(ranks.comm, self.tensor, self.splits, self.label)


@dataclass(frozen=True)
class ReduceScatter(AllReduce):
    """An all-reduce of which each rank gets its rows, of tensors by themselves."""

    name = "reduce_scatter"
    serves_joined = False

    def start(self, ranks: TensorCollectives, waits: bool = False) -> Started[list[torch.Tensor]]:
        if waits:
            operands = [scaled(each, self.prescale) for each in self.tensors]
            found = [ranks.reduce_scatter_rows(each, self.op.value, self.label) for each in operands]
            return Started.of([scaled(each, self.postscale) for each in found])
        parts = [slice(*rows_of(len(each), ranks.comm.rank, ranks.comm.size)) for each in self.tensors]
        whole = super().start(ranks)
        return whole.then(lambda found: [each[part].clone() for each, part in zip(found, parts, strict=True)])


@dataclass(frozen=True)
class Barrier(Operation):
    """No data: all ranks are here."""

    name = "barrier"
    serves_joined = True

    def run(self, ranks: TensorCollectives) -> None:
        ranks.barrier()


@dataclass(frozen=True)
class BroadcastObject(Operation):
    """Root's object, pickled."""

    obj: Any
    root: int
    label: str
    name = "broadcast_object"
    serves_joined = True

    def run(self, ranks: TensorCollectives) -> Any:
        return ranks.comm.broadcast_object(self.obj, self.root, label=self.label)

    def without_values(self) -> Operation:
        return replace(self, obj=None)


@dataclass(frozen=True)
class AllGatherObject(Operation):
    """All ranks' objects, pickled."""

    obj: Any
    label: str
    name = "all_gather_object"

    def run(self, ranks: TensorCollectives) -> list[Any]:
        return ranks.comm.all_gather_object(self.obj, label=self.label)


# --- Compression of tensors for the way between ranks, as Horovod has it; a program may bring its own. ---


class Compressor:
    """A way to compress a tensor before a collective and to decompress the result."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return what travels, and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor that the program gets."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Tensors travel as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Floating-point tensors travel, and are summed, as float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class Compression:
    """The compressors that an argument `compression` takes."""

    none = NoneCompressor
    fp16 = FP16Compressor
