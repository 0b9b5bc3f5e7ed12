"""NumPy's broadcasting: result shapes, index plans for the kernels, and launches with broadcast operands."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.device import Device
from clcomm.engine.tensor import Shape, Tensor, empty


def broadcast_shape(name: str, a: Shape, b: Shape) -> Shape:
    """Return the shape of an operation on shapes `a` and `b`; raises ArgumentError, with both, if they do not fit."""
    try:
        return np.broadcast_shapes(a, b)
    except ValueError:
        raise ArgumentError(f"{name}: shapes {a} and {b} do not broadcast to each other") from None


@lru_cache(maxsize=1024)
def _plan(shape: Shape, a: Shape, b: Shape) -> tuple[np.ndarray, int, int, int]:
    """Return (plan, outer, rows, inner) for kernels that read `a` and `b` broadcast to `shape`; see elementwise.cl.

    Neighbouring dimensions are merged where both operands allow it, so that the inner loop is as long as possible.
    """
    if any(broadcast_shape("broadcast", shape, each) != shape for each in (a, b)):
        raise ArgumentError(f"broadcast: shapes {a} and {b} do not give {shape}")
    sizes: list[int] = []
    strides: list[list[int]] = []
    for size, *steps in zip(shape, _strides(a, shape), _strides(b, shape), strict=True):
        if size == 1:
            continue
        if sizes and all(above == step * size for above, step in zip(strides[-1], steps, strict=True)):
            sizes[-1] *= size
            strides[-1] = list(steps)
        else:
            sizes.append(size)
            strides.append(list(steps))
    if not sizes:
        sizes, strides = [1], [[1, 1]]
    *outer, inner = sizes
    a_strides, b_strides = zip(*strides, strict=True)
    values = [*outer, *a_strides[:-1], *b_strides[:-1], a_strides[-1], b_strides[-1]]
    return np.array(values, np.int32), len(outer), int(np.prod(outer, dtype=np.int64)), inner


def _strides(shape: Shape, target: Shape) -> list[int]:
    """Return the strides, in elements, with which `shape` is read as `target`; 0 where it is broadcast."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(0 if size == 1 else step)
        step *= size
    return [0] * (len(target) - len(shape)) + strides[::-1]


def launch_broadcast(name: str, out: Tensor, a: Tensor, b: Tensor, *numbers: float, file: str = "elementwise") -> None:
    """Queue kernel `name` of a file with `a` and `b` broadcast to `out`'s shape."""
    device = out.device
    if 0 in out.shape:
        return
    _, outer, rows, inner = _plan(out.shape, a.shape, b.shape)
    grid = device.row_grid(rows, inner) if device.is_cpu else device.grid(rows * inner)
    plan = _plan_buffer(device, out.shape, a.shape, b.shape)
    device.launch(device.kernel(file, name), *grid, out, a, b, plan, outer, rows, inner, *numbers)


def _plan_buffer(device: Device, shape: Shape, a: Shape, b: Shape) -> object:
    return device.keep(("broadcast", shape, a, b), lambda: _plan(shape, a, b)[0])


def expand(x: Tensor, shape: Shape, divisor: float = 1.0, out: Tensor | None = None) -> Tensor:
    """Return x / divisor broadcast to `shape`, not on the tape; written to `out` if given."""
    out = empty(x.device, shape) if out is None else out
    if x.shape == shape:
        device, size = x.device, x.numel()
        device.launch(device.kernel("elementwise", "divide_by"), *device.grid(size), out, x, divisor, size)
    else:
        launch_broadcast("expand", out, x, x, divisor)
    return out


def broadcast_axes(shape: Shape, target: Shape) -> Shape:
    """Return the dimensions of `target` along which a tensor of `shape` is repeated."""
    lead = len(target) - len(shape)
    return tuple([d for d, n in enumerate(target) if d < lead or (shape[d - lead] == 1 and n != 1)])
