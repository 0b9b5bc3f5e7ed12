"""Runs small cases of every family on Oclgrind: `python -m tests.oclgrind.simulate KIND CASES LONGEST [WHAT]`.

It has to be the only OpenCL platform. What Oclgrind reports goes to standard error, after a line for each case; on
standard output are, as JSON, the kernels that ran and those that are there, by file. WHAT: the name of a mistake, which
is run instead, or "wide" for what CPUs compute in vectors of 16.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from clcomm.engine import Tensor, selection
from clcomm.engine.device import Device
from clcomm.engine.tuning import Tuning
from tests.families.every import FAMILIES, WIDE_FAMILIES
from tests.families.every import WIDE as WIDE_TUNING
from tests.families.memory import ExactMemory

#: The start of a line with the name of the next case.
CASE = "case: "


WIDE = "wide"


def simulator(kind: str, is_wide: bool) -> Device:
    """Return Oclgrind's device, with the kernels of a kind, in memory of exact sizes."""
    (only,) = selection.candidates()
    if only.cl_device.platform.name != "Oclgrind":
        raise SystemExit(f"expected Oclgrind, got {only.description}")
    # Sides of 8 are transposed first; small groups are as good as large ones, and sooner simulated.
    tuning = Tuning(transpose_from=8, gemm_block=(8, 4, 16), group=64)
    if is_wide:
        tuning = replace(WIDE_TUNING, transpose_from=8)
    device = Device(only.cl_device, kind=kind, tuning=tuning)
    device.memory = ExactMemory(device)
    return device


def announce(what: str) -> None:
    """Print the name of the next case."""
    print(f"{CASE}{what}", file=sys.stderr, flush=True)


def read_past_the_end(device: Device) -> None:
    """Read one element too many."""
    _copy(device, 5, 7)


def write_past_the_end(device: Device) -> None:
    """Write one element too many."""
    _copy(device, 7, 5)


def _copy(device: Device, read: int, written: int) -> None:
    x, out = (Tensor(np.ones(count, np.float32), device) for count in (read, written))
    device.launch(device.kernel("elementwise", "copy"), *device.grid(6), out, x, 6)


def race(device: Device) -> None:
    """Let all items write one element."""
    import pyopencl as cl

    source = "__kernel void last(__global int *x) { x[0] = get_global_id(0); }"
    kernel = cl.Kernel(cl.Program(device.context, source).build(), "last")
    kernel(device.queue, (4,), (1,), device.allocate(4))


PLANTED: dict[str, Callable[[Device], None]] = {
    function.__name__: function for function in (read_past_the_end, write_past_the_end, race)
}


def main(kind: str, cases: str, longest: str, what: str = "") -> None:
    device = simulator(kind, what == WIDE)
    if what in PLANTED:
        announce(what)
        PLANTED[what](device)
        device.finish()
        return
    for family in map(FAMILIES.get, WIDE_FAMILIES if what == WIDE else FAMILIES):
        if kind in family.kinds:
            for case in family.cases(np.random.default_rng(0), int(cases), int(longest)):
                announce(f"{family.name}: {case}")
                family.check(device, case)
    there = {(key[0], name) for key, built in device._programs.items() for name in built.kernel_names.split(";")}
    print(json.dumps({"ran": sorted({key[:2] for key in device._kernels}), "there": sorted(there)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
