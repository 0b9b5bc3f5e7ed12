"""Reductions whose result further arrays receive piece by piece, rows of the reduction among them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clcomm.base.host.arrays import BFLOAT16
from clcomm.comm.transport import reduction

DTYPES = [np.float32, np.float64, np.int16, BFLOAT16]


@pytest.fixture(scope="module")
def small_pieces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction, "PIECE_BYTES", 64)
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ["sum", "max", "mean"])
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(ranks=st.integers(1, 5), length=st.integers(0, 200), into=st.sets(st.integers(0, 5)), seed=st.integers(0, 99))
def test_all_targets_get_the_bits_of_one(small_pieces, dtype, op, ranks, length, into, seed):
    if op == "mean" and np.dtype(dtype).kind == "i":
        return
    rng = np.random.default_rng(seed)
    rows = [(rng.standard_normal(length) * 9).astype(dtype) for _ in range(ranks)]
    alone = np.empty(length, dtype)
    reduction.prepared_reduction([row.copy() for row in rows], alone, op)()
    # In place, as an all-reduce on every rank's own array: row 0 is the target, other rows and a new array get copies.
    copies = [rows[index] if 0 < index < ranks else np.empty(length, dtype) for index in into]
    reduction.prepared_reduction(rows, rows[0], op, copies=copies)()
    for each in (rows[0], *copies):
        assert each.tobytes() == alone.tobytes()
