"""The target processor of PoCL 3 on processors newer than its LLVM.

PyPI's PoCL has LLVM 14, which knows no AMD processor of family 1Ah (Zen 5) or later. There it passes the target
"generic" to clang, which rejects it for x86, so that no kernel builds. `name_processor` then sets the nearest processor
that this LLVM knows.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyopencl as cl

#: The affected build, and the byte offset of `char *llvm_cpu` in its `struct _cl_device_id`.
_DRIVER, _LLVM, _LLVM_CPU = "3.0-rc2", "LLVM 14.0.6", 640
_UNKNOWN = b"generic"
#: Processors of LLVM 14, the best first, with the features that its code for them may use (names of /proc/cpuinfo).
_HASWELL = frozenset(("avx2", "bmi1", "bmi2", "fma", "f16c", "abm", "movbe"))
PROCESSORS: tuple[tuple[str, frozenset[str]], ...] = (
    ("znver3", _HASWELL | {"adx", "sha_ni", "sse4a", "vaes", "vpclmulqdq"}),
    ("skylake-avx512", _HASWELL | {"adx", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    ("haswell", _HASWELL),
    ("x86-64", frozenset()),
)


def nearest_processor(features: Iterable[str]) -> str:
    """Return LLVM 14's name for the best processor that has no feature beyond these."""
    available = frozenset(features)
    return next(name for name, needed in PROCESSORS if needed <= available)


def name_processor(cl_device: cl.Device) -> bool:
    """Set the nearest processor that PoCL 3 knows, if it does not know this one; return whether it was set.

    Devices of other drivers, and those with a processor's name, are left unchanged. For a part of a device PoCL asks
    the whole one.
    """
    whole = cl_device.parent_device
    if whole is not None:
        name_processor(whole)
    if not _is_unnamed(cl_device):
        return False
    field = ctypes.c_void_p.from_address(cl_device.int_ptr + _LLVM_CPU)
    if field.value is None or ctypes.string_at(field.value, len(_UNKNOWN) + 1) != _UNKNOWN + b"\0":
        return False
    duplicate = ctypes.CDLL(None).strdup  # in C's heap, as PoCL may free it
    duplicate.restype, duplicate.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    field.value = duplicate(nearest_processor(processor_features()).encode())
    return True


def _is_unnamed(cl_device: cl.Device) -> bool:
    """Return whether this is the wheel's build on a processor that it has no name for."""
    return bool(
        cl_device.driver_version == _DRIVER
        and platform.machine() == "x86_64"
        and cl_device.version.endswith(f"-{_UNKNOWN.decode()}")
        and _LLVM in cl_device.platform.version
        and find_spec("pocl_binary_distribution")
    )


@cache
def processor_features() -> list[str]:
    """Return the features of this machine's processor, as Linux names them; none if it lists none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
    return next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
