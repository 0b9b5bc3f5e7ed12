"""Runs small cases of every family on Oclgrind: `python -m tests.oclgrind.simulate WHAT CASES LONGEST`.

It has to be the only OpenCL platform. What Oclgrind reports goes to standard error, after a line for each case; on
standard output are, as JSON, the builds of kernels that were launched and the kernels that are there, by file. WHAT:
one of RUNS, or the kind of a device and the name of a planted mistake, such as "gpu:race".
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from clcomm.engine import Tensor, selection
from clcomm.engine.device import Device
from clcomm.engine.fold import MOST_ROWS
from clcomm.engine.tuning import Tuning, choices
from tests.families import convolutions, host, products
from tests.families.every import FAMILIES, WIDE, WIDE_FAMILIES
from tests.families.memory import ExactMemory
from tests.sampling import runs_all_cases, some

#: The start of a line with the name of the next case.
CASE = "case: "
#: Sides of 8 are transposed first; small groups are as good as large ones, and sooner simulated.
SMALL = Tuning(transpose_from=8, gemm_block=(8, 4, 16), group=64)


class Run(NamedTuple):
    """Families on a device of a kind, tuned in several ways; and chosen cases of families."""

    kind: str
    families: Collection[str] = tuple(FAMILIES)
    tunings: Collection[Tuning] = (SMALL,)
    chosen: Collection[tuple[str, Any]] = ()


#: Oclgrind crashes where it is to track what is initialised in wide vectors, as products, convolutions and poolings on
#: CPUs have them, and does not see what the host writes to its own memory. (NaN shows such reads in tests/families.)
UNTRACKED = {*WIDE_FAMILIES, "pooling", "fold", "rendezvous", "coding", "factors", "gather"}
#: Of [9, 33] and [33, 6], lying each way round, with each ending: whole slices of K and a part.
PRODUCTS = [
    ("product", products.Case(9, 6, 33, (turn > 1, turn % 2 > 0), turn % 2 > 0, turn > 1, turn)) for turn in range(4)
]
#: Of few columns and long sums, with each ending, and of few rows and whole panels.
NARROW_PRODUCTS = [
    *(("product", case._replace(rows=5, columns=3, depth=64, transposed=(False, True))) for _, case in PRODUCTS),
    *(("plain product", products.Case(5, 96, 3, (turned, False), False, False, 0)) for turned in (False, True)),
]
#: A batch, so small that its groups are soon simulated.
SMALL_BATCH = products.Batch(products.Case(3, 2, 5, (False, True), False, False, 0), ((2,), (2,)))
#: Of each number of rows that one kernel adds up, divided and not.
FOLDS = [("fold", host.Case(18, rows, 3, rows)) for rows in range(2, MOST_ROWS + 1)]
ONE_CHANNEL = convolutions.Case(3, 1, 5, 1, convolutions.Axis(3, 1, 4), convolutions.Axis(3, 1, 5), 0)
#: With a gradient that fills tiles of 8 outputs.
STRIDED = convolutions.Case(9, 8, 8, 2, convolutions.Axis(3, 1, 3), convolutions.Axis(3, 1, 3), 0)
RUNS = {
    "cpu": Run("cpu", chosen=[*PRODUCTS, *NARROW_PRODUCTS, *FOLDS, ("convolution of one width", ONE_CHANNEL)]),
    "cpu, tracked": Run("cpu", [name for name in FAMILIES if name not in UNTRACKED]),
    "cpu, vectors of 16": Run(
        "cpu", WIDE_FAMILIES,
        [replace(SMALL, gemm_tile=WIDE.gemm_tile, conv_lanes=WIDE.conv_lanes, loop_lanes=WIDE.loop_lanes)],
        [*PRODUCTS, *NARROW_PRODUCTS, ("convolution", STRIDED), ("convolution in groups", STRIDED._replace(groups=2))],
    ),
    "gpu": Run("gpu"),
    "gpu, blocks": Run(
        "gpu", (), [replace(SMALL, gemm_block=each) for each in some(choices("gpu")["gemm_block"], 1)],
        [*PRODUCTS, ("batch of products", SMALL_BATCH)],
    ),
    "gpu, outputs": Run(
        "gpu", (), [replace(SMALL, conv_outputs=each) for each in some(choices("gpu")["conv_outputs"][1:], 1)],
        [("convolution", STRIDED._replace(images=2))],
    ),
}  # fmt: skip


class HeldMemory(ExactMemory):
    """Memory that is never freed: Oclgrind would take what it knows of a buffer for the next one at its address."""

    def __init__(self, device: Device):
        super().__init__(device)
        self._held: list[Any] = []

    def allocate(self, nbytes: int) -> Any:
        """Return a buffer of `nbytes`."""
        self._held.append(super().allocate(nbytes))
        return self._held[-1]


class Launched:
    """The builds of kernels that a device launched, as (file, kernel, its build options)."""

    def __init__(self, device: Device):
        import pyopencl as cl

        self._device, self._seen = device, set[tuple[str, int]]()
        device.note = lambda launch: self._note(launch[0])
        enqueue = cl.enqueue_nd_range_kernel

        def noted(queue: Any, kernel: Any, *sizes: Any) -> Any:  # as HostKernels queues them
            self._note(kernel)
            return enqueue(queue, kernel, *sizes)

        cl.enqueue_nd_range_kernel = noted

    def _note(self, kernel: Any) -> None:
        self._seen.add((kernel.function_name, kernel.program.int_ptr))

    def builds(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        for (file, _, *defines), built in self._device._programs.items():
            for kernel, program in sorted(self._seen):
                if program == built.int_ptr:
                    yield file, kernel, self._device.tuning.defines(file) | dict(defines)

    def kernels(self) -> Iterator[tuple[str, str]]:
        """Yield (file, kernel) of all that the programs hold."""
        for key, built in self._device._programs.items():
            for name in built.kernel_names.split(";"):
                yield key[0], name


def simulator(kind: str, tuning: Tuning) -> Device:
    """Return Oclgrind's device, with the kernels of a kind, in memory of exact sizes."""
    (only,) = selection.candidates()
    if only.cl_device.platform.name != "Oclgrind":
        raise SystemExit(f"expected Oclgrind, got {only.description}")
    device = Device(only.cl_device, kind=kind, tuning=tuning)
    device.compute_units = 1  # so that one block of a product is enough
    device.memory = HeldMemory(device)
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
    _launch(device, "__kernel void last(__global int *x) { x[0] = get_global_id(0); }")


def race_in_local_memory(device: Device) -> None:
    """Leave out the barrier between writing local memory and reading what a neighbour wrote."""
    source = """__kernel void last(__global int *x) {
        __local int shared[4];
        const int item = get_local_id(0);
        shared[item] = item;
        x[item] = shared[3 - item];
    }"""
    _launch(device, source)


def read_before_write(device: Device) -> None:
    """Decide by local memory that nothing was written to."""
    source = """__kernel void last(__global int *x) {
        __local int shared[4];
        if (shared[get_local_id(0)] > 0) x[get_local_id(0)] = 1;
    }"""
    _launch(device, source)


def _launch(device: Device, source: str) -> None:
    import pyopencl as cl

    kernel = cl.Kernel(cl.Program(device.context, source).build(), "last")
    kernel(device.queue, (4,), (4,), device.allocate(16))


PLANTED: dict[str, Callable[[Device], None]] = {
    function.__name__: function
    for function in (read_past_the_end, write_past_the_end, race, race_in_local_memory, read_before_write)
}


def _drawn(run: Run, cases: int, longest: int) -> Iterator[tuple[str, Any]]:
    """Yield the families' cases; in a sample convolutions are small, which take longest to simulate."""
    for name in run.families:
        if run.kind in FAMILIES[name].kinds and not FAMILIES[name].in_caller:
            for case in FAMILIES[name].cases(np.random.default_rng(0), cases, longest):
                if isinstance(case, convolutions.Case) and not runs_all_cases():
                    case = case._replace(images=1, channels=min(case.channels, 2))
                yield name, case


def main(what: str, cases: str, longest: str) -> None:
    kind, _, mistake = what.partition(":")
    if mistake:
        device = simulator(kind, SMALL)
        announce(mistake)
        PLANTED[mistake](device)
        device.finish()
        return
    run, builds, there = RUNS[what], [], set()
    for tuning in run.tunings:
        device = simulator(run.kind, tuning)
        launched = Launched(device)
        for name, case in [*_drawn(run, int(cases), int(longest)), *run.chosen]:
            announce(f"{name}: {case}")
            FAMILIES[name].check(device, case)
        builds += launched.builds()
        there |= {*launched.kernels()}
    print(json.dumps({"launched": builds, "there": sorted(there)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
