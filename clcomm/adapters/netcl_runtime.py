"""Set-up of netcl 0.4.4 for a rank, with workarounds for its faults in jobs of several ranks."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from clcomm.engine.device import Device, default_device
from clcomm.errors import needed


def prepare(device: Device | str | None = None) -> Device:
    """Import netcl and make it use `device`, given by object or name; None: the engine's default device.

    Build modules with `queue=` set to the returned device's `queue`. Raises ArgumentError where netcl is missing.
    """
    # The device first: choosing it sets PoCL's share of the cores, which has to happen before netcl loads OpenCL.
    chosen = default_device() if device is None else device if isinstance(device, Device) else Device.select(device)
    # netcl's tuner picks kernels by timing them: ranks would pick differently, and so would two runs of one seed.
    os.environ.setdefault("NETCL_AUTOTUNE", "0")
    with needed("netcl"):
        import netcl
        import netcl.autograd.ops
        import netcl.core.device as devices
        from netcl.core.backend.opencl import OpenCLBackend
    # A layer built without queue= would take the first device of the first platform, on every rank.
    devices.manager._cache["auto"] = devices.DeviceHandle(
        chosen.cl_device.platform.name, chosen.name, "cl", chosen.kind, chosen.context, chosen.queue
    )
    if not isinstance(netcl.autograd.ops.cl, _ProgramsBuiltOnce):
        netcl.autograd.ops.cl = _ProgramsBuiltOnce(netcl.autograd.ops.cl)
    with _signal_handlers_kept():
        OpenCLBackend(chosen.queue)
    return chosen


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Restore the signal handlers that netcl replaces: its own exit with 0 on SIGTERM and may _exit on Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            if handler is not None:  # one that C code has set; Python cannot set it again
                signal.signal(number, handler)


class _ProgramsBuiltOnce:
    """A proxy of `pyopencl` for netcl's ops, which rebuild the cross-entropy's programs at every call (45 ms)."""

    def __init__(self, cl: Any):
        self._cl = cl
        self._built: dict[tuple[int, str], _Built] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cl, name)

    def Program(self, context: Any, source: str) -> _Built:
        key = (context.int_ptr, source)
        if key not in self._built:
            self._built[key] = _Built(self._cl.Program(context, source).build())
        return self._built[key]


class _Built:
    """A built program with a `build` that does nothing, and its kernels, each created once."""

    def __init__(self, program: Any):
        self._program = program

    def build(self) -> _Built:
        return self

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self._program, name)
        setattr(self, name, kernel)
        return kernel


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress PyOpenCL's warnings about netcl's kernels; as errors they would make netcl change its algorithm."""
    import pyopencl

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pyopencl.CompilerWarning)
        yield
