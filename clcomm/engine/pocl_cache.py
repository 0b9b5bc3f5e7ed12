"""Where PoCL keeps the kernels that it built: a directory into which nobody else can put any, as it runs what is there.

On its own PoCL takes /tmp/pocl/kcache for a process without HOME, whoever made that.
"""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

from clcomm.cache import user_cache
from clcomm.errors import DeviceError
from clcomm.private import exposure, make_private, private_temporary

#: What building a kernel takes at least: descriptors at a time, and bytes of object code and of what comes before it.
_DESCRIPTORS, _KERNEL_BYTES = 16, 1 << 20


def prepare() -> None:
    """Let PoCL, before it is loaded, keep kernels where nobody else can: sets POCL_CACHE_DIR.

    Raises DeviceError where the user set it to a directory that others can change, or that cannot be made, and
    ArgumentError where there is no place for another.
    """
    given = os.environ.get("POCL_CACHE_DIR")
    if given:
        os.environ["POCL_CACHE_DIR"] = _checked(given)
    else:
        os.environ["POCL_CACHE_DIR"] = str(_own_directory())


def shortage() -> str:
    """Return what PoCL lacks to keep a kernel: room, a descriptor, a right; "" where it lacks nothing."""
    directory = os.environ.get("POCL_CACHE_DIR")
    try:
        with ExitStack() as stack:
            for _ in range(_DESCRIPTORS):
                stack.enter_context(open(os.devnull, "rb"))
            if directory:
                with tempfile.TemporaryFile(dir=directory) as file:
                    file.write(bytes(_KERNEL_BYTES))
                    file.flush()
    except OSError as error:
        return f"kernel cache {directory}: {error.strerror}"
    return ""


def _checked(given: str) -> str:
    """Return the directory itself, in case a link leads to it that others could change."""
    directory = Path(os.path.realpath(given))
    problem = _problem(directory, chosen=True)
    if problem:
        raise DeviceError(
            f"POCL_CACHE_DIR: expected a directory that only this user can write to, as PoCL runs the code in it; got "
            f"{given!r}: {problem}"
        )
    return str(directory)


def _own_directory() -> Path:
    """Return the first directory that is this user's alone: PoCL's usual one, one of clcomm's, a temporary one."""
    cache = Path(os.path.realpath(user_cache()))
    for directory in (cache / "pocl" / "kcache", cache / "clcomm" / "pocl"):
        if not _problem(directory):
            return directory
    directory = private_temporary() / "pocl"
    make_private(directory)
    return directory


def _problem(directory: Path, chosen: bool = False) -> str:
    try:
        make_private(directory)
        can_write = os.access(directory, os.W_OK)
        return exposure(directory, chosen=chosen) or ("" if can_write else os.strerror(errno.EACCES))
    except OSError as error:
        return error.strerror or str(error)
