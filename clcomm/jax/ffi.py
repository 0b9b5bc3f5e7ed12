"""Calls from XLA's programs into Python: its foreign function interface, whose handlers ctypes makes here.

A handler gets the addresses of a call's operands and results in the host's memory, so that nothing is copied, and no
compiler is needed. The structures are those of `xla/ffi/api/c_api.h`, which jaxlib brings along (version 0.3 of it).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from clcomm.base.errors import ClcommError
from clcomm.base.host.arrays import BFLOAT16
from clcomm.comm.watch.endings import note_wrapped

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
#: The stage of a call in which it computes, and the code of an error.
_EXECUTE, _INTERNAL = 3, 13
#: The names of the dtypes of arrays that calls take.
SUPPORTED = frozenset((*(np.dtype(each).name for each in "?bhilqBHILQefdFD"), "bfloat16"))
#: Bounds the memory for arrays at addresses that do not return.
_KEPT_ARRAYS = 256
#: Shape and dtype of an array.
Kind = tuple[tuple[int, ...], np.dtype]


class _Buffer(ctypes.Structure):
    _fields_ = (("size", _SIZE), ("extension", _POINTER), ("dtype", _INT), ("data", _POINTER), ("rank", ctypes.c_int64),
                ("dims", ctypes.POINTER(ctypes.c_int64)))  # fmt: skip


class _Values(ctypes.Structure):  # XLA_FFI_Args and XLA_FFI_Rets
    _fields_ = (("size", _SIZE), ("extension", _POINTER), ("count", ctypes.c_int64), ("types", _POINTER),
                ("values", ctypes.POINTER(ctypes.POINTER(_Buffer))))  # fmt: skip


class _Scalar(ctypes.Structure):
    _fields_ = (("dtype", _INT), ("value", ctypes.POINTER(ctypes.c_int64)))


class _Attributes(ctypes.Structure):
    _fields_ = (("size", _SIZE), ("extension", _POINTER), ("count", ctypes.c_int64), ("types", _POINTER),
                ("names", _POINTER), ("values", ctypes.POINTER(ctypes.POINTER(_Scalar))))  # fmt: skip


class _Version(ctypes.Structure):
    _fields_ = (("size", _SIZE), ("extension", _POINTER), ("major", _INT), ("minor", _INT))


class _Metadata(ctypes.Structure):
    _fields_ = (("size", _SIZE), ("version", _Version), ("traits", ctypes.c_uint32), ("state_type", ctypes.c_int64))


class _MetadataExtension(ctypes.Structure):
    _fields_ = (("size", _SIZE), ("type", _INT), ("next", _POINTER), ("metadata", ctypes.POINTER(_Metadata)))


class _Error(ctypes.Structure):
    _fields_ = (("size", _SIZE), ("extension", _POINTER), ("message", ctypes.c_char_p), ("code", _INT))


_CREATE_ERROR = ctypes.CFUNCTYPE(_POINTER, ctypes.POINTER(_Error))


class _Api(ctypes.Structure):
    _fields_ = (("size", _SIZE), ("extension", _POINTER), ("version", _Version), ("internal", _POINTER),
                ("create_error", _CREATE_ERROR))  # fmt: skip


class _Frame(ctypes.Structure):
    _fields_ = (("size", _SIZE), ("extension", ctypes.POINTER(_MetadataExtension)), ("api", ctypes.POINTER(_Api)),
                ("context", _POINTER), ("stage", _INT), ("operands", _Values), ("results", _Values),
                ("attributes", _Attributes))  # fmt: skip


class Runs(Protocol):
    """What a program calls; hashable."""

    def run(self, operands: list[np.ndarray], results: list[np.ndarray]) -> None:
        """Compute the results."""


class _Call:
    """A call on arrays of these shapes and dtypes, at any addresses."""

    def __init__(self, runs: Runs, operands: Sequence[Kind], results: Sequence[Kind]):
        self._runs, self._operands, self._results = runs, operands, results
        self._arrays: dict[tuple[int, bool, int | None], np.ndarray] = {}

    def run(self, frame: Any) -> None:
        if len(self._arrays) > _KEPT_ARRAYS:
            self._arrays.clear()
        self._runs.run(
            self._at(frame.operands.values, self._operands, False), self._at(frame.results.values, self._results, True)
        )

    def _at(self, buffers: Any, kinds: Sequence[Kind], are_results: bool) -> list[np.ndarray]:
        found = []
        for index, kind in enumerate(kinds, 1):  # behind the token, which orders calls and has no memory
            key = index, are_results, buffers[index].contents.data
            array = self._arrays.get(key)
            if array is None:  # XLA's memory returns to a program from call to call
                array = self._arrays[key] = _array_at(key[-1], *kind)
            found.append(array)
        return found


def _array_at(address: int | None, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    dtype = BFLOAT16 if dtype.name == "bfloat16" else dtype
    nbytes = math.prod(shape) * dtype.itemsize
    if not address or not nbytes:
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    return np.frombuffer(memory, dtype).reshape(shape)


class Calls:
    """What programs call, by the number that they carry as their only attribute."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._calls: list[_Call] = []
        self._error: tuple[str, BaseException] | None = None

    def number_of(self, runs: Runs, operands: Sequence[Kind], results: Sequence[Kind]) -> int:
        """Return the number of a call, the same for equal ones; its arrays follow a token."""
        key = runs, *operands, None, *results
        if key not in self._numbers:
            self._numbers[key] = len(self._calls)
            self._calls.append(_Call(runs, operands, results))
        return self._numbers[key]

    def error_of(self, error: Exception) -> BaseException | None:
        """Return the error of a call that JAX has raised as one of its own; None for another's."""
        found, self._error = self._error, None
        return found[1] if found is not None and found[0] in str(error) else None

    def handle(self, frame: Any) -> int | None:
        """Run a call; return the address of XLA's error, None for none. An exception may not leave it."""
        found = frame.contents
        if found.extension:  # XLA asks what the handler was written for, when it is registered
            version = found.extension.contents.metadata.contents.version
            version.major, version.minor = found.api.contents.version.major, found.api.contents.version.minor
            return None
        if found.stage != _EXECUTE:
            return None
        try:
            number = found.attributes.values[0].contents.value[0]
            self._calls[number].run(found)
        except BaseException as error:
            text = str(error) if isinstance(error, ClcommError) else f"{type(error).__name__}: {error}"
            if isinstance(error, ClcommError) or not isinstance(error, Exception):  # such as that of SIGTERM
                note_wrapped(error, text)  # JAX raises an error of its own with this one's text
                self._error = text, error
            made = _Error(ctypes.sizeof(_Error), None, text.encode(), _INTERNAL)
            address: int = found.api.contents.create_error(ctypes.byref(made))
            return address
        return None


CALLS = Calls()
#: The handler as C sees it; it has to live as long as XLA, which is as long as the process.
HANDLER = ctypes.CFUNCTYPE(_POINTER, ctypes.POINTER(_Frame))(CALLS.handle)
