"""Rows that all ranks read: each rank codes its own, and decodes them all."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from clcomm.compression.coding import Work
from clcomm.compression.ranks import Ranks
from clcomm.host_memory import aligned_zeros


def prepare_exchange(
    comm: Ranks,
    columns: int,
    dtype: type,
    encode: Callable[[np.ndarray, int], Work],
    decode: Callable[[np.ndarray], Work],
) -> Work:
    """Return what codes this rank's row, hands it to all ranks, and decodes all rows; collective, and so is each call.

    encode(rows, rank), decode(rows): prepare their work on rows of (world_size, columns). Two of these take turns: who
    is done writes into the other while a neighbour still reads the first; it comes back to that one after a call in
    which all have met.
    """
    sides, nbytes = [], comm.size * columns * np.dtype(dtype).itemsize
    for _ in range(2):
        memory = comm.allocate_common(nbytes) if comm.hosts == 1 else aligned_zeros(nbytes)
        rows: np.ndarray = memory.view(dtype).reshape(comm.size, columns)
        sides.append((encode(rows, comm.rank), comm.all_gather_in_place_init(rows), decode(rows)))
    turns = itertools.cycle(sides)

    def exchange() -> None:
        for part in next(turns):
            part()

    return exchange
