"""Elementwise reductions in a fixed order: rank order, or within each host first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, Protocol

import numpy as np

from clcomm.base.host.arrays import BFLOAT16, widened

P = ParamSpec("P")

#: The NumPy function of each operation; a mean is a sum divided by the number of ranks.
FOLDS: dict[str, Callable[..., np.ndarray]] = {
    "sum": np.add,
    "mean": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "prod": np.multiply,
    "land": np.logical_and,
    "lor": np.logical_or,
    "lxor": np.logical_xor,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
#: The operations for integers and booleans only, as in MPI.
OF_INTEGERS = ("land", "lor", "lxor", "band", "bor", "bxor")

#: Elements are reduced in pieces of this many bytes, so that a piece stays in a core's second-level cache while all
#: ranks' values are folded into it; with smaller pieces, more calls of NumPy would cost more time than that saves.
PIECE_BYTES = 512 << 10


class Fold(Protocol):
    """Prepares sums on fixed memory that are faster than NumPy's, with the same bits."""

    def __call__(self, rows: Sequence[np.ndarray], out: np.ndarray, divisor: int) -> Callable[[], None] | None:
        """Return a function that writes ((rows[0] + rows[1]) + ...) / divisor to `out`; None if unsupported."""


def reduce_in_rank_order(rows: Sequence[np.ndarray], out: np.ndarray, op: str, ranks: int | None = None) -> None:
    """Fold rows 0, 1, 2, ... elementwise into `out`, which may be row 0 but no other row.

    Each element is ((row0 + row1) + row2) + ..., for rows of any length.

    Args:
        rows: of equal length and dtype.
        out: of the same length and dtype.
        op: a key of FOLDS.
        ranks: by what a mean divides the sum, the number of values in it; None: the number of rows.
    """
    prepared_reduction(rows, out, op, ranks)()


def prepared_reduction_by_hosts(
    rows: Sequence[np.ndarray], out: np.ndarray, op: str, hosts: Sequence[Sequence[int]]
) -> Callable[[], None]:
    """Return a function that folds each host's rows in rank order, then the hosts' results in the order of `hosts`.

    Each element is (sum of host 0's rows) + (sum of host 1's rows) + ...; `out` may be any row or none.

    Args:
        rows: one from each rank, in rank order.
        out: of the same length and dtype.
        op: a key of FOLDS.
        hosts: the ranks of each host.
    """
    totals = [np.empty_like(out) for _ in hosts]
    parts = [
        prepared_reduction([rows[rank] for rank in ranks], total, partial_op(op))
        for total, ranks in zip(totals, hosts, strict=True)
    ]
    parts.append(prepared_reduction(totals, out, op, len(rows)))
    return in_sequence(parts)


def partial_op(op: str) -> str:
    """Return the operation for a part of the ranks: a mean divides once, at the end."""
    return "sum" if op == "mean" else op


def prepared_reduction(
    rows: Sequence[np.ndarray],
    out: np.ndarray,
    op: str,
    ranks: int | None = None,
    fold: Fold | None = None,
    copies: Sequence[np.ndarray] = (),
) -> Callable[[], None]:
    """Return a function that performs `reduce_in_rank_order` on the same memory at each call.

    Args:
        rows, out, op, ranks: as for `reduce_in_rank_order`.
        fold: prepares the reductions that it supports; NumPy does all others.
        copies: further arrays that receive the result; they may be rows. Each piece is copied while it is in the cache.
    """
    divisor = (ranks or len(rows)) if op == "mean" else 1
    folding = fold(rows, out, divisor) if fold is not None and op in ("sum", "mean") else None
    if folding is not None:
        return partial(_fold_and_copy, folding, out, copies) if copies else folding
    if out.dtype == BFLOAT16:
        widening = widened(rows, out, lambda wide, total: prepared_reduction(wide, total, op, ranks))
        return partial(_fold_and_copy, widening, out, copies) if copies else widening
    step = max(1, PIECE_BYTES // out.itemsize)
    cuts = [slice(start, start + step) for start in range(0, out.size, step)]
    parts: list[Callable[[], object]] = []
    for cut in cuts:
        parts += _parts_of_piece([row[cut] for row in rows], out[cut], FOLDS[op], divisor)
        parts += [partial(np.copyto, copy[cut], out[cut]) for copy in copies]
    return without_warnings(in_sequence(parts))


#: Folds rows, (ranks, elements), in rank order, into an array that each call names.
RowsFold = Callable[[Sequence[np.ndarray] | np.ndarray, np.ndarray], None]


def rows_fold(op: str, dtype: np.dtype, ranks: int) -> RowsFold:
    """Return the function that folds `ranks` rows of a dtype; op: a key of FOLDS."""
    if dtype == BFLOAT16:
        return lambda rows, out: reduce_in_rank_order(list(rows), out, op)
    fold, others = FOLDS[op], range(2, ranks)
    scale, factor = _scale_of(ranks if op == "mean" else 1, dtype)

    def fold_rows(rows: Sequence[np.ndarray] | np.ndarray, out: np.ndarray) -> None:
        fold(rows[0], rows[1], out=out)
        for index in others:
            fold(out, rows[index], out=out)
        if scale is not None:
            scale(out, factor, out=out)

    return without_warnings(fold_rows)


def in_sequence(parts: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """Return a function that calls these, one after another."""

    def run() -> None:
        for part in parts:
            part()

    return run


def _fold_and_copy(fold: Callable[[], None], out: np.ndarray, copies: Sequence[np.ndarray]) -> None:
    fold()
    for copy in copies:
        np.copyto(copy, out)


def _parts_of_piece(
    rows: list[np.ndarray], out: np.ndarray, fold: Callable[..., np.ndarray], divisor: int
) -> list[Callable[[], object]]:
    """Return the NumPy calls that compute a piece of the result."""
    if len(rows) == 1:
        parts: list[Callable[[], object]] = [partial(np.copyto, out, rows[0])]
    else:
        parts = [partial(fold, rows[0], rows[1], out=out), *(partial(fold, out, row, out=out) for row in rows[2:])]
    scale, factor = _scale_of(divisor, out.dtype)
    return parts if scale is None else [*parts, partial(scale, out, factor, out=out)]


def _scale_of(divisor: int, dtype: np.dtype) -> tuple[Callable[..., np.ndarray] | None, np.ndarray | None]:
    """Return the operation that divides, with its operand; None for 1."""
    if divisor == 1:
        return None, None
    if dtype.kind == "f" and divisor & (divisor - 1) == 0:
        # The reciprocal of a power of two is exact: the same bits as the division's, and faster.
        return np.multiply, np.asarray(1 / divisor, dtype)
    return np.divide, np.asarray(divisor, dtype)


def without_warnings(work: Callable[P, None]) -> Callable[P, None]:
    """Return `work` without NumPy's floating-point warnings: the caller checks for NaN and Inf, as with MPI."""
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":
        return np.errstate(all="ignore")(work)
    # Since NumPy 2 that setting is a context variable: it is 50 times cheaper to run in a context where it is set.
    context = copy_context()
    context.run(np.seterr, all="ignore")
    return partial(context.run, work)
