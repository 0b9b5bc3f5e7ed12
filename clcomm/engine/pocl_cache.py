"""A private directory for PoCL's built kernels, as PoCL runs the code in it.

PoCL's own default for a process without HOME is /tmp/pocl/kcache, even if another user created that.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

from clcomm.base.errors import DeviceError
from clcomm.base.storage.cache import user_cache
from clcomm.base.storage.private import first_private, unfit

#: The least that building a kernel needs: open descriptors, and bytes of object and intermediate code.
_DESCRIPTORS, _KERNEL_BYTES = 16, 1 << 20


def prepare() -> None:
    """Set POCL_CACHE_DIR, before PoCL is loaded, to a directory that no other user can write to.

    Raises DeviceError if the user set it to a directory that others can write to, or that cannot be created, and
    ArgumentError if there is no possible directory.
    """
    given = os.environ.get("POCL_CACHE_DIR")
    if given:
        os.environ["POCL_CACHE_DIR"] = _checked(given)
    else:
        os.environ["POCL_CACHE_DIR"] = str(_own_directory())


def shortage() -> str:
    """Return why PoCL cannot store a kernel (disk space, descriptors, permission), or "" if it can."""
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
    """Return the directory with links resolved, as others could change a link."""
    directory = Path(os.path.realpath(given))
    problem = unfit(directory, chosen=True)
    if problem:
        raise DeviceError(
            f"POCL_CACHE_DIR: expected a directory that only this user can write to, as PoCL runs the code in it; got "
            f"{given!r}: {problem}"
        )
    return str(directory)


def _own_directory() -> Path:
    """Return the first private directory of PoCL's default, one of clcomm's, and a temporary one."""
    cache = Path(os.path.realpath(user_cache()))
    return first_private((cache / "pocl" / "kcache", cache / "clcomm" / "pocl"), "pocl")
