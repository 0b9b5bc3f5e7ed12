"""Selection of a rank's OpenCL device, and its share of the host's cores."""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from clcomm.base.errors import ClcommError, DeviceError, pip_install
from clcomm.base.host import usable_cores, variables
from clcomm.base.host.launcher import launched_rank
from clcomm.base.host.launcher import local_place as local_place
from clcomm.engine import intel_runtime, pocl

if TYPE_CHECKING:
    import pyopencl as cl

KINDS = ("gpu", "cpu", "accelerator")
_log = logging.getLogger("clcomm")
#: Platforms that are used only when named.
SIMULATORS = ("Oclgrind",)
#: Variables with compiler options for all kernels of a process, such as -cl-fast-relaxed-math.
_BUILD_OPTIONS = ("PYOPENCL_BUILD_OPTIONS", "POCL_EXTRA_BUILD_FLAGS")
#: The name of a kind, or of the first device of one.
_KIND_OR_FIRST = re.compile(rf"\s*({'|'.join(KINDS)})(:0*)?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class DeviceCandidate:
    """An OpenCL device that is present: `label` is its kind and its index among that kind, such as "gpu:1"."""

    label: str
    kind: str
    cl_device: cl.Device

    @property
    def description(self) -> str:
        """Device and platform name; `choose` searches it for the name that it is given."""
        return f"{self.cl_device.name.strip()}, {self.cl_device.platform.name.strip()}"

    @property
    def is_simulator(self) -> bool:
        """Whether this is a simulator, which checks kernels and is thousands of times slower than a device."""
        return self.cl_device.platform.name.strip() in SIMULATORS


def core_share(local_size: int) -> int:
    """Return this process's share of the cores that it may run on, among `local_size` processes."""
    return len(usable_cores()) // max(local_size, 1)


def prepare_environment(cores: int, spec: str | None = None, *, every: bool = False) -> None:
    """Prepare OpenCL's CPU devices before they are loaded; variables set by the user stay.

    Each is limited to `cores`. With one core or less, PoCL's `basic` driver runs kernels in the calling thread, without
    a worker to wake. PoCL from PyPI has a driver of that name; other builds may have renamed it, so they get a single
    worker.

    Intel's runtime is loaded only where it may be meant, as that takes time and 100 MB: where `spec`, or else
    CLCOMM_DEVICE, is a name or a number other than 0, where `every` device is asked for, or where PyPI's PoCL is not
    installed. Raises what `pocl_cache.prepare` raises.
    """
    _warn_of_options()
    pocl.prepare()
    intel_runtime.limit(cores)
    is_first = _KIND_OR_FIRST.fullmatch(_asked(spec)[0] or "cpu") is not None
    if every or not is_first or not find_spec("pocl_binary_distribution"):
        intel_runtime.announce()
    if cores <= 1 and find_spec("pocl_binary_distribution"):
        os.environ.setdefault("POCL_DEVICES", "basic")
    os.environ.setdefault("POCL_MAX_PTHREAD_COUNT", str(max(cores, 1)))
    os.environ.setdefault("POCL_CPU_MAX_CU_COUNT", str(max(cores, 1)))
    # PyOpenCL's own cache is one database that all ranks would lock; PoCL and GPU drivers cache programs themselves.
    os.environ.setdefault("PYOPENCL_NO_CACHE", "1")


@cache  # so that it warns only once
def _warn_of_options() -> None:
    """Log which variables of the environment change what kernels compute, if any is set."""
    found = [f"{name}={os.environ[name]!r}" for name in _BUILD_OPTIONS if os.environ.get(name, "").strip()]
    if found and not launched_rank():
        given = ", ".join(found)
        _log.warning("%s: kernels are built with options that may change the bits of results; unset it", given)


def load_platforms(cores: int, spec: str | None = None) -> None:
    """Load OpenCL's platforms ahead of the first Device, while the process waits for something else.

    Arguments as for `prepare_environment`. Errors are raised when a device is selected.
    """
    with suppress(ClcommError):
        prepare_environment(cores, spec)
        candidates()


def candidates() -> list[DeviceCandidate]:
    """Return every OpenCL device present, numbered within its kind; raises DeviceError when there is no platform."""
    import pyopencl as cl

    try:
        platforms = cl.get_platforms()
    except cl.Error:
        platforms = []
    if not platforms:
        raise DeviceError(
            f"no OpenCL platform found: run `{pip_install('pocl')}` for a CPU device, "
            "or install your GPU vendor's OpenCL driver"
        )
    found: list[DeviceCandidate] = []
    devices = [cl_device for platform in platforms for cl_device in _devices_of(platform)]
    # Intel's last, so that another runtime's device is cpu:0 whether this one is loaded or not.
    for cl_device in sorted(devices, key=intel_runtime.is_intel):
        kind = device_kind(cl_device)
        index = sum(other.kind == kind for other in found)
        found.append(DeviceCandidate(f"{kind}:{index}", kind, cl_device))
    return found


def _devices_of(platform: cl.Platform) -> list[cl.Device]:
    import pyopencl as cl

    try:
        return list(platform.get_devices())
    except cl.Error:  # a platform without devices
        return []


def device_kind(cl_device: cl.Device) -> str:
    """Return "gpu", "cpu" or "accelerator"."""
    import pyopencl as cl

    if cl_device.type & cl.device_type.GPU:
        return "gpu"
    return "cpu" if cl_device.type & cl.device_type.CPU else "accelerator"


def compute_units(cl_device: cl.Device) -> int:
    """Return the number of compute units that a device may use; for a CPU the process's share, if known."""
    if intel_runtime.is_intel(cl_device):
        return intel_runtime.compute_units(cl_device)
    units: int = cl_device.max_compute_units
    return units


def choose(spec: str | None, local_rank: int) -> DeviceCandidate:
    """Return the device for a process.

    Args:
        spec: "gpu", "gpu:1" or part of a device or platform name; None: CLCOMM_DEVICE, else the GPUs, else the CPUs,
            else the accelerators.
        local_rank: the process's rank on its host; devices that fit are used in turn.

    Raises:
        DeviceError: no device fits; the message lists those present.
    """
    matches = matching(spec)
    return matches[local_rank % len(matches)]


def matching(spec: str | None) -> list[DeviceCandidate]:
    """Return all devices that fit a `spec` as in `choose`; raises DeviceError if there are none."""
    spec, source = _asked(spec)
    found = candidates()
    matches = _by_kind(found) if spec is None else _by_spec(found, spec.strip().lower())
    if not matches:
        present = ", ".join(f"{c.label} ({c.description})" for c in found) or "none: this machine's platforms have none"
        asked = f"{source}={spec!r}" if spec is not None else source
        raise DeviceError(f"{asked}: expected one of {present}, or part of such a name{_unloaded(found)}")
    return matches


def _unloaded(found: list[DeviceCandidate]) -> str:
    """Return the remedy where Intel's runtime is installed and was not loaded; else ""."""
    if intel_runtime.library() is None or any(intel_runtime.is_intel(each.cl_device) for each in found):
        return ""
    return "; Intel's runtime is installed, and loaded if CLCOMM_DEVICE names it before the first device is selected"


def is_named() -> bool:
    """Return whether CLCOMM_DEVICE names a device."""
    return bool(variables.text("CLCOMM_DEVICE"))


def _asked(spec: str | None) -> tuple[str | None, str]:
    """Return the device specification, `spec` or else CLCOMM_DEVICE, and its name in messages."""
    if spec is None and variables.text("CLCOMM_DEVICE"):
        return variables.text("CLCOMM_DEVICE"), "CLCOMM_DEVICE"
    return spec, "device"


def _by_kind(found: list[DeviceCandidate]) -> list[DeviceCandidate]:
    real = [candidate for candidate in found if not candidate.is_simulator] or found
    return next((matches for kind in KINDS if (matches := _of_kind(real, kind))), [])


def _of_kind(found: list[DeviceCandidate], kind: str) -> list[DeviceCandidate]:
    """Return the devices of a kind; of CPUs only the first platform's, as other platforms share its cores."""
    matches = [candidate for candidate in found if candidate.kind == kind]
    if kind != "cpu":
        return matches
    return [each for each in matches if each.cl_device.platform.name == matches[0].cl_device.platform.name]


def _by_spec(found: list[DeviceCandidate], spec: str) -> list[DeviceCandidate]:
    kind, _, index = spec.partition(":")
    if kind in KINDS and not index:
        return _of_kind(found, kind)
    if kind in KINDS and index.isdigit():
        return [candidate for candidate in found if candidate.label == f"{kind}:{int(index)}"]
    return [candidate for candidate in found if spec and spec in candidate.description.lower()][:1]
