"""Exchange of encoded rows: each rank encodes its own and decodes all."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from clcomm.sync.compression.coding import Work
from clcomm.sync.compression.ranks import Ranks


def prepare_exchange(
    comm: Ranks,
    columns: int,
    dtype: type,
    encode: Callable[[np.ndarray, int], Work],
    decode: Callable[[np.ndarray], Work],
) -> Work:
    """Return a function that encodes this rank's row, gathers all rows and decodes them; both are collective.

    Two sets of rows take turns: a fast rank writes to one while others still read the other, and returns to the first
    only after a call in which all ranks have met.

    Args:
        columns: elements of a row.
        encode: called with (rows, rank); prepares the encoding of this rank's row.
        decode: called with (rows); prepares the decoding of rows of (world_size, columns).
    """
    sides, nbytes = [], comm.size * columns * np.dtype(dtype).itemsize
    for _ in range(2):
        rows: np.ndarray = comm.allocate_common(nbytes).view(dtype).reshape(comm.size, columns)
        sides.append((encode(rows, comm.rank), comm.all_gather_in_place_init(rows), decode(rows)))
    turns = itertools.cycle(sides)

    def exchange() -> None:
        for part in next(turns):
            part()

    return exchange
