"""Support for sub-groups, whose items exchange registers for common.cl's sums and comparisons of rows.

OpenCL 3.0 extension specification, cl_khr_subgroup_shuffle; cl_intel_subgroups.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING

import numpy as np

from clcomm.engine import program

if TYPE_CHECKING:
    import pyopencl as cl


#: SUB_GROUPS in common.cl, by the extension that it stands for; the first one that works is used.
EXTENSIONS = {"cl_khr_subgroup_shuffle": 1, "cl_intel_subgroups": 2}


def working(queue: cl.CommandQueue, row_group: int) -> int:
    """Return SUB_GROUPS for a device's kernels, 0 without support.

    The driver's claim is tested: the sum of a work-group of `row_group` items has to equal the bits of the tree in
    local memory, so that no driver's error changes a result.
    """
    import pyopencl as cl

    listed = queue.context.devices[0].extensions.split()
    values = np.random.default_rng(0).standard_normal(row_group).astype(np.float32)
    for extension, number in EXTENSIONS.items():
        if extension in listed:
            with contextlib.suppress(cl.Error):  # listed, but its functions are missing
                if _summed(queue, values, number) == tree_sum(values):
                    return number
    return 0


def tree_sum(values: np.ndarray) -> np.float32:
    """Return the sum of float32 values, as many as a work-group has items, in the order of common.cl."""
    while len(values) > 1:
        values = values[: len(values) // 2] + values[len(values) // 2 :]
    return np.float32(values[0])


def _summed(queue: cl.CommandQueue, values: np.ndarray, number: int) -> np.float32:
    import pyopencl as cl

    count, total, flags = len(values), np.empty(1, np.float32), cl.mem_flags
    options = [f"-DROW_GROUP={count}", f"-DGROUP={count}", f"-DSUB_GROUPS={number}"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cl.CompilerWarning)  # Intel's compiler says at each build that it has built
        built = cl.Program(queue.context, program.source_of("reduce")).build(options)
    kernel = cl.Kernel(built, "sum_rows")
    given = cl.Buffer(queue.context, flags.READ_ONLY | flags.COPY_HOST_PTR, hostbuf=values)
    out = cl.Buffer(queue.context, flags.WRITE_ONLY, total.nbytes)
    sizes = map(np.int32, (1, count, count, 1))  # rows, columns, block, blocks
    kernel(queue, (count,), (count,), out, given, *sizes, np.float32(1))
    cl.enqueue_copy(queue, total, out)
    return np.float32(total[0])
