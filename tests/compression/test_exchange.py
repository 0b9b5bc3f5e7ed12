"""The exchange of encoded rows: every rank decodes every rank's row of the same call, however slow it is."""

from __future__ import annotations

import itertools
import time
from functools import partial

import numpy as np
import pytest

from clcomm.sync.compression.ranks import prepare_exchange
from tests.helpers import Recorder

CALLS = 12


def row_of(rank: int, call: int, columns: int) -> np.ndarray:
    return np.random.default_rng([rank, call]).integers(0, 255, columns).astype(np.uint8)


@pytest.mark.parametrize("slow", [0, -1])
@pytest.mark.parametrize("columns", [1, 4099])
def test_a_slow_rank_decodes_the_rows_of_its_own_call(comm, columns, slow):
    """A fast rank encodes the next row while the slow one still decodes."""
    calls, found = itertools.count(), []

    def encode(rows: np.ndarray, rank: int):
        def work() -> None:
            rows[rank] = row_of(comm.rank, next(calls), columns)

        return work

    def decode(rows: np.ndarray):
        def work() -> None:
            if comm.rank == slow % comm.size:
                time.sleep(0.002)
            found.append(rows.copy())

        return work

    exchange = prepare_exchange(comm, columns, np.uint8, encode, decode)
    for _ in range(CALLS):
        exchange()
    assert len(found) == CALLS
    for number, rows in enumerate(found):
        assert np.array_equal(rows, [row_of(rank, number, columns) for rank in range(comm.size)])


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_a_call_is_one_all_gather_of_its_rows(comm, dtype):
    nothing = partial(lambda rows, *rank: lambda: None)
    exchange = prepare_exchange(comm, 10, dtype, nothing, nothing)
    watcher = Recorder()
    comm.add_observer(watcher)
    for _ in range(3):
        exchange()
    nbytes = comm.size * 10 * np.dtype(dtype).itemsize
    assert [(event.operation, event.nbytes) for event in watcher.events] == [("all_gather", nbytes)] * 3
