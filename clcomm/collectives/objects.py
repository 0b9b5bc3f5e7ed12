"""Collectives on Python objects, which mpi4py pickles: for small objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from clcomm.collectives.arguments import check_root, scatter_header
from clcomm.collectives.handle import T
from clcomm.collectives.runner import CollectiveRunner
from clcomm.errors import ArgumentError


class ObjectCollectives(CollectiveRunner):
    """The Communicator's collectives on objects (a base class of it)."""

    def broadcast_object(self, obj: object, root: int = 0, *, label: str = "") -> Any:
        """Return root's object on every rank; it is pickled."""
        check_root(root, self.size)
        return self._run_counted(self._call("broadcast_object", self._base, label, root=root), self._bcast, obj, root)

    def all_gather_object(self, obj: T, *, label: str = "") -> list[T]:
        """Return every rank's object, in rank order; they are pickled."""
        return self._run_counted(self._call("all_gather_object", self._base, label), self._allgather, obj)

    def gather_object(self, obj: T, root: int = 0, *, label: str = "") -> list[T] | None:
        """Return every rank's object on root, None elsewhere; they are pickled."""
        check_root(root, self.size)
        move: Callable[[], list[T] | None] = (
            (lambda: [obj]) if self.comm is None else (lambda: self.comm.gather(obj, root))
        )
        return self._run_counted(self._call("gather_object", self._base, label, root=root), move)

    def scatter_object(self, items: Sequence[object] | None, root: int = 0, *, label: str = "") -> Any:
        """Return item `rank` of root's sequence of world_size items; they are pickled.

        Every rank raises ArgumentError when root's sequence has another length.
        """
        check_root(root, self.size)
        header = scatter_header(items, self.size)[-1] if self.rank == root else None
        problem = self._run_uncounted("scatter_object", self._bcast, header, root)
        if problem:
            raise ArgumentError(f"items: {problem} on rank {root}")
        return self._scatter_items(items, root, label)

    def _scatter_items(self, items: Sequence[object] | None, root: int, label: str) -> Any:
        ordered = list(items) if self.rank == root and items is not None else None
        move = (lambda: ordered[0]) if self.comm is None else (lambda: self.comm.scatter(ordered, root))  # type: ignore[index]
        return self._run_counted(self._call("scatter_object", self._base, label, root=root), move)

    def _bcast(self, obj: object, root: int) -> Any:
        return obj if self.comm is None else self.comm.bcast(obj, root)

    def _allgather(self, obj: T) -> list[T]:
        return [obj] if self.comm is None else self.comm.allgather(obj)
