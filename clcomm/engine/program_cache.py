"""A private cache of built programs (OpenCL binaries), for drivers without a cache of their own.

A binary has its digest before it; one that is damaged is built again.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from hashlib import blake2b, sha256
from pathlib import Path
from typing import TYPE_CHECKING

from clcomm.base.errors import ClcommError
from clcomm.base.storage.cache import cache_directory
from clcomm.base.storage.files import read_regular, replacing
from clcomm.base.storage.private import first_private
from clcomm.engine import intel_runtime
from clcomm.engine.pocl_target import processor_features

if TYPE_CHECKING:
    import pyopencl as cl

_MOST_BYTES = 1 << 26  # of a file
_DIGEST_BYTES = 32
#: The starts of the names of features for which compilers make other code.
_CODE_FEATURES = ("adx", "aes", "amx", "avx", "bmi", "f16c", "fma", "popcnt", "sha", "sse", "ssse", "vaes")
#: Variables of the driver and of PyOpenCL that change code start so.
_VARIABLES = ("CL_CONFIG_", "PYOPENCL_BUILD_OPTIONS")


def serves(cl_device: cl.Device) -> bool:
    """Return whether this cache holds a device's programs: Intel's runtime has no cache of its own."""
    return intel_runtime.is_intel(cl_device)


def directory() -> Path | None:
    """Return the directory of programs; None where no directory is this user's alone."""
    with suppress(ClcommError, OSError):
        return _directory_in(Path(os.path.realpath(cache_directory())))
    return None


@cache
def _directory_in(caches: Path) -> Path:
    return first_private([caches / "programs"], "programs")


class CachedProgram:
    """A program's place in the cache, keyed by all inputs of its build."""

    def __init__(self, cl_device: cl.Device, source: str, options: list[str]):
        self._folder: Path | None = None
        found = directory()
        if found is not None:
            key = sha256("\0".join([*_identity(cl_device), source, *options]).encode()).hexdigest()[:40]
            self._folder = found / key[:2] / key[2:]

    def read(self) -> bytes | None:
        """Return the stored binary; None if there is none, or if it is damaged."""
        if self._folder is None:
            return None
        with suppress(OSError):
            content = read_regular(self._folder / "program", _MOST_BYTES)
            digest, binary = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
            if binary and _digest(binary) == digest:
                return binary
        return None

    def write(self, binary: bytes) -> None:
        """Store a binary atomically; nothing is stored on a full disk."""
        if self._folder is None or not binary:
            return
        with suppress(OSError), replacing(self._folder / "program") as file:
            file.write(_digest(binary) + binary)


def damaged() -> list[Path]:
    """Return the folders of programs whose binary differs from the stored one."""
    found = directory()
    return [] if found is None else [path.parent for path in sorted(found.glob("*/*/program")) if not _is_whole(path)]


def _is_whole(path: Path) -> bool:
    with suppress(OSError):
        content = read_regular(path, _MOST_BYTES)
        return _digest(content[_DIGEST_BYTES:]) == content[:_DIGEST_BYTES]
    return False


def _digest(binary: bytes) -> bytes:
    return blake2b(binary, digest_size=_DIGEST_BYTES).digest()


def _identity(cl_device: cl.Device) -> list[str]:
    """Return the inputs of the build besides source and options: driver, processor, and the driver's variables."""
    platform = cl_device.platform
    set_here = sorted(item for item in os.environ.items() if item[0].startswith(_VARIABLES))
    features = sorted(each for each in processor_features() if each.startswith(_CODE_FEATURES))
    return [
        platform.name, platform.version, cl_device.name, cl_device.version, cl_device.driver_version,
        repr(features), repr(set_here),
    ]  # fmt: skip
