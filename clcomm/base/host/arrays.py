"""Host arrays that an OpenCL device can use in place, and other libraries' tensors as such arrays."""

from __future__ import annotations

import math
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
