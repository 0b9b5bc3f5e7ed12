"""Intel's OpenCL runtime for CPUs, from PyPI (`pip install clcomm[intel]`): where it is, and how many cores it uses.

The runtime's wheel has an .icd file that names a directory of the machine on which the wheel was made, and which ICD
loaders do not look for. `announce` writes one that is right.

Its variables and the immediate execution of a queue are described in Intel's Developer Reference for the CPU Runtime,
and in `lib/cl.cfg` of the wheel.
"""

from __future__ import annotations

import os
import site
import sys
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from clcomm.base.errors import ClcommError
from clcomm.base.storage.files import read_regular, write_whole
from clcomm.base.storage.private import cache_directory, first_private

if TYPE_CHECKING:
    import pyopencl as cl

#: The platform's name, and the property of a queue whose kernels run, at once, in the thread that queues them:
#: CL_QUEUE_THREAD_LOCAL_EXEC_ENABLE_INTEL of the extension cl_intel_exec_by_local_thread.
PLATFORM, IN_CALLER = "Intel(R) OpenCL", 1 << 31
_EXTENSION = "cl_intel_exec_by_local_thread"
_LIBRARY = "libintelocl.so"
_WORKERS = "CL_CONFIG_CPU_TBB_NUM_WORKERS"
#: The variable that names the ICD loader's directory, and its default.
_VENDORS, _SYSTEM_VENDORS = "OCL_ICD_VENDORS", "/etc/OpenCL/vendors"
_MOST_BYTES = 4096  # of an .icd file


def is_intel(cl_device: cl.Device) -> bool:
    return bool(cl_device.platform.name.strip() == PLATFORM)


def library() -> Path | None:
    """Return the runtime's library in this environment or among the user's packages; None: it is not installed."""
    for prefix in dict.fromkeys((sys.prefix, site.getuserbase(), sys.base_prefix)):
        path = Path(prefix, "lib", _LIBRARY)
        if path.is_file():
            return path
    return None


def limit(cores: int) -> None:
    """Limit the runtime, before it is loaded, to a number of cores, unless the user has."""
    os.environ.setdefault(_WORKERS, str(max(cores, 1)))
    if cores <= 1:  # large copies too would be divided among threads
        os.environ.setdefault("CL_CONFIG_ENABLE_PARALLEL_COPY", "False")


def compute_units(cl_device: cl.Device) -> int:
    """Return the number of cores that a device of this runtime uses: all, or its limit."""
    limited = os.environ.get(_WORKERS, "")
    units: int = cl_device.max_compute_units
    return min(units, int(limited)) if limited.isdigit() and int(limited) > 0 else units


def can_run_in_caller(cl_device: cl.Device) -> bool:
    """Return whether kernels can run in the thread that queues them."""
    return is_intel(cl_device) and _EXTENSION in cl_device.extensions.split()


def announce() -> None:
    """Register the installed runtime with the ICD loader, beside the system's drivers; call it before the loader loads.

    The loader reads one directory. So a private one gets a copy of the system's .icd files and one for this runtime.
    Where the user has set OCL_ICD_VENDORS, or the system has such a runtime, nothing changes.
    """
    path = library()
    if path is None or os.environ.get(_VENDORS):
        return
    texts = _vendors(Path(os.environ.get("OPENCL_VENDOR_PATH") or _SYSTEM_VENDORS))
    if any(Path(text).name == _LIBRARY for text in texts.values()):
        return
    texts["intel-opencl-rt.icd"] = str(path)
    with suppress(OSError, ClcommError):  # then it is not among the devices
        os.environ[_VENDORS] = str(_written(texts))


def _vendors(directory: Path) -> dict[str, str]:
    """Return the contents of a directory's .icd files by name, without those that name a missing library."""
    texts: dict[str, str] = {}
    with suppress(OSError):
        for path in sorted(directory.glob("*.icd")):
            with suppress(OSError, ValueError):
                text = read_regular(path, _MOST_BYTES).decode().strip()
                if not os.path.isabs(text) or os.path.exists(text):
                    texts[path.name] = text
    return texts


def _written(texts: dict[str, str]) -> Path:
    """Return a directory of these files, which no other user can write to: their libraries are loaded."""
    name = f"vendors-{sha256(repr(sorted(texts.items())).encode()).hexdigest()[:16]}"
    directory = first_private([Path(os.path.realpath(cache_directory()), "opencl")], "opencl") / name
    for file, text in texts.items():
        path = directory / file
        with suppress(OSError):
            if read_regular(path, _MOST_BYTES).decode(errors="replace") == text + "\n":
                continue
        write_whole(path, text + "\n", "CLCOMM_CACHE_DIR")
    return directory
