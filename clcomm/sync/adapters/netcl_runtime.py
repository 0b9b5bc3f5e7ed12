"""Set-up of netcl 0.4.4 for a rank, around its faults in jobs of several ranks; a module's values and parameters."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError, needed
from clcomm.engine.device import Device, default_device

#: A parameter's dtype in the flat space, by netcl's name for its own dtype.
FLAT_DTYPES = {
    "float": "float32",
    "float32": "float32",
    "half": "float32",
    "float16": "float32",
    "double": "float64",
    "float64": "float64",
}


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


class NetclTensor:
    """A value that netcl computed: `shape`, `numpy()`, `item()`, and `backward()` where it was recorded."""

    def __init__(self, value: Any, node: Any = None, transposed: bool = False):
        self.value, self.node, self._transposed = value, node, transposed

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(int(length) for length in self.value.shape)
        return shape[::-1] if self._transposed else shape

    def numpy(self) -> np.ndarray:
        """Return a copy of the values on the host; waits for the device."""
        values = self.value.to_host()
        return np.ascontiguousarray(values.T) if self._transposed else values

    def item(self) -> float:
        """Return the value of a tensor of one element; waits for the device."""
        if self.value.size != 1:
            raise ArgumentError(f"item: expected a tensor of one element, got shape {self.shape}")
        return float(self.value.to_host().reshape(-1)[0])

    def backward(self, gradient: float = 1.0) -> None:
        """Add this value's gradients, times `gradient`, to the parameters'; once for each forward."""
        from netcl import autograd
        from netcl.core.tensor import Tensor

        if self.node is None:
            raise ArgumentError("backward: expected a value recorded since the last backward(), got none; run forward")
        seed = Tensor.from_shape(self.value.queue, self.value.shape, fill=float(gradient))
        with quiet():
            autograd.Tape(retain_grads=False).backward(self.node, seed)
        self.value.grad = self.node = None  # returns the graph's buffers to netcl's pool


class NetclParameter:
    """A parameter of a netcl module, with PyTorch's name and shape."""

    def __init__(self, name: str, tensor: Any, transposed: bool):
        self.name, self.tensor, self.transposed = name, tensor, transposed
        self.dtype = FLAT_DTYPES.get(tensor.dtype, tensor.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions, in PyTorch's order."""
        shape = tuple(int(length) for length in self.tensor.shape)
        return shape[::-1] if self.transposed else shape

    @property
    def requires_grad(self) -> bool:
        """Whether backward() computes its gradient."""
        return bool(self.tensor.requires_grad) and not getattr(self.tensor, "_frozen", False)

    @property
    def grad(self) -> NetclTensor | None:
        return None if self.tensor.grad is None else NetclTensor(self.tensor.grad, transposed=self.transposed)

    def numpy(self) -> np.ndarray:
        return NetclTensor(self.tensor, transposed=self.transposed).numpy()

    def copy_from(self, values: object) -> None:
        """Overwrite the values with a host array of the same shape."""
        array = np.asarray(values)
        if array.shape != self.shape:
            raise ArgumentError(f"parameter {self.name!r}: expected shape {self.shape}, got {array.shape}")
        self._write(self.tensor, array)

    def set_gradient(self, values: np.ndarray) -> None:
        """Set the gradient, in new memory: netcl's may be shared with another parameter's."""
        from netcl.core.tensor import Tensor

        gradient = Tensor.from_shape(self.tensor.queue, self.tensor.shape, dtype=self.tensor.dtype)
        self._write(gradient, values)
        self.tensor.grad = gradient

    def _write(self, tensor: Any, values: np.ndarray) -> None:
        from netcl.core.transfer import write_tensor

        write_tensor(tensor, values.T if self.transposed else values)


def named_tensors(module: Any) -> Iterator[NetclParameter]:
    """Yield every tensor of a module once: public attributes by path, then the rest of `parameters()`."""
    seen: set[int] = set()
    yield from _walk(module, "", seen)
    for index, tensor in enumerate(module.parameters()):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield NetclParameter(f"parameter{index}", tensor, False)


def _walk(owner: object, prefix: str, seen: set[int]) -> Iterator[NetclParameter]:
    from netcl.core.tensor import Tensor
    from netcl.nn import Linear
    from netcl.nn.layers import Module

    seen.add(id(owner))
    if isinstance(owner, dict):
        members = [(str(key), member) for key, member in owner.items()]
    elif isinstance(owner, (list, tuple)):
        members = [(str(index), member) for index, member in enumerate(owner)]
    else:  # private attributes cache what derives from the public ones
        members = [(name, member) for name, member in vars(owner).items() if not name.startswith("_")]
    for name, member in members:
        if id(member) in seen:
            continue
        if isinstance(member, Tensor):
            seen.add(id(member))
            yield NetclParameter(prefix + name, member, isinstance(owner, Linear) and name == "weight")
        elif isinstance(member, (Module, dict, list, tuple)):
            yield from _walk(member, f"{prefix}{name}.", seen)
