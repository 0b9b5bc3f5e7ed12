"""Collectives on tensors in the background, as a Communicator's own; all of them return new tensors.

An all-reduce is one; the others gather the parts that each rank has for the others, which may be empty, and each rank
takes its own. Results have the bits of the blocking collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from clcomm.comm.collectives.in_flight import Handle
from clcomm.comm.communicator import Communicator
from clcomm.comm.tensors.arrays import (
    Together,
    array_of,
    as_tensor,
    bytes_of,
    changed,
    copy_values,
    divide_by,
    dtype_name,
    is_mean_of_integers,
    require_summable,
)


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


# --- Started operations on tensors. ---

_Result = TypeVar("_Result")
_Changed = TypeVar("_Changed")


class Started(Generic[_Result]):
    """A started operation: the Communicator's handles, and the function that makes its result of theirs.

    Args:
        finish: called once all handles are complete; returns the result.
    """

    def __init__(self, handles: Sequence[Handle], finish: Callable[[], _Result]):
        self.handles, self._finish = handles, finish

    @classmethod
    def of(cls, result: _Result) -> Started[_Result]:
        """Return one that has ended, with its result."""
        return Started((), lambda: result)

    @classmethod
    def together(cls, started: Sequence[Started[_Result]]) -> Started[list[_Result]]:
        """Return several as one; its result is the list of theirs."""
        handles = [handle for each in started for handle in each.handles]
        return Started(handles, lambda: [each._finish() for each in started])

    def then(self, change: Callable[[_Result], _Changed]) -> Started[_Changed]:
        """Return the same with a changed result."""
        return Started(self.handles, lambda: change(self._finish()))

    def done(self) -> bool:
        """Advance it without blocking, and return whether it is complete."""
        return all(handle.done() for handle in self.handles)

    @property
    def failed(self) -> bool:
        """Whether it is complete with an error, which `wait` raises."""
        return any(handle.failed for handle in self.handles)

    def wait(self) -> _Result:
        """Wait for it and return its result; called once."""
        for handle in self.handles:
            handle.wait()
        return self._finish()


# --- Shared memory for the reduction of ordinary tensors: one copy in, the ranks' sum, one copy out. ---
# Tensors that are in shared memory themselves are reduced in place, beside those that other ranks copy.

#: The size of the memory at first, and at most; longer tensors are reduced in pieces of that size, which stay in the
#: processor's cache between copy, sum and copy.
LEAST_BYTES, MOST_BYTES = 64 << 10, 4 << 20


class Staging:
    """A rank's row, read by the other ranks, and the sum, written and read by all; both grow as needed.

    comm: a Communicator, or a weak proxy of one, that shares memory.
    """

    def __init__(self, comm: Communicator):
        self._comm = comm
        self._row = self._sum = np.empty(0, np.uint8)
        self._holds_at: Callable[[int, int], bool]
        self._typed: dict[torch.dtype, Pair] = {}

    def all_reduce(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        op: str,
        *,
        summed: torch.dtype,
        label: str = "",
        bucket: int = -1,
        compared: str | None = None,
    ) -> None:
        """Reduce a tensor over the ranks, counted as one all-reduce even if it is longer than the memory; collective.

        No byte is copied if `source` is the target and in the Communicator's memory; ranks may differ in that.

        Args:
            source: flat and contiguous, in the host's memory.
            target: receives the result; of the same length, or `source` itself.
            op, label, bucket, compared: as for `Communicator.all_reduce`.
            summed: the dtype of the sum; the result is rounded to that of `target`.
        """
        count, nbytes = source.numel(), source.nbytes
        run = partial(self._comm.all_reduce, op=op, label=label, nbytes=nbytes, bucket=bucket, compared=compared)

        def purpose() -> str:
            name = f"{label!r} of" if compared is None else "of"  # ranks may differ in what they do not compare
            return f"all_reduce {name} {count:,} {dtype_name(source.dtype)}"

        pair = self.pair(count * summed.itemsize, summed, purpose)
        row, total, row_array, sum_array = pair.row, pair.sum, pair.row_array, pair.sum_array
        in_place = source is target and source.dtype is summed and self._holds_at(source.data_ptr(), nbytes)

        def reduce(part: torch.Tensor, into: torch.Tensor) -> None:
            if in_place:
                run(array_of(part))
                changed(part)
                return
            length = part.numel()
            copy_values(row[:length], part)
            run(row_array[:length], out=sum_array[:length])
            copy_values(into, total[:length])

        def reduce_pieces() -> int:
            for part, into in zip(source.split(pair.count), target.split(pair.count), strict=True):
                reduce(part, into)
            return nbytes

        if count <= pair.count or self._comm.memory.all_agree(in_place, purpose()):
            reduce(source, target)
        else:
            self._comm.run_as_all_reduce(reduce_pieces, label=label, nbytes=nbytes, bucket=bucket)

    def pair(self, nbytes: int, dtype: torch.dtype, purpose: Callable[[], str]) -> Pair:
        """Return memory for `nbytes`, or the most there is; collective where it has to grow.

        Args:
            purpose: returns the collective's name in messages.
        """
        if max(1, nbytes) > self._row.nbytes and self._row.nbytes < MOST_BYTES:
            self._grow(min(MOST_BYTES, max(LEAST_BYTES, 1 << (nbytes - 1).bit_length())), purpose())
        found = self._typed.get(dtype)
        if found is None:
            found = self._typed[dtype] = Pair(self._row, self._sum, dtype)
        return found

    def _grow(self, nbytes: int, purpose: str) -> None:
        row = self._comm.allocate(nbytes, purpose=purpose)
        memory = self._comm.memory.of_host
        assert memory is not None, "a Communicator that shares none"
        self._holds_at = memory.holds_at
        self._typed.clear()  # the former memory is free for the next one
        self._row = row
        self._sum = self._comm.allocate_common(nbytes)


class Pair:
    """A row and the sum as tensors of one dtype, and as arrays on the same memory."""

    def __init__(self, row: np.ndarray, total: np.ndarray, dtype: torch.dtype):
        self.row, self.sum = torch.from_numpy(row).view(dtype), torch.from_numpy(total).view(dtype)
        self.row_array, self.sum_array = array_of(self.row), array_of(self.sum)
        self.count = self.row.numel()
