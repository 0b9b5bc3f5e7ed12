"""A world of one rank: every collective is a copy."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from clcomm.comm.transport.base import Transport, require_aligned
from clcomm.comm.transport.pending import Pending


class SoloTransport(Transport):
    """Collectives of a single rank; needs no MPI."""

    name = "solo"
    rank = 0
    world_size = 1

    def barrier(self) -> None:
        pass

    def all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> None:
        _copy(source, out)

    def start_all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> Pending:
        require_aligned(source, out)
        pending = Pending(deque(), None, lambda: _copy(source, out))
        pending.wait()
        pending.waits = []
        return pending

    def broadcast(self, array: np.ndarray, root: int) -> None:
        pass

    def all_gather(self, source: np.ndarray, out: np.ndarray) -> None:
        _copy(source, out)

    def start_all_gather(self, source: np.ndarray, out: np.ndarray) -> Pending:
        return self.start_all_reduce(source, out, "sum")

    def start_gather_rows(self, source: np.ndarray, rows: list[np.ndarray]) -> Pending:
        rows.append(np.empty_like(source))
        return self.start_all_reduce(source, rows[0], "sum")

    def reduce_scatter(self, source: np.ndarray, out: np.ndarray, op: str) -> None:
        _copy(source, out)

    def all_to_all(self, sends: Sequence[np.ndarray], receives: Sequence[np.ndarray]) -> None:
        _copy(sends[0], receives[0])


def _copy(source: np.ndarray, out: np.ndarray) -> None:
    if source is not out:
        np.copyto(out, source)
