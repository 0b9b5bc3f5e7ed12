"""Checks of the collectives' arguments; errors are one line that names the argument."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError, MismatchError
from clcomm.base.host.arrays import BFLOAT16, dtype_name, is_plain, note_write
from clcomm.base.units import parse_size
from clcomm.comm.transport.mpi_communicators import ANY_RANK, peer_name, reduction_name
from clcomm.comm.transport.reduction import FOLDS, OF_INTEGERS


def bucket_size_by_position(comm: object, bucket_size: int | str, default: str) -> tuple[Any, int | str]:
    """Return (comm, bucket_size) of the Communicator's arguments: a number as `comm` is LizarDist's bucket size."""
    if not isinstance(comm, Integral) or isinstance(comm, bool):
        return comm, bucket_size
    if bucket_size != default:
        raise ArgumentError(f"bucket_size: expected once, got {comm} by position and {bucket_size!r} by name")
    return None, int(comm)


def check_op(op: object, array: np.ndarray) -> str:
    """Return a reduction's name, also of mpi4py's constant; ArgumentError for one that the array's dtype has not."""
    op = reduction_name(op)
    if not isinstance(op, str) or op not in FOLDS:
        got = f"a {type(op).__name__}" if " at 0x" in repr(op) else repr(op)
        raise ArgumentError(f"op: expected one of {', '.join(FOLDS)}, got {got}")
    if not isinstance(array, np.ndarray):
        raise ArgumentError(f"array: expected a NumPy array, got {type(array).__name__}")
    if op in OF_INTEGERS and array.dtype.kind not in "biu":
        raise ArgumentError(f"op: {op!r} needs integers or booleans, got {dtype_name(array.dtype)}")
    if array.dtype == BFLOAT16:
        return op
    if array.dtype.kind not in "biufc":
        raise ArgumentError(f"array: expected numbers to reduce, got dtype {array.dtype}")
    if op == "mean" and array.dtype.kind not in "fc":
        raise ArgumentError(f"op: 'mean' needs a floating dtype, got {array.dtype}; use 'sum'")
    return op


def flat(array: np.ndarray, name: str) -> np.ndarray:
    """Return the array flattened and contiguous, as a view where possible."""
    if not isinstance(array, np.ndarray):
        raise ArgumentError(f"{name}: expected a NumPy array, got {type(array).__name__}")
    if array.dtype.hasobject:
        raise ArgumentError(f"{name}: expected numbers, got dtype {array.dtype}; use the object variants")
    return np.ascontiguousarray(array).reshape(-1)


def writable(array: np.ndarray, name: str) -> tuple[np.ndarray, Callable[[], np.ndarray]]:
    """Return a flat array to write to, and a function that copies it back if it is a copy and returns `array`."""
    flattened = flat(array, name)
    if not array.flags.writeable:
        raise ArgumentError(f"{name}: expected a writable array, got a read-only one")
    note_write(array)
    if array.flags.c_contiguous:
        return flattened, lambda: array
    if _overlaps_itself(array):
        raise ArgumentError(
            f"{name}: expected elements with memory of their own, got shape {array.shape} with strides "
            f"{array.strides}; write to a copy, as of array.copy()"
        )

    def copy_back() -> np.ndarray:
        array[...] = flattened.reshape(array.shape)
        return array

    return flattened, copy_back


def _overlaps_itself(array: np.ndarray) -> bool:
    """Return whether elements may have memory in common: where a step is shorter than what lies within it."""
    nbytes = array.itemsize
    for stride, length in sorted((abs(each), length) for each, length in zip(array.strides, array.shape, strict=True)):
        if length > 1 and stride < nbytes:
            return array.size > 0
        nbytes += stride * (length - 1)
    return False


def check_separate(arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """Raise ArgumentError for a contiguous array called "out", or of "receives", that overlaps another one."""
    ends = -1, ""
    for start, end, name in sorted((start, start + each.nbytes, name) for name, each in arrays if each.size
                                   for start in [address_of(each)]):  # fmt: skip
        if start < ends[0] and {name, ends[1]} & {"out", "receives"}:
            name = name if name in ("out", "receives") else ends[1]
            raise ArgumentError(f"{name}: expected separate memory, got memory that overlaps what is sent or received")
        ends = max(ends, (end, name))


def check_root(root: int, world_size: int) -> None:
    """Raise ArgumentError unless `root` is a rank."""
    if not isinstance(root, Integral) or not 0 <= root < world_size:
        raise ArgumentError(f"root: expected a rank from 0 to {world_size - 1}, got {root!r}")


def check_peer(rank: object, name: str, world_size: int, *, takes_any: bool = False) -> int | str | None:
    """Return a message's other rank, also mpi4py's constants; ArgumentError unless it is a rank, None, or "any"."""
    rank = peer_name(rank)
    if rank is None or (takes_any and rank == ANY_RANK):
        return rank
    if not isinstance(rank, Integral) or not 0 <= int(rank) < world_size:
        others = 'None for nobody, or "any"' if takes_any else "or None for nobody"
        raise ArgumentError(f"{name}: expected a rank from 0 to {world_size - 1}, {others}, got {rank!r}")
    return int(rank)


def size_or_error(value: int | str, name: str) -> int | ArgumentError:
    """Return a size in bytes, or the error for an invalid one, for the ranks to compare before any raises."""
    try:
        return parse_size(value, name)
    except ArgumentError as error:
        return error


def agreed_size(asked: list[int | ArgumentError]) -> int:
    """Return the ranks' common size; raise the same error on every rank if one is invalid or they differ."""
    for size in asked:
        if isinstance(size, ArgumentError):
            raise size
        if size != asked[0]:
            rank = asked.index(size)
            raise MismatchError(
                f"nbytes: expected the same on every rank, got {asked[0]} on rank 0, {size} on rank {rank}"
            )
    return asked[0]  # type: ignore[return-value]


#: An array's shape and dtype.
Kind = tuple[tuple[int, ...], np.dtype]


def shape_and_dtype(data: Any) -> Kind | None:
    """Return (shape, dtype) of a numeric array, None for anything else, such as an array with a mask."""
    return (data.shape, data.dtype) if is_plain(data) and not data.dtype.hasobject else None


def scatter_header(data: Any, size: int) -> tuple[list[Kind | None], str]:
    """Return (each item's kind, problem), to be broadcast before any data moves."""
    try:
        length = len(data)
    except TypeError:
        return [], f"expected a sequence of {size} items, got {type(data).__name__}"
    if length != size:
        return [], f"expected {size} items, one for each rank, got {length}"
    kind = shape_and_dtype(data)
    return [(kind[0][1:], kind[1])] * size if kind else [shape_and_dtype(each) for each in data], ""


def address_of(array: np.ndarray) -> int:
    """Return the address of the array's first element."""
    address: int = array.__array_interface__["data"][0]
    return address
