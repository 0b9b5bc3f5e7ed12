"""Ranks compare the arrays that they bring to one operation: lengths and dtypes."""

from __future__ import annotations

import numpy as np

from clcomm.base.errors import MismatchError
from clcomm.comm.transport.rendezvous import DifferentOperations

#: NumPy's dtypes by their numbers, and a bound of those of other packages' dtypes, which NumPy counts from 256.
_DTYPES: dict[int, np.dtype] = {np.dtype(code).num: np.dtype(code) for code in np.typecodes["All"]}
_DTYPE_NUMBERS = 1 << 12


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
    if not ((kinds[:, :, 1] >= 0) & (kinds[:, :, 1] < _DTYPE_NUMBERS)).all():
        raise DifferentOperations  # a rank in a blocking collective has described no array
    if (kinds != kinds[0]).any():
        raise mismatch(kinds[:, 0].tolist())
    if (everyone[:, 0] != everyone[0, 0]).any():
        raise DifferentOperations


def mismatch(kinds: list[list[int]]) -> MismatchError:
    """Return the error for arrays that differ, from (nbytes, dtype) on each rank."""
    sides: dict[str, list[str]] = {}
    for rank, (nbytes, number) in enumerate(kinds):
        dtype = _DTYPES.get(number)
        # The dtype number of texts, records and bfloat16 does not give the size of an element.
        if dtype is not None and dtype.itemsize:
            text = f"{nbytes // dtype.itemsize:,} {dtype}"
        else:
            text = f"{nbytes:,} bytes of dtype {f'number {number}' if dtype is None else dtype.name}"
        sides.setdefault(text, []).append(str(rank))
    listed = ", ".join(f"{text} on rank {' and '.join(ranks)}" for text, ranks in sides.items())
    return MismatchError(f"array: expected the same length and dtype on every rank, got {listed}")
