"""The peak of one core: multiply-adds on registers, in OpenCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kernels.cases import Case
from clcomm.engine import Device
from clcomm.engine.tuning import has_wide_vectors

_CHAINS = 12  # as in peak.cl
_FLOATS = 16 * 50_000  # that each chain multiplies and adds

PEAK = Case("peak", "multiply-adds on registers", 2.0 * _CHAINS * _FLOATS)


def make_runner(device: Device) -> Any:
    """Return a function that runs PEAK a given number of times."""
    import pyopencl as cl

    source = Path(__file__).with_name("peak.cl").read_text(encoding="utf-8")
    width = 16 if has_wide_vectors(device.cl_device) else 8
    options = ["-cl-fast-relaxed-math", "-cl-mad-enable", f"-DVECTOR=float{width}"]
    program = cl.Program(device.context, source).build(options)
    kernel = cl.Kernel(program, "peak")
    out = device.allocate(4 * width)
    kernel.set_args(out, np.float32(0.999), np.int32(_FLOATS // width))

    def run(repeats: int) -> None:
        for _ in range(repeats):
            cl.enqueue_nd_range_kernel(device.queue, kernel, (1,), (1,))
        device.finish()

    return run
