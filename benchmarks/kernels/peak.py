"""The peak of one core, or of a GPU: multiply-adds on registers, in OpenCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kernels.cases import Case
from clcomm.engine import Device
from clcomm.engine.tuning import has_wide_vectors

_CHAINS = 12  # as in peak.cl
_FLOATS = 16 * 50_000  # that each chain multiplies and adds
_GPU_ITEMS, _GPU_ROUNDS = 1 << 18, 4000  # work-items, more than any GPU runs at once, and what each chain of one does
_GPU_GROUP = 64


def peak_of(is_gpu: bool) -> Case:
    """Return the case of a core, or of a whole GPU."""
    floats = _GPU_ITEMS * _GPU_ROUNDS if is_gpu else _FLOATS
    return Case("peak", "multiply-adds on registers", 2.0 * _CHAINS * floats)


def make_runner(device: Device) -> Any:
    """Return a function that runs the device's case a given number of times."""
    import pyopencl as cl

    source = Path(__file__).with_name("peak.cl").read_text(encoding="utf-8")
    width = 1 if not device.is_cpu else 16 if has_wide_vectors(device.cl_device) else 8
    items, group, rounds = (1, 1, _FLOATS // width) if device.is_cpu else (_GPU_ITEMS, _GPU_GROUP, _GPU_ROUNDS)
    options = ["-cl-fast-relaxed-math", "-cl-mad-enable", f"-DVECTOR=float{width if width > 1 else ''}"]
    program = cl.Program(device.context, source).build(options)
    kernel = cl.Kernel(program, "peak")
    out = device.allocate(4 * width * items)
    kernel.set_args(out, np.float32(0.999), np.int32(rounds))

    def run(repeats: int) -> None:
        for _ in range(repeats):
            cl.enqueue_nd_range_kernel(device.queue, kernel, (items,), (group,))
        device.finish()

    return run
