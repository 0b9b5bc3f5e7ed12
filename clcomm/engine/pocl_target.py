"""The processor that PoCL 3 compiles for, where its LLVM is older than the processor.

PyPI's PoCL holds LLVM 14, which knows no AMD processor of family 1Ah (Zen 5) or later. There it asks clang for the
target "generic", which clang refuses for x86, so that no kernel builds. The device is then given the nearest processor
that this LLVM knows.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

#: The one build that this is about: where its `struct _cl_device_id` keeps `char *llvm_cpu`, in bytes.
_DRIVER, _LLVM, _LLVM_CPU = "3.0-rc2", "LLVM 14.0.6", 640
_UNKNOWN = b"generic"
#: Processors of LLVM 14, the best first, with the features that it may use of them (names of /proc/cpuinfo).
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


def name_processor(cl_device: Any) -> bool:
    """Let PoCL 3 compile for the nearest processor that it knows, if it knows this one not; say whether it does now.

    A device of any other driver, or that names its processor, stays as it is.
    """
    if not _is_unnamed(cl_device):
        return False
    field = ctypes.c_void_p.from_address(cl_device.int_ptr + _LLVM_CPU)
    if field.value is None or ctypes.string_at(field.value, len(_UNKNOWN) + 1) != _UNKNOWN + b"\0":
        return False
    duplicate = ctypes.CDLL(None).strdup  # in C's heap, as PoCL may free it
    duplicate.restype, duplicate.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    field.value = duplicate(nearest_processor(_features()).encode())
    return True


def _is_unnamed(cl_device: Any) -> bool:
    """Say whether this is the wheel's build, compiling for a processor that it has no name of."""
    return bool(
        cl_device.driver_version == _DRIVER
        and platform.machine() == "x86_64"
        and cl_device.version.endswith(f"-{_UNKNOWN.decode()}")
        and _LLVM in cl_device.platform.version
        and find_spec("pocl_binary_distribution")
    )


def _features() -> list[str]:
    """Return the features of this machine's processor, as Linux names them; none where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
    return next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
