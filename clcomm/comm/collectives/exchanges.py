"""Collectives of arrays of other lengths on each rank, and reductions of some ranks: all made of all-to-alls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Number
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.host.arrays import dtype_name, host_array, note_write
from clcomm.comm.collectives.arguments import (
    Kind,
    check_op,
    check_root,
    check_separate,
    flat,
    scatter_header,
    shape_and_dtype,
    writable,
)
from clcomm.comm.collectives.arrays import OtherCollectives
from clcomm.comm.collectives.runner import refused_on_all
from clcomm.comm.transport.reduction import reduce_in_rank_order


class Exchanges(OtherCollectives):
    """The Communicator's collectives between ranks that have or get different amounts (a base class of it)."""

    @refused_on_all
    def all_to_all(
        self, sends: Sequence[np.ndarray], receives: Sequence[np.ndarray], *, label: str = "", operation: str = ""
    ) -> None:
        """Send array r of `sends` to rank r, and receive array r of `receives` from rank r.

        Arrays are contiguous. Lengths may differ between ranks, and empty arrays are not sent; `sends` of a rank have
        the lengths of the others' `receives`, else all ranks raise MismatchError, as where dtypes differ.

        Args:
            sends: one array for each rank, in rank order.
            receives: one array for each rank, in rank order.
            label: the name under which it is counted.
            operation: the collective that this exchange implements; "": "all_to_all".
        """
        for name, arrays in (("sends", sends), ("receives", receives)):
            if len(arrays) != self.size:
                raise ArgumentError(f"{name}: expected {self.size} arrays, one for each rank, got {len(arrays)}")
            if not all(host_array(array, name).flags.c_contiguous for array in arrays):
                raise ArgumentError(f"{name}: expected C-contiguous arrays, got strided ones")
        for array in filter(np.size, receives):
            writable(array, "receives")
        own, kept = sends[self.rank].nbytes, receives[self.rank].nbytes
        if own != kept:
            raise ArgumentError(f"receives: expected {own:,} bytes, as sends has for this rank itself, got {kept:,}")
        check_separate([*(("sends", each) for each in sends), *(("receives", each) for each in receives)])
        nbytes = sum(array.nbytes for array in receives)
        dtypes = {array.dtype for array in (*sends, *receives)}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        call = self.runner.call(operation or "all_to_all", self.world.base, label, nbytes=nbytes, dtype=dtype)
        self.runner.run(call, self.world.base.all_to_all, sends, receives)

    @refused_on_all
    def gather(self, data: Any, root: int = 0, *, out: np.ndarray | None = None, label: str = "") -> list[Any] | None:
        """Return the list of all ranks' data on root, None elsewhere.

        Arrays, of any shapes and dtypes, are sent as buffers; where a rank gives anything else, all are pickled.

        out: on root, receives the arrays one after another, of their dtype and all their elements; the list then has
        views of it. Every rank raises ArgumentError when it does not fit.
        """
        check_root(root, self.size)
        return self._gather(data, [root], "gather", out, label)

    @refused_on_all
    def all_gather_list(self, data: Any, *, out: np.ndarray | None = None, label: str = "") -> list[Any]:
        """Return the list of all ranks' data on every rank: `all_gather` of any shapes; arguments as for `gather`."""
        found = self._gather(data, range(self.size), "all_gather_list", out, label)
        assert found is not None, "every rank gets the list"
        return found

    def _gather(
        self, data: Any, roots: Sequence[int], operation: str, out: np.ndarray | None, label: str
    ) -> list[Any] | None:
        kinds = self.runner.run_uncounted(operation, self.world.allgather, shape_and_dtype(data))
        known = [kind for kind in kinds if kind is not None]
        if len(known) < self.size:
            one = operation == "gather"
            return self.gather_object(data, roots[0], label=label) if one else self.all_gather_object(data, label=label)
        source, nothing = _bytes_of(flat(data, "data")), np.empty(0, np.uint8)
        arrays = self._room_for(known, out) if self.rank in roots else []
        received = [_bytes_of(each) for each in arrays] or [nothing] * self.size
        nbytes = sum(_elements(kind) * kind[1].itemsize for kind in known)
        self._exchange(operation, label, [source if rank in roots else nothing for rank in range(self.size)], received,
                       nbytes, known, roots[0] if operation == "gather" else -1)  # fmt: skip
        return [each.reshape(kind[0]) for each, kind in zip(arrays, known, strict=True)] if arrays else None

    @refused_on_all
    def scatter(self, data: Any, root: int = 0, *, out: np.ndarray | None = None, label: str = "") -> Any:
        """Return item `rank` of root's sequence of world_size items; the others' argument is ignored.

        An array (first dimension: world_size) and arrays in a list, of any shapes and dtypes, are sent as buffers;
        other items are pickled. Every rank raises ArgumentError when root's sequence has another length.

        out: receives an array, of its dtype and number of elements; every rank raises ArgumentError if one does not
        fit.
        """
        check_root(root, self.size)
        header = scatter_header(data, self.size) if self.rank == root else None
        kinds, problem = self.runner.run_uncounted("scatter", self.world.bcast, header, root, root=root)
        if problem:
            raise ArgumentError(f"data: {problem} on rank {root}")
        if None in kinds:
            return self.scatter_items(data, root, label)
        nothing = [np.empty(0, np.uint8)] * self.size
        (mine,) = self._room_for([kinds[self.rank]], out)
        sends = [_bytes_of(flat(host_array(each, "data"), "data")) for each in data] if self.rank == root else nothing
        receives = [_bytes_of(mine) if rank == root else nothing[0] for rank in range(self.size)]
        nbytes = sum(_elements(kind) * kind[1].itemsize for kind in kinds)
        self._exchange("scatter", label, sends, receives, nbytes, kinds, root)
        return mine.reshape(kinds[self.rank][0]) if out is None else out

    def _exchange(
        self, operation: str, label: str, sends: Sequence[np.ndarray], receives: Sequence[np.ndarray], nbytes: int,
        kinds: Sequence[Kind], root: int,
    ) -> None:  # fmt: skip
        """Send and receive bytes, which are those of arrays of these kinds, as one collective."""
        shape, dtype = kinds[0]
        one = {"count": math.prod(shape), "dtype": dtype, "shape": shape} if len(set(kinds)) == 1 else {}
        call = self.runner.call(operation, self.world.base, label, nbytes=nbytes, root=root, **one)
        self.runner.run(call, self.world.base.all_to_all, sends, receives)

    def _room_for(self, kinds: Sequence[Kind], out: np.ndarray | None) -> list[np.ndarray]:
        """Return flat arrays of these kinds, one after another in `out` where it is given; all ranks refuse another."""
        counts = [_elements(kind) for kind in kinds]
        if out is None:
            return [np.empty(count, kind[1]) for count, kind in zip(counts, kinds, strict=True)]
        given, dtypes = host_array(out, "out"), {kind[1] for kind in kinds}
        if dtypes != {given.dtype} or given.size != sum(counts) or not given.flags.carray:
            wanted = " and ".join(sorted(map(dtype_name, dtypes)))
            self.runner.refuse(
                f"out: expected a C-contiguous array of {sum(counts):,} {wanted}, got {given.size:,} "
                f"{dtype_name(given.dtype)}{'' if given.flags.carray else ', not contiguous or read-only'}"
            )
        note_write(given)
        return np.split(given.reshape(-1), np.cumsum(counts)[:-1])

    # --- reductions of some ranks, in rank order ---

    @refused_on_all
    def reduce(
        self, array: np.ndarray, op: str = "sum", root: int = 0, *, out: np.ndarray | None = None, label: str = ""
    ) -> np.ndarray | None:
        """Return the reduction over the ranks, in rank order, on root, None elsewhere.

        Args:
            array: as for `all_reduce`, or a number.
            op: as for `all_reduce`.
            root: the rank that gets it.
            out: on root, receives the result, of the same shape and dtype; None: a new array.
            label: the name under which it is counted.
        """
        check_root(root, self.size)
        return self._reduced("reduce", array, op, [self.size * (rank == root) for rank in range(self.size)], out, label,
                             root)  # fmt: skip

    @refused_on_all
    def scan(self, array: np.ndarray, op: str = "sum", *, out: np.ndarray | None = None, label: str = "") -> np.ndarray:
        """Return the reduction of ranks 0 to this one, in rank order; arguments as for `reduce`, without "mean"."""
        found = self._reduced("scan", array, op, range(1, self.size + 1), out, label)
        assert found is not None, "every rank gets a result"
        return found

    @refused_on_all
    def exscan(
        self, array: np.ndarray, op: str = "sum", *, out: np.ndarray | None = None, label: str = ""
    ) -> np.ndarray | None:
        """Return the reduction of the ranks before this one; None on rank 0, which has none. See `scan`."""
        return self._reduced("exscan", array, op, range(self.size), out, label)

    def _reduced(
        self, operation: str, array: Any, op: str, firsts: Sequence[int], out: np.ndarray | None, label: str,
        root: int = -1,
    ) -> np.ndarray | None:  # fmt: skip
        """Return the reduction of the first `firsts[rank]` ranks; None for none of them.

        Each rank reduces a shard for all, from every rank's, and sends it to those that it is for.
        """
        array = np.asarray(array) if isinstance(array, Number) else host_array(array, "array")
        op = check_op(op, array)
        if op == "mean" and root < 0:
            raise ArgumentError(f"op: expected a reduction that {operation} has, got 'mean'; divide a \"sum\"")
        source, into = flat(array, "array"), out if firsts[self.rank] else None
        given = np.empty(array.shape, array.dtype) if into is None else host_array(into, "out")
        if given.shape != array.shape or given.dtype != array.dtype:
            raise ArgumentError(
                f"out: expected shape {array.shape} and dtype {array.dtype} as array has, got {given.shape} and "
                f"{given.dtype}"
            )
        target, finish = writable(given, "out")
        target = target if firsts[self.rank] else target[:0]
        shards = np.array_split(source, self.size)

        def move() -> None:
            rows = [np.empty_like(shards[self.rank]) for _ in firsts]
            self.world.base.all_to_all(shards, rows)
            results = [np.empty_like(rows[0] if first else rows[0][:0]) for first in firsts]
            for first, result in zip(firsts, results, strict=True):
                if first:
                    reduce_in_rank_order(rows[:first], result, op)
            self.world.base.all_to_all(results, np.array_split(target, self.size))

        call = self.runner.call(operation, self.world.base, label, array=array, op=op, root=root)
        self.runner.run(call, move)
        return finish() if firsts[self.rank] else None


def _elements(kind: Kind) -> int:
    return math.prod(kind[0])


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint8)
