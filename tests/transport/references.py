"""The expected results of collectives: values by rank, and folds in a transport's documented order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np

#: Simulated hosts: a rank's host by its rank and the number of ranks. On 4 ranks 0,1|2,3 and 0|1,2,3 and 0,2|1,3 and
#: 0,3|1,2; on 3 ranks 0,1|2 and 0|1,2 and 0,2|1 and 0|1,2.
LAYOUTS: dict[str, Callable[[int, int], int]] = {
    "halves": lambda rank, size: 2 * rank // size,
    "first-alone": lambda rank, size: min(rank, 1),
    "interleaved": lambda rank, size: rank % 2,
    "crossed": lambda rank, size: int(rank in (1, 2)),
}


def layout_hosts(layout: str, size: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks on each simulated host, hosts in the order of their lowest ranks."""
    hosts = [LAYOUTS[layout](rank, size) for rank in range(size)]
    return tuple(tuple(rank for rank in range(size) if hosts[rank] == host) for host in dict.fromkeys(hosts))


def pretended_host(layout: str, comm: Any) -> Any:
    """Return a communicator of the ranks on this rank's simulated host."""
    return comm.Split(LAYOUTS[layout](comm.Get_rank(), comm.Get_size()), comm.Get_rank())


FOLDS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum}


@lru_cache(maxsize=1024)  # drawing them for all ranks takes longer than most tests that use them
def drawn(rank: int, size: int, dtype: str, seed: int = 0) -> np.ndarray:
    """Return the values that `rank` contributes, read-only: any rank can compute those of all ranks."""
    values = _drawn(rank, size, np.dtype(dtype), seed)
    values.flags.writeable = False
    return values


def _drawn(rank: int, size: int, dtype: np.dtype, seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, rank, size])
    if dtype.kind == "b":
        return rng.integers(0, 2, size).astype(dtype)
    if dtype.kind in "iu":
        return rng.integers(0, 20, size).astype(dtype)
    values = rng.standard_normal(size) * 10.0 ** rng.integers(-3, 4, size)
    return (values + 1j * rng.standard_normal(size)).astype(dtype) if dtype.kind == "c" else values.astype(dtype)


def folded(rows: list[np.ndarray], op: str, hosts: Iterable[Iterable[int]] | None = None) -> np.ndarray:
    """Return (fold of host 0's rows) op (fold of host 1's rows) ..., each in rank order; one host unless given.

    For a mean the result is divided by the number of rows, in the rows' own dtype.
    """
    with np.errstate(all="ignore"):
        result = _fold([_fold([rows[r] for r in ranks], op) for ranks in hosts or (range(len(rows)),)], op)
        return result / result.dtype.type(len(rows)) if op == "mean" else result


def _fold(rows: list[np.ndarray], op: str) -> np.ndarray:
    result = rows[0].copy()
    for row in rows[1:]:
        result = FOLDS[op](result, row)
    return result


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
