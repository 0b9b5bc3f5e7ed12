"""Direct calls of compiled kernel functions from Python, without a driver's launch.

PyOpenCL and PoCL take over a microsecond to launch an empty kernel, a third of an all-reduce of a few KiB.
A kernel's program is code in this process, though: a function in it with the signature of a PyCFunction (Python/C API,
"Common Object Structures") costs a twentieth of that. Its `self` is a NumPy array, from whose object it takes the
address of its data.

This relies on how CPython lays objects out, so it is tried where that is known, and `function` checks each array.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import sysconfig
from collections.abc import Callable, Sequence

import numpy as np

#: Bytes from a NumPy array's object to the pointer to its data (NumPy C API, PyArrayObject).
DATA = object.__basicsize__
_NO_ARGUMENTS = 4  # METH_NOARGS


class _Definition(ctypes.Structure):
    """PyMethodDef of the Python/C API."""

    _fields_ = (
        ("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p)
    )  # fmt: skip


class _Place(ctypes.Structure):
    """Dl_info of dladdr(3): the library that contains an address."""

    _fields_ = (
        ("path", ctypes.c_char_p), ("base", ctypes.c_void_p), ("symbol", ctypes.c_char_p), ("at", ctypes.c_void_p)
    )  # fmt: skip


class _Words(np.ndarray):
    """A call's argument words, with the objects that own the memory they point to."""

    used: Sequence[object] = ()


#: For as long as the process: of each function's address its definition, and the library that keeps it there.
_definitions: dict[int, tuple[_Definition, ctypes.CDLL]] = {}


def is_supported() -> bool:
    """Return whether `function` supports this interpreter and processor."""
    return (
        platform.python_implementation() == "CPython"
        and not sysconfig.get_config_var("Py_GIL_DISABLED")
        and sys.platform == "linux"
        and sys.byteorder == "little"
        and DATA == 16
        and platform.machine() == "x86_64"  # of others no compiled function has been called yet
    )


def function(address: int, words: np.ndarray, used: Sequence[object]) -> Callable[[], object] | None:
    """Return the function at this address of a kernel's program, bound to these words; None if it cannot be called.

    used: objects to keep alive as long as the function.
    """
    own = words.view(_Words)
    if ctypes.c_void_p.from_address(id(own) + DATA).value != words.ctypes.data:
        return None
    own.used = used
    definition = _definition_of(address)
    if definition is None:
        return None
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    made: Callable[[], object] = make(ctypes.addressof(definition), own, None)
    return made


def _definition_of(address: int) -> _Definition | None:
    """Return the definition of the function at this address; None where it is not in a library, to be kept loaded."""
    known = _definitions.get(address)
    if known is None:
        place, find = _Place(), ctypes.CDLL(None).dladdr
        find.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        if not find(address, ctypes.addressof(place)):
            return None
        try:  # the driver may close it when other kernels need its place
            library = ctypes.CDLL(os.fsdecode(place.path), os.RTLD_NOW | os.RTLD_NOLOAD)
        except OSError:
            return None
        known = _definitions[address] = _Definition(b"all_reduce", address, _NO_ARGUMENTS, None), library
    return known[0]
