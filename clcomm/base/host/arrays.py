"""Host arrays that an OpenCL device can use in place, and other libraries' tensors as such arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from clcomm.base.errors import ArgumentError

#: A page: more than the alignment that any OpenCL device needs to use host memory in place.
PAGE = 4096
#: Devices' memory that arrays lie on, by its address, as long as there are such: what has `nbytes` and `note_write`.
HANDED_OUT: WeakValueDictionary[int, Any] = WeakValueDictionary()


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
    """Return an uninitialised C-contiguous array that starts at a page boundary."""
    kind = np.dtype(dtype)
    nbytes = math.prod(shape) * kind.itemsize
    raw = np.empty(nbytes + PAGE, np.uint8)
    start = -raw.__array_interface__["data"][0] % PAGE  # six times as fast as raw.ctypes.data
    return raw[start : start + nbytes].view(kind).reshape(shape)


def aligned_zeros(nbytes: int) -> np.ndarray:
    """Return zeroed bytes that start at a page boundary."""
    array = aligned_empty((nbytes,), np.uint8)
    array[...] = 0
    return array


def note_write(array: np.ndarray) -> None:
    """Note that an array's elements change, where a device has them: what an operation kept of them is void."""
    if not HANDED_OUT:
        return
    first = array.__array_interface__["data"][0]
    memory = HANDED_OUT.get(first)
    if memory is not None and memory.nbytes == array.nbytes:
        memory.note_write()
        return
    reach = [stride * (length - 1) for stride, length in zip(array.strides, array.shape, strict=True)]
    last = first + sum(each for each in reach if each > 0) + array.itemsize
    first += sum(each for each in reach if each < 0)
    for address, memory in HANDED_OUT.items():  # whose parts may have been written, or several
        if array.size and address < last and first < address + memory.nbytes:
            memory.note_write()


def is_plain(value: object) -> bool:
    """Return whether an object is an array, also of a subclass, with nothing beside its numbers, such as a mask."""
    kind: Any = type(value)
    return kind is np.ndarray or (
        isinstance(value, np.ndarray)
        and (kind.__array_finalize__ is np.ndarray.__array_finalize__ or kind in (np.memmap, np.matrix, np.recarray))
    )


def host_array(value: Any, name: str, *, may_copy: bool = False) -> np.ndarray:
    """Return an array itself, and an object with `__dlpack__` as an array on its memory (https://dmlc.github.io/dlpack).

    A NumPy scalar becomes a read-only array without dimensions.
    The array keeps the memory; it is read-only where the library lets nothing else write to it, as JAX does.

    Args:
        value: of the host's memory, of a dtype that NumPy has.
        name: what messages call it.
        may_copy: whether a library may copy what it does not share.

    Raises ArgumentError for other objects, for arrays with more than their numbers, for memory of another device, and
    for what the library does not hand out, such as PyTorch's tensors that require a gradient.
    """
    if isinstance(value, np.ndarray):
        if is_plain(value):
            return value
        what = "mask" if isinstance(value, np.ma.MaskedArray) else f"state of a {type(value).__name__}"
        raise ArgumentError(
            f"{name}: expected a plain array, got one whose {what} would be lost; give np.asarray({name}), and the "
            f"{what} apart"
        )
    if isinstance(value, np.generic):
        scalar = np.array(value)
        scalar.flags.writeable = False  # the caller has no part in it
        return scalar
    if not hasattr(value, "__dlpack__"):
        raise ArgumentError(f"{name}: expected a NumPy array, got {type(value).__name__}")
    try:
        try:
            return np.from_dlpack(value, copy=None if may_copy else False)
        except TypeError:  # NumPy before 2.1, or a library that does not say whether it copies
            if getattr(value, "exports_copy", False) and not may_copy:
                raise BufferError("got one of which others get a copy; use numpy()") from None
            return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ArgumentError(f"{name}: expected a tensor in the host's memory that can be shared: {reason}") from None


# --- bfloat16: the upper half of a float32, with its range and 8 bits of precision; NumPy has no dtype for it. ---

#: The dtype of arrays of bfloat16; its one field holds the bits.
BFLOAT16 = np.dtype([("bfloat16", np.uint16)])


def dtype_name(dtype: np.dtype) -> str:
    """Return a dtype's name for messages."""
    return "bfloat16" if dtype == BFLOAT16 else str(dtype)


def itemsize_of(name: str) -> int:
    """Return the bytes of an element of the dtype with this name, one of `dtype_name`."""
    return (BFLOAT16 if name == "bfloat16" else np.dtype(name)).itemsize


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Return float32 values as bfloat16, rounded to nearest, ties to even; NaN stays NaN."""
    with np.errstate(all="ignore"):
        bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16).view(BFLOAT16)


def from_bfloat16(halves: np.ndarray) -> np.ndarray:
    """Return bfloat16 values as float32."""
    return (halves.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def widened(
    rows: Sequence[np.ndarray],
    out: np.ndarray,
    prepare: Callable[[Sequence[np.ndarray], np.ndarray], Callable[[], None]],
) -> Callable[[], None]:
    """Return a function that reduces rows of bfloat16 as float32 and writes the rounded result to `out`.

    Args:
        rows: the operands, BFLOAT16.
        out: receives the result, BFLOAT16.
        prepare: returns a function that reduces rows of float32 to an array, which may be the first row.
    """
    wide = [np.empty(row.size, np.float32) for row in rows]
    reduce = prepare(wide, wide[0])

    def run() -> None:
        for values, row in zip(wide, rows, strict=True):
            values[:] = from_bfloat16(row)
        reduce()
        out[:] = to_bfloat16(wide[0])

    return run


# --- A fast 64-bit hash of parameters that devices and hosts compute alike. ---
# The sum, modulo 2^64, of each 64-bit word mixed with its position: any number of work-items may compute it, in any
# order. The mixing is SplitMix64's (G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators",
# OOPSLA 2014). It detects accidents, not attacks. clcomm/engine/kernels/hash.cl computes the same.

WORD = 8  # bytes
_STEP, _FIRST, _SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_CHUNK = 1 << 12  # words that fit into the cache


def hash_words(data: np.ndarray, first: int = 0) -> int:
    """Return the hash of a uint8 array of whole words, of which the first is at position `first`.

    Hashes of parts at their positions add up, modulo 2^64, to that of the whole.
    """
    words = data.view(np.uint64)
    total = np.uint64(0)
    positions = np.arange(1, min(_CHUNK, words.size) + 1, dtype=np.uint64) * _STEP
    for begin in range(0, words.size, _CHUNK):
        part = words[begin : begin + _CHUNK]
        offset = np.array([first + begin], np.uint64) * _STEP  # an array: wrapping around is no warning there
        total = np.add.reduce(_mixed(part + positions[: part.size] + offset), initial=total)
    return int(total)


def _mixed(z: np.ndarray) -> np.ndarray:
    z ^= z >> np.uint64(30)
    z *= _FIRST
    z ^= z >> np.uint64(27)
    z *= _SECOND
    z ^= z >> np.uint64(31)
    return z
