"""Ranks compare the arrays that they bring to one operation: lengths and dtypes."""

from __future__ import annotations

import numpy as np

from clcomm.errors import MismatchError
from clcomm.transport.meeting import DifferentOperations


def places_elsewhere(*arrays: np.ndarray) -> list[int]:
    """Return the `places` of arrays outside shared memory."""
    return [number for array in arrays for number in (-1, 0, array.nbytes, array.dtype.num)]


def require_alike(everyone: np.ndarray, arrays: int) -> None:
    """Raise the same MismatchError on all ranks if their tags, or the `places` after them, differ.

    Args:
        everyone: (ranks, 1 + 4 * arrays), one row from each rank.
        arrays: the number of arrays of each rank.
    """
    kinds = everyone[:, 1:].reshape(len(everyone), arrays, 4)[:, :, 2:]
    if (kinds != kinds[0]).any():
        raise mismatch(kinds[:, 0].tolist())
    if (everyone[:, 0] != everyone[0, 0]).any():
        raise DifferentOperations


def mismatch(kinds: list[list[int]]) -> MismatchError:
    """Return the error for arrays that differ, from (nbytes, dtype) on each rank."""
    dtypes: dict[int, np.dtype] = {np.dtype(code).num: np.dtype(code) for code in np.typecodes["All"]}
    sides: dict[str, list[str]] = {}
    for rank, (nbytes, number) in enumerate(kinds):
        dtype = dtypes[number]
        # The dtype number of texts, records and bfloat16 does not give the size of an element.
        text = f"{nbytes // dtype.itemsize:,} {dtype}" if dtype.itemsize else f"{nbytes:,} bytes of dtype {dtype.name}"
        sides.setdefault(text, []).append(str(rank))
    listed = ", ".join(f"{text} on rank {' and '.join(ranks)}" for text, ranks in sides.items())
    return MismatchError(f"array: expected the same length and dtype on every rank, got {listed}")
