"""Collectives on NumPy arrays other than all-reduce: each checks its arguments and calls a transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from clcomm.collectives.arguments import check_op, check_root, flat, scatter_header, shape_and_dtype, writable
from clcomm.collectives.handle import Handle
from clcomm.collectives.objects import ObjectCollectives
from clcomm.errors import ArgumentError
from clcomm.transport import mpi_communicators
from clcomm.transport.reduction import prepared_reduction


class ArrayCollectives(ObjectCollectives):
    """The Communicator's other collectives on arrays (a base class of it).

    Arguments that are not numeric arrays are pickled as objects.
    """

    def barrier(self) -> None:
        """Return when every rank has called it."""
        transport = self._base if self._shared is None else self._shared
        self._run_counted(self._call("barrier", transport), transport.barrier)

    def rendezvous(self) -> None:
        """Return when every rank has called it: a barrier for long waits, which leaves the cores to working ranks.

        Other collectives respond within microseconds but poll; this one sleeps for milliseconds. It is not counted.
        """
        self._complete_in_flight()
        if self.comm is not None:
            with self._shown_as_current(self._call("rendezvous", self._base, is_counted=False), self._sequence):
                mpi_communicators.wait_patiently(self.comm.Ibarrier())

    def broadcast(self, array: np.ndarray, root: int = 0, *, label: str = "", nbytes: int | None = None) -> np.ndarray:
        """Copy root's array into every rank's array of the same shape and dtype, in place, and return it.

        nbytes: the size to count, where part of the array is padding.
        """
        check_root(root, self.size)
        values, finish = writable(array, "array")
        chosen = self._transport_for(values)
        call = self._call("broadcast", chosen, label, array=array, nbytes=nbytes, root=root)
        self._run_counted(call, chosen.broadcast, values, root)
        return finish()

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
        source = flat(array, "array")
        if out is None:
            out = np.empty((self.size, *array.shape), array.dtype)
        if out.size != self.size * array.size or out.dtype != array.dtype or not out.flags.carray:
            raise ArgumentError(
                f"out: expected a C-contiguous array of {self.size * array.size:,} {array.dtype}, "
                f"got {out.size:,} {out.dtype}"
            )
        chosen = self._transport_for(source)
        call = self._call(operation, chosen, label, array=array, nbytes=out.nbytes, bucket=bucket)
        self._run_counted(call, chosen.all_gather, source, out.reshape(-1))
        return out

    def all_gather_async(self, array: np.ndarray, *, out: np.ndarray, label: str = "", bucket: int = -1) -> Handle:
        """Start an `all_gather` in the background, through MPI; arguments as there, both contiguous, up to 1 GiB.

        Neither array may be accessed before `wait()` of the handle returns. Like `all_reduce_async` it makes progress
        in calls to the Communicator's handles.
        """
        self._require_open()
        source = flat(array, "array")
        if out.size != self.size * array.size or out.dtype != array.dtype or not out.flags.carray:
            raise ArgumentError(
                f"out: expected a C-contiguous array of {self.size * array.size:,} {array.dtype}, "
                f"got {out.size:,} {out.dtype}"
            )
        call = self._call("all_gather", self._base, label, array=array, nbytes=out.nbytes, bucket=bucket)
        return self._start(call, partial(self._base.start_all_gather, source, out.reshape(-1)), out)

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
        self._require_open()
        rows: list[np.ndarray] = []
        call = self._call(operation, self._base, label, nbytes=array.nbytes, **compared)
        return self._start(call, partial(self._base.start_gather_rows, array, rows), rows)

    def all_gather_in_place(self, array: np.ndarray, *, label: str = "", nbytes: int | None = None) -> np.ndarray:
        """Gather, in place, an array of which rank r has written block r, and return it.

        array: C-contiguous, the same shape and dtype on every rank; the world's size divides its number of elements.
        Where it is common memory no data moves: the ranks only meet. nbytes: the size to count, where part of the
        array is padding.
        """
        self.all_gather_in_place_init(array, label=label, nbytes=nbytes)()
        return array

    def all_gather_in_place_init(
        self, array: np.ndarray, *, label: str = "", nbytes: int | None = None
    ) -> Callable[[], None]:
        """Return a prepared `all_gather_in_place` of this memory, to be called repeatedly."""
        self._require_open()
        if isinstance(array, np.ndarray) and not array.flags.c_contiguous:
            raise ArgumentError("array: expected a C-contiguous array to gather in place")
        values, _ = writable(array, "array")
        if values.size % self.size:
            raise ArgumentError(f"array: expected a number of elements that {self.size} divides, got {values.size}")
        count = values.size // self.size
        block = values[self.rank * count : (self.rank + 1) * count]
        chosen = self._transport_for(values)
        if self.is_common(values):
            move: Callable[[], None] = chosen.barrier
        elif chosen is self._shared:
            move = partial(chosen.all_gather, block, values)
        else:
            # MPI requires separate source and target.
            def move() -> None:
                chosen.all_gather(block.copy(), values)

        return partial(self._run_counted, self._call("all_gather", chosen, label, array=array, nbytes=nbytes), move)

    def is_common(self, array: np.ndarray) -> bool:
        """Return whether an array is memory common to all ranks."""
        return self.hosts == 1 and self.is_common_on_host(array)

    def is_common_on_host(self, array: np.ndarray) -> bool:
        """Return whether an array is memory common to all ranks of this host."""
        return self._shared is not None and self._shared.is_common(array)

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
        check_op(op, array)
        source = flat(array, "array")
        if array.ndim == 0 or array.shape[0] % self.size:
            raise ArgumentError(
                f"array: expected a first dimension that {self.size} ranks divide, got shape {array.shape}"
            )
        shape = (array.shape[0] // self.size, *array.shape[1:])
        if out is None:
            out = np.empty(shape, array.dtype)
        if out.shape != shape or out.dtype != array.dtype or not out.flags.c_contiguous:
            raise ArgumentError(
                f"out: expected a C-contiguous array of shape {shape} and dtype {array.dtype}, "
                f"got {out.shape} and {out.dtype}"
            )
        target, finish = writable(out, "out")
        chosen = self._transport_for(source)
        call = self._call("reduce_scatter", chosen, label, array=array, nbytes=nbytes, op=op, bucket=bucket)
        self._run_counted(call, chosen.reduce_scatter, source, target, op)
        return finish()

    def reduce_scatter_init(
        self, rows: np.ndarray, op: str = "sum", *, out: np.ndarray, label: str = "", nbytes: int | None = None,
        bucket: int = -1,
    ) -> Callable[[], None]:  # fmt: skip
        """Return a prepared reduce-scatter of common memory, to be called repeatedly.

        When all ranks have called it, a call reduces block `rank` of all rows, in rank order. It returns as soon as
        this rank's block is done, so rows may be written again only after the next collective.

        Args:
            rows: C-contiguous in common memory, (world_size, world_size * n); each rank writes its own row.
            out: n elements of this rank, separate from `rows`.
            nbytes: the size to count.
            bucket: index of the gradients' bucket, for observers.
        """
        self._require_open()
        check_op(op, rows)
        if rows.shape != (self.size, self.size * out.size) or rows.dtype != out.dtype or not self.is_common(rows):
            raise ArgumentError(
                f"rows: expected ({self.size}, {self.size * out.size}) of {out.dtype}, common to all ranks, "
                f"got {rows.shape} of {rows.dtype}"
            )
        target, _ = writable(out, "out")
        shared, block = self._shared, slice(self.rank * out.size, (self.rank + 1) * out.size)
        assert shared is not None, "common memory without a transport"
        reduce = prepared_reduction([row[block] for row in rows], target, op, fold=shared.fold)

        def meet_and_reduce() -> None:
            shared.barrier()
            reduce()

        call = self._call("reduce_scatter", shared, label, array=rows[0], nbytes=nbytes, op=op, bucket=bucket)
        return partial(self._run_counted, call, meet_and_reduce)

    def all_to_all(
        self, sends: Sequence[np.ndarray], receives: Sequence[np.ndarray], *, label: str = "", operation: str = ""
    ) -> None:
        """Send array r of `sends` to rank r, and receive array r of `receives` from rank r.

        Arrays are contiguous. Lengths may differ between ranks, and empty arrays are not sent; `sends` of a rank have
        the lengths of the others' `receives`, else MismatchError is raised on the rank that receives. Ranks whose
        arrays have other dtypes all raise it.

        Args:
            sends: one array for each rank, in rank order.
            receives: one array for each rank, in rank order.
            label: the name under which it is counted.
            operation: the collective that this exchange implements; "": "all_to_all".
        """
        for name, arrays in (("sends", sends), ("receives", receives)):
            if len(arrays) != self.size:
                raise ArgumentError(f"{name}: expected {self.size} arrays, one for each rank, got {len(arrays)}")
            if not all(array.flags.c_contiguous for array in arrays):
                raise ArgumentError(f"{name}: expected C-contiguous arrays, got strided ones")
        nbytes = sum(array.nbytes for array in receives)
        dtypes = {array.dtype for array in (*sends, *receives)}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        call = self._call(operation or "all_to_all", self._base, label, nbytes=nbytes, dtype=dtype)
        self._run_counted(call, self._base.all_to_all, sends, receives)

    def gather(self, data: Any, root: int = 0, *, label: str = "") -> list[Any] | None:
        """Return the list of all ranks' data on root, None elsewhere.

        Arrays of equal shape and dtype are sent as buffers; other arrays and objects are pickled.
        """
        check_root(root, self.size)
        kinds = self._run_uncounted("gather", self._allgather, shape_and_dtype(data))
        if kinds[0] is None or len(set(kinds)) > 1:
            return self.gather_object(data, root, label=label)
        source = flat(data, "data")
        out = np.empty((self.size, *data.shape), data.dtype) if self.rank == root else None
        flat_out = None if out is None else out.reshape(-1)
        chosen = self._transport_for(source)
        call = self._call("gather", chosen, label, array=source, nbytes=source.nbytes * self.size, root=root)
        self._run_counted(call, chosen.gather, source, flat_out, root)
        return None if out is None else list(out)

    def scatter(self, data: Any, root: int = 0, *, label: str = "") -> Any:
        """Return item `rank` of root's sequence of world_size items; the others' argument is ignored.

        An array (first dimension: world_size) is sent as a buffer; a list is pickled, as its items may differ. Every
        rank raises ArgumentError when root's sequence has another length.
        """
        check_root(root, self.size)
        mine = scatter_header(data, self.size) if self.rank == root else None
        shape, dtype, problem = self._run_uncounted("scatter", self._bcast, mine, root)
        if problem:
            raise ArgumentError(f"data: {problem} on rank {root}")
        if shape is None:
            return self._scatter_items(data, root, label)
        out = np.empty(shape[1:], dtype)
        source = flat(data, "data") if self.rank == root else None
        call = self._call("scatter", self._base, label, array=out, nbytes=out.nbytes * self.size, root=root)
        self._run_counted(call, self._base.scatter, source, out.reshape(-1), root)
        return out
