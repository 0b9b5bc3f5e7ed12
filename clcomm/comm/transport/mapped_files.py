"""Memory that a process has mapped from a file, and that other processes of the host map too, through /proc."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class MappedFile(NamedTuple):
    """This process's mapping of a whole file."""

    #: The file's, open.
    descriptor: int
    #: Where it is mapped.
    address: int
    nbytes: int
    #: Returns whether anything but this object uses the memory, which stays mapped as long as this object lives.
    is_used: Callable[[], bool]

    def array(self) -> np.ndarray:
        """Return the memory as bytes; valid as long as this object lives."""
        memory = (ctypes.c_uint8 * self.nbytes).from_address(self.address)
        return np.ctypeslib.as_array(memory)


def map_file_of(process: int, descriptor: int, nbytes: int) -> np.ndarray:
    """Map a file that another process of this user has open, and return its bytes; OSError where that fails."""
    opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return np.frombuffer(mmap.mmap(opened, nbytes), np.uint8)
    finally:
        os.close(opened)
