"""Collectives of arrays of equal shapes, and of objects: each checks its arguments and calls a transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.host.arrays import host_array, note_write
from clcomm.comm.collectives.arguments import (
    check_op,
    check_root,
    flat,
    scatter_header,
    writable,
)
from clcomm.comm.collectives.in_flight import Handle, T
from clcomm.comm.collectives.runner import CollectiveRunner, refused_on_all
from clcomm.comm.collectives.world import World
from clcomm.comm.transport import mpi_communicators
from clcomm.comm.transport.reduction import in_sequence, prepared_reduction


class OtherCollectives:
    """The Communicator's collectives other than all-reduce (a base class of it).

    Arguments that are not numeric arrays are pickled as objects, by mpi4py.
    """

    rank: int
    size: int
    hosts: int
    world: World
    runner: CollectiveRunner

    def barrier(self) -> None:
        """Return when every rank has called it."""
        transport = self.world.base if self.world.shared is None else self.world.shared
        self.runner.run(self.runner.call("barrier", transport), transport.barrier)

    def rendezvous(self) -> None:
        """Return when every rank has called it: a barrier for long waits, which leaves the cores to working ranks.

        Other collectives respond within microseconds but poll; this one sleeps for milliseconds. It is not counted.
        """
        self.runner.complete_in_flight()
        if self.world.comm is not None:
            with self.runner.shown_as_current(
                self.runner.call("rendezvous", self.world.base, is_counted=False), self.runner.sequence
            ):
                mpi_communicators.wait_patiently(self.world.comm.Ibarrier())

    @refused_on_all
    def broadcast(self, array: np.ndarray, root: int = 0, *, label: str = "", nbytes: int | None = None) -> np.ndarray:
        """Copy root's array into every rank's array of the same shape and dtype, in place, and return it.

        nbytes: the size to count, where part of the array is padding.
        """
        check_root(root, self.size)
        array = np.array(array) if isinstance(array, np.generic) else array
        shaped = host_array(array, "array")
        values, finish = writable(shaped, "array")
        chosen = self.world.blocking_for(values)
        call = self.runner.call("broadcast", chosen, label, array=shaped, nbytes=nbytes, root=root)
        self.runner.run(call, chosen.broadcast, values, root)
        finish()
        return array

    @refused_on_all
    def all_gather(
        self,
        array: np.ndarray,
        *,
        out: np.ndarray | None = None,
        label: str = "",
        bucket: int = -1,
        operation: str = "all_gather",
    ) -> np.ndarray:
        """Return all ranks' arrays, stacked in rank order: shape (world_size, *array.shape).

        out: receives them, C-contiguous; None: a new array. bucket: index of a bucket of parameters, for observers.
        operation: the collective that this one implements.
        """
        array = host_array(array, "array")
        source = flat(array, "array")
        given = out = np.empty((self.size, *array.shape), array.dtype) if out is None else out
        out = host_array(out, "out")
        source = self._to_gather(source, out)
        chosen = self.world.blocking_for(source)
        call = self.runner.call(operation, chosen, label, array=array, nbytes=out.nbytes, bucket=bucket)
        self.runner.run(call, chosen.all_gather, source, out.reshape(-1))
        return given

    def _to_gather(self, source: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Return what to send: a copy where it lies in `out`. ArgumentError if `out` does not fit."""
        if out.size != self.size * source.size or out.dtype != source.dtype or not out.flags.carray:
            raise ArgumentError(
                f"out: expected a C-contiguous array of {self.size * source.size:,} {source.dtype}, "
                f"got {out.size:,} {out.dtype}"
            )
        note_write(out)
        return source.copy() if np.may_share_memory(source, out) else source  # MPI takes no common memory

    @refused_on_all
    def all_gather_async(self, array: np.ndarray, *, out: np.ndarray, label: str = "", bucket: int = -1) -> Handle:
        """Start an `all_gather` in the background, through MPI; arguments as there, both contiguous, up to 1 GiB.

        Neither array may be accessed before `wait()` of the handle returns. Like `all_reduce_async` it makes progress
        in calls to the Communicator's handles.
        """
        self.runner.require_open()
        given, array, out = out, host_array(array, "array"), host_array(out, "out")
        source = flat(array, "array")
        source = self._to_gather(source, out)
        call = self.runner.call("all_gather", self.world.base, label, array=array, nbytes=out.nbytes, bucket=bucket)
        start = partial(self.world.base.start_all_gather, source, out.reshape(-1))
        return self.runner.start(call, start, given, written=out, keeps=self)

    @refused_on_all
    def all_gather_rows_async(
        self, array: np.ndarray, *, label: str = "", operation: str = "all_gather", **compared: object
    ) -> Handle:
        """Start gathering bytes, of any length on each rank, in the background, through MPI; 1 GiB together at most.

        Args:
            array: flat, uint8; not to be changed before `wait()` of the handle returns the list of all ranks' bytes,
                each of which begins at a multiple of 64.
            label: the name under which it is counted.
            operation: the collective that this one implements.
            compared: what else ranks compare: `dtype`, `shape` and `root`, as in a Call.
        """
        self.runner.require_open()
        rows: list[np.ndarray] = []
        call = self.runner.call(operation, self.world.base, label, nbytes=array.nbytes, **compared)
        start = partial(self.world.base.start_gather_rows, array, rows)
        return self.runner.start(call, start, rows, keeps=self)

    @refused_on_all
    def all_gather_in_place(self, array: np.ndarray, *, label: str = "", nbytes: int | None = None) -> np.ndarray:
        """Gather, in place, an array of which rank r has written block r, and return it.

        array: C-contiguous, the same shape and dtype on every rank; the world's size divides its number of elements.
        Where it is common memory no data moves: the ranks only meet. nbytes: the size to count, where part of the
        array is padding.
        """
        self.all_gather_in_place_init(array, label=label, nbytes=nbytes)()
        return array

    @refused_on_all
    def all_gather_in_place_init(
        self, array: np.ndarray, *, label: str = "", nbytes: int | None = None
    ) -> Callable[[], None]:
        """Return a prepared `all_gather_in_place` of this memory, to be called repeatedly."""
        self.runner.require_open()
        array = host_array(array, "array")
        if not array.flags.c_contiguous:
            raise ArgumentError("array: expected a C-contiguous array to gather in place")
        values, _ = writable(array, "array")
        if values.size % self.size:
            raise ArgumentError(f"array: expected a number of elements that {self.size} divides, got {values.size}")
        count = values.size // self.size
        block = values[self.rank * count : (self.rank + 1) * count]
        chosen = self.world.transport_for(values)
        call = self.runner.call("all_gather", chosen, label, array=array, nbytes=nbytes)
        is_common, is_shared = self.is_common(values), chosen is self.world.shared

        def move() -> None:
            if is_common:
                chosen.barrier()
            else:  # MPI takes no memory that is both source and target
                chosen.all_gather(block if is_shared else block.copy(), values)

        return self.runner.repeatable(call, move, values, keeps=self)

    def is_common(self, array: np.ndarray) -> bool:
        """Return whether an array is memory common to all ranks."""
        return self.hosts == 1 and self.is_common_on_host(array)

    def is_common_on_host(self, array: np.ndarray) -> bool:
        """Return whether an array is memory common to all ranks of this host."""
        return self.world.is_common(array)

    @refused_on_all
    def reduce_scatter(
        self,
        array: np.ndarray,
        op: str = "sum",
        *,
        out: np.ndarray | None = None,
        label: str = "",
        nbytes: int | None = None,
        bucket: int = -1,
    ) -> np.ndarray:
        """Reduce blocks over the ranks, in rank order, and return block `rank`.

        array: array.shape[0] is a multiple of the world's size. out: receives the block, C-contiguous; None: a new
        array. nbytes: the size to count, where part of the array is padding. bucket: its index, for observers.
        """
        array = host_array(array, "array")
        op = check_op(op, array)
        source = flat(array, "array")
        if array.ndim == 0 or array.shape[0] % self.size:
            raise ArgumentError(
                f"array: expected a first dimension that {self.size} ranks divide, got shape {array.shape}"
            )
        shape = (array.shape[0] // self.size, *array.shape[1:])
        given = out = np.empty(shape, array.dtype) if out is None else out
        out = host_array(out, "out")
        if out.shape != shape or out.dtype != array.dtype or not out.flags.c_contiguous:
            raise ArgumentError(
                f"out: expected a C-contiguous array of shape {shape} and dtype {array.dtype}, "
                f"got {out.shape} and {out.dtype}"
            )
        target, finish = writable(out, "out")
        block = np.empty_like(target) if np.may_share_memory(source, target) else target
        chosen = self.world.blocking_for(source)
        call = self.runner.call("reduce_scatter", chosen, label, array=array, nbytes=nbytes, op=op, bucket=bucket)
        self.runner.run(call, chosen.reduce_scatter, source, block, op)
        if block is not target:
            target[...] = block
        finish()
        return given

    @refused_on_all
    def reduce_scatter_init(
        self, rows: np.ndarray, op: str = "sum", *, out: np.ndarray, label: str = "", nbytes: int | None = None,
        bucket: int = -1, count: int | None = None,
    ) -> Callable[[], None]:  # fmt: skip
        """Return a prepared reduce-scatter of common memory, to be called repeatedly.

        When all ranks have called it, a call reduces block `rank` of all rows, in their order. It returns as soon as
        this rank's block is done, so rows may be written again only after the next collective.

        Args:
            rows: C-contiguous in common memory, (any number, world_size * n); each is written by one rank.
            out: n elements of this rank, separate from `rows`.
            nbytes: the size to count.
            bucket: index of the gradients' bucket, for observers.
            count: by what a mean divides the sum; None: the number of rows.
        """
        self.runner.require_open()
        rows, out = host_array(rows, "rows"), host_array(out, "out")
        op = check_op(op, rows)
        fits = rows.ndim == 2 and len(rows) and rows.shape[1] == self.size * out.size
        if not fits or rows.dtype != out.dtype or not self.is_common(rows):
            raise ArgumentError(
                f"rows: expected (rows, {self.size * out.size}) of {out.dtype}, common to all ranks, "
                f"got {rows.shape} of {rows.dtype}"
            )
        target, _ = writable(out, "out")
        shared, block = self.world.shared, slice(self.rank * out.size, (self.rank + 1) * out.size)
        assert shared is not None, "common memory without a transport"
        reduce = prepared_reduction([row[block] for row in rows], target, op, count, fold=shared.fold)
        call = self.runner.call("reduce_scatter", shared, label, array=rows[0], nbytes=nbytes, op=op, bucket=bucket)
        return self.runner.repeatable(call, in_sequence([shared.barrier, reduce]), target, keeps=self)

    # --- objects, for small ones ---

    @refused_on_all
    def broadcast_object(self, obj: object, root: int = 0, *, label: str = "") -> Any:
        """Return root's object on every rank; it is pickled."""
        check_root(root, self.size)
        call, own = self.runner.call("broadcast_object", self.world.base, label, root=root), self._packed(obj, root)
        return self._unpacked(self.runner.run(call, self.world.bcast, own, root))

    @refused_on_all
    def all_gather_object(self, obj: T, *, label: str = "") -> list[T]:
        """Return every rank's object, in rank order; they are pickled."""
        call = self.runner.call("all_gather_object", self.world.base, label)
        return [self._unpacked(each) for each in self.runner.run(call, self.world.allgather, self._packed(obj))]

    @refused_on_all
    def gather_object(self, obj: T, root: int = 0, *, label: str = "") -> list[T] | None:
        """Return every rank's object on root, None elsewhere; they are pickled."""
        check_root(root, self.size)
        comm, own = self.world.comm, self._packed(obj)
        call = self.runner.call("gather_object", self.world.base, label, root=root)
        found = self.runner.run(call, lambda: [own] if comm is None else comm.gather(own, root))
        return None if found is None else [self._unpacked(each) for each in found]

    @refused_on_all
    def scatter_object(self, items: Sequence[object] | None, root: int = 0, *, label: str = "") -> Any:
        """Return item `rank` of root's sequence of world_size items; they are pickled.

        Every rank raises ArgumentError when root's sequence has another length.
        """
        check_root(root, self.size)
        header = scatter_header(items, self.size)[1] if self.rank == root else None
        problem = self.runner.run_uncounted("scatter_object", self.world.bcast, header, root, root=root)
        if problem:
            raise ArgumentError(f"items: {problem} on rank {root}")
        return self.scatter_items(items, root, label)

    @refused_on_all
    def scatter_items(self, items: Sequence[object] | None, root: int, label: str) -> Any:
        """Return item `rank` of root's items, of which it is known that there are world_size."""
        comm, given = self.world.comm, items if self.rank == root and items is not None else ()
        ordered = [self._packed(each) for each in given] or None
        call = self.runner.call("scatter_object", self.world.base, label, root=root)
        move = (lambda: ordered[0]) if comm is None else (lambda: comm.scatter(ordered, root))  # type: ignore[index]
        return self._unpacked(self.runner.run(call, move))

    def _packed(self, obj: object, root: int = -1) -> Any:
        """Return what MPI sends for an object, of which it can be sure that it is sent; None if another rank is root.

        A rank that found out while the others wait for the object could not tell them. In a world of one it is itself.
        """
        if self.world.comm is None:
            return obj
        return mpi_communicators.pickled(obj) if root in (-1, self.rank) else None

    def _unpacked(self, data: Any) -> Any:
        return data if self.world.comm is None else mpi_communicators.unpickled(data)
