"""The peak of one core: multiply-adds on registers, in OpenCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kernels.cases import Case
from clcomm.engine import Device

_CHAINS, _WIDTH = 12, 8  # as in peak.cl
_ROUNDS = 100_000

PEAK = Case("peak", "multiply-adds on registers", 2.0 * _CHAINS * _WIDTH * _ROUNDS)


def make_runner(device: Device) -> Any:
    """Return a function that runs PEAK a given number of times."""
    import pyopencl as cl

    source = Path(__file__).with_name("peak.cl").read_text(encoding="utf-8")
    program = cl.Program(device.context, source).build(["-cl-fast-relaxed-math", "-cl-mad-enable"])
    kernel = cl.Kernel(program, "peak")
    out = device.allocate(4 * _WIDTH)
    kernel.set_args(out, np.float32(0.999), np.int32(_ROUNDS))

    def run(repeats: int) -> None:
        for _ in range(repeats):
            cl.enqueue_nd_range_kernel(device.queue, kernel, (1,), (1,))
        device.finish()

    return run
