"""Whether a device's work-groups can use sub-groups, whose items exchange registers: see common.cl."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np

from clcomm.engine import program
from clcomm.errors import DeviceError

if TYPE_CHECKING:
    import pyopencl as cl

#: SUB_GROUPS in common.cl, by the extension that it stands for; the first one that works is used.
EXTENSIONS = {"cl_khr_subgroup_shuffle": 1, "cl_intel_subgroups": 2}


def working(queue: cl.CommandQueue, row_group: int) -> int:
    """Return SUB_GROUPS for a device's kernels, 0 where it has none.

    What a driver lists is tried: the sum of a work-group of `row_group` items has to have the bits of the tree in local
    memory, so that no driver's error changes a result.
    """
    cl_device = queue.context.devices[0]
    listed = cl_device.extensions.split()
    values = np.random.default_rng(0).standard_normal(row_group).astype(np.float32)
    for extension, number in EXTENSIONS.items():
        if extension in listed:
            with contextlib.suppress(DeviceError):
                if _summed(queue, values, number) == _tree(values):
                    return number
    return 0


def _tree(values: np.ndarray) -> np.float32:
    """Return the sum in the order of common.cl."""
    while len(values) > 1:
        values = values[: len(values) // 2] + values[len(values) // 2 :]
    return np.float32(values[0])


def _summed(queue: cl.CommandQueue, values: np.ndarray, number: int) -> np.float32:
    import pyopencl as cl

    count, total = len(values), np.empty(1, np.float32)
    options = [f"-DROW_GROUP={count}", f"-DGROUP={count}", f"-DSUB_GROUPS={number}"]
    try:
        kernel = cl.Kernel(program.build(queue.context, "reduce", options), "sum_rows")
        flags = cl.mem_flags.READ_ONLY | cl.mem_flags.COPY_HOST_PTR
        given = cl.Buffer(queue.context, flags, hostbuf=values)
        out = cl.Buffer(queue.context, cl.mem_flags.WRITE_ONLY, total.nbytes)
        sizes = map(np.int32, (1, count, count, 1))  # rows, columns, block, blocks
        kernel(queue, (count,), (count,), out, given, *sizes, np.float32(1))
        cl.enqueue_copy(queue, total, out)
    except cl.Error as error:
        raise DeviceError(str(error)) from None
    return total[0]
