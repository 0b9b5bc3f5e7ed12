"""Launches of kernels that compute on arrays in host memory, in place, for communication."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import sysconfig
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from clcomm.base.errors import DeviceError
from clcomm.engine import program
from clcomm.engine.device import HOST_POINTER_ALIGNMENT, Device

if TYPE_CHECKING:
    import pyopencl as cl

#: Global and local size of one work-item.
ONE_ITEM = (1,), (1,)


class HostLaunch(NamedTuple):
    """A kernel, its arguments, and its global and local size; for an array the kernel gets a buffer on top of it."""

    kernel: program.Kernel
    arguments: Sequence[Any]
    sizes: tuple[tuple[int, ...], tuple[int, ...]] = ONE_ITEM
    #: Arrays whose addresses the kernel has.
    used: Sequence[np.ndarray] = ()


class PreparedKernels:
    """Kernels with their arguments, to be run again and again.

    Args:
        device: whose turn it is to compute.
        queue: the kernels'.
        enqueue: OpenCL's launch of a kernel.
        sized: the kernels, each with its global and local size.
        memory: what lives as long as this: kernels do not keep their arguments' memory alive.
    """

    def __init__(
        self,
        device: Device,
        queue: Any,
        enqueue: Callable[..., object],
        sized: Sequence[tuple[Any, tuple[int, ...], tuple[int, ...]]],
        memory: object,
    ):
        self._in_turn, self._queue, self._finish = device.in_turn, queue, queue.finish
        self._enqueue, self._sized, self._memory = enqueue, sized, memory
        self._first = sized[0]

    def run(self) -> None:
        """Run the kernels and wait for them."""
        with self._in_turn:
            for kernel, items, group in self._sized:
                self._enqueue(self._queue, kernel, items, group)
            self._finish()

    def run_one(self) -> None:
        """Run the only kernel and wait for it: a loop would cost each all-reduce some time."""
        kernel, items, group = self._first
        with self._in_turn:
            self._enqueue(self._queue, kernel, items, group)
            self._finish()


class HostKernels:
    """Prepares launches of kernels whose last argument is a count of elements, an int, on arrays in host memory.

    The device computes in the host's memory. The kernels have a queue of their own, so they wait for no others.
    """

    def __init__(self, device: Device):
        import pyopencl as cl

        self.device = device
        self._cl = cl
        self._queue = device.new_queue()

    def takes(self, array: np.ndarray) -> bool:
        """Return whether the device can compute on an array in place."""
        aligned = array.ctypes.data % HOST_POINTER_ALIGNMENT == 0
        fits = 0 < array.nbytes <= self.device.cl_device.max_mem_alloc_size and array.size < 2**31
        return aligned and fits and array.flags.c_contiguous and array.flags.writeable

    def prepare(self, launches: Callable[[], Sequence[HostLaunch]]) -> Callable[[], None] | None:
        """Return a function that runs the kernels and waits for them; None where the device raises an error."""
        try:
            planned = launches()
            buffers = self._buffers([each for launch in planned for each in launch.arguments])
            kernels = [self._bound(launch, buffers) for launch in planned]
        except (self._cl.Error, DeviceError, MemoryError):  # an error on one rank must not stop the others
            return None
        sized = [(kernel, *launch.sizes) for kernel, launch in zip(kernels, planned, strict=True)]
        prepared = PreparedKernels(
            self.device, self._queue, self._cl.enqueue_nd_range_kernel, sized, (planned, buffers)
        )
        return prepared.run if len(sized) > 1 else prepared.run_one

    def _bound(self, launch: HostLaunch, buffers: dict[int, cl.Buffer]) -> cl.Kernel:
        """Return the kernel with its arguments set; it runs on no elements first, since drivers compile it then."""
        *others, count = launch.arguments
        bound = [buffers[each.ctypes.data] if isinstance(each, np.ndarray) else each for each in others]
        kernel = program.bound_copy(launch.kernel, [*bound, 0])
        with self.device.in_turn:
            self._cl.enqueue_nd_range_kernel(self._queue, kernel, *launch.sizes)
            self._queue.finish()
        kernel.set_arg(len(others), np.int32(count))
        return kernel

    def _buffers(self, arguments: Sequence[object]) -> dict[int, cl.Buffer]:
        arrays = {each.ctypes.data: each for each in arguments if isinstance(each, np.ndarray)}
        return {at: self._buffer(array) for at, array in arrays.items()}

    def _buffer(self, array: np.ndarray) -> cl.Buffer:
        flags = self._cl.mem_flags
        access = flags.READ_WRITE if array.flags.writeable else flags.READ_ONLY
        return self._cl.Buffer(self.device.context, access | flags.USE_HOST_PTR, hostbuf=array)


# --- Direct calls of compiled kernel functions from Python, without a driver's launch. ---
# PyOpenCL and PoCL take over a microsecond to launch an empty kernel, a third of an all-reduce of a few KiB. A kernel's
# program is code in this process, though: a function in it with the signature of a PyCFunction (Python/C API, "Common
# Object Structures") costs a twentieth of that. Its `self` is a NumPy array, from whose object it takes the address of
# its data.
#
# This relies on how CPython lays objects out, so it is tried where that is known, and `function` checks each array.

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
