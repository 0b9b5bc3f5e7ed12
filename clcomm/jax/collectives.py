"""The collectives as JAX's primitive runs them, each with what its backward runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.comm.communicator import Communicator
from clcomm.jax.ffi import Kind
from clcomm.jax.primitive import Collective


@dataclass(frozen=True)
class AllReduce:
    """The reduction of an array over the ranks; see `Communicator.all_reduce`."""

    comm: Communicator
    op: str
    name = "all_reduce"

    def results(self, operands: Sequence[Any]) -> list[Kind]:
        return [(each.shape, each.dtype) for each in operands]

    def run(self, operands: list[np.ndarray], results: list[np.ndarray]) -> None:
        self.comm.all_reduce(operands[0], self.op, out=results[0])

    def transposed(self) -> Collective:
        require_linear(self)
        return self


@dataclass(frozen=True)
class AllGather:
    """All ranks' arrays, stacked."""

    comm: Communicator
    name = "all_gather"

    def results(self, operands: Sequence[Any]) -> list[Kind]:
        return [((self.comm.size, *each.shape), each.dtype) for each in operands]

    def run(self, operands: list[np.ndarray], results: list[np.ndarray]) -> None:
        self.comm.all_gather(operands[0], out=results[0])

    def transposed(self) -> Collective:
        return ReduceScatter(self.comm, "sum")


@dataclass(frozen=True)
class ReduceScatter:
    """Row `rank` of the reduction of arrays with a row for each rank."""

    comm: Communicator
    op: str
    name = "reduce_scatter"

    def results(self, operands: Sequence[Any]) -> list[Kind]:
        return [(each.shape[1:], each.dtype) for each in operands]

    def run(self, operands: list[np.ndarray], results: list[np.ndarray]) -> None:
        self.comm.reduce_scatter(operands[0], self.op, out=results[0][None])

    def transposed(self) -> Collective:
        require_linear(self)
        return AllGather(self.comm)


@dataclass(frozen=True)
class Broadcast:
    """The array of one rank."""

    comm: Communicator
    root: int
    name = "broadcast"

    def results(self, operands: Sequence[Any]) -> list[Kind]:
        return [(each.shape, each.dtype) for each in operands]

    def run(self, operands: list[np.ndarray], results: list[np.ndarray]) -> None:
        if self.comm.rank == self.root:
            np.copyto(results[0], operands[0])
        self.comm.broadcast(results[0], self.root)

    def transposed(self) -> Collective:
        return _Reduce(self.comm, self.root)


@dataclass(frozen=True)
class _Reduce:
    """The sum of all ranks' arrays on one rank, zero on the others: the backward of a broadcast."""

    comm: Communicator
    root: int
    name = "broadcast"

    def results(self, operands: Sequence[Any]) -> list[Kind]:
        return [(each.shape, each.dtype) for each in operands]

    def run(self, operands: list[np.ndarray], results: list[np.ndarray]) -> None:
        self.comm.all_reduce(operands[0], out=results[0])
        if self.comm.rank != self.root:
            results[0].fill(0)

    def transposed(self) -> Collective:
        return Broadcast(self.comm, self.root)


class _Reduction(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def op(self) -> str: ...


def require_linear(collective: _Reduction) -> None:
    """Raise ArgumentError for a reduction without a gradient."""
    if collective.op not in ("sum", "mean"):
        raise ArgumentError(
            f"{collective.name}: expected op 'sum' or 'mean' where gradients are computed, got {collective.op!r}; use "
            "jax.lax.stop_gradient"
        )
