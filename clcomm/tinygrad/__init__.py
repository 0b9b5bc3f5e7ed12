"""tinygrad on several ranks: import this before tinygrad opens its device.

    from clcomm.tinygrad import data_parallel
    ...
    optimizer = data_parallel(model, nn.optim.Adam(nn.state.get_parameters(model)))

The import chooses tinygrad's OpenCL device, finds an OpenCL loader for it, and limits a CPU's device to the rank's
share of the cores; variables that are set already stay. Written for tinygrad 0.14.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from clcomm.base.errors import ArgumentError
from clcomm.comm.communicator import Communicator
from clcomm.engine.pocl import name_processor
from clcomm.engine.selection import candidates, core_share, local_place, prepare_environment
from clcomm.sync.synchronizer import Synchronizer

__all__ = ["data_parallel"]


def _prepare() -> None:
    cores = core_share(local_place(None, None)[1])
    prepare_environment(cores)
    os.environ.setdefault("DEV", "CL")
    os.environ.setdefault("PARALLEL", "0")  # tinygrad compiles in this process, not in some of its own on each rank
    for candidate in candidates():  # PyOpenCL, loaded here, tells its loader where the drivers are
        name_processor(candidate.cl_device)
    package = find_spec("pyopencl")
    for folder in package.submodule_search_locations or () if package else ():
        for loader in sorted(Path(folder, ".libs").glob("libOpenCL*.so*")):
            os.environ.setdefault("OPENCL_PATH", str(loader))


_prepare()

from clcomm.sync.adapters.tinygrad_runtime import build_from_source  # noqa: E402

build_from_source()

Optimizer = TypeVar("Optimizer")


def data_parallel(
    model: object, optimizer: Optimizer, comm: Communicator | None = None, *, sync: Synchronizer | None = None
) -> Optimizer:
    """Train replicas of a model on all ranks: return its optimizer, whose steps use the mean of their gradients.

    All ranks begin with rank 0's parameters and buffers. What tinygrad draws from here on, such as batches and
    dropout, differs by rank, and depends on rank 0's seed and the rank alone. `optimizer.step()` and `schedule_step()`
    then are collective, also within a TinyJit. Local gradients accumulate within `sync.no_sync()`.

    Args:
        model: any object in which `nn.state.get_parameters` finds the parameters.
        optimizer: of tinygrad, of all trained parameters; it is changed, not copied. Of an OptimizerGroup its members
            are: they may step in any order, by themselves or in another group.
        comm: the ranks; by default all of the job.
        sync: what averages; by default a Synchronizer(comm).

    Raises ArgumentError for an optimizer without `schedule_step` or without some of the trained parameters, or both
    `comm` and `sync`.
    """
    from clcomm.sync.adapters.tinygrad import TinygradAdapter  # here, as it tells which extra is missing where it is
    from tinygrad import Tensor  # isort: skip

    if not hasattr(optimizer, "schedule_step"):
        raise ArgumentError(f"optimizer: expected one of tinygrad's nn.optim, got {type(optimizer).__name__}")
    if comm is not None and sync is not None:
        raise ArgumentError("sync: expected one of comm and sync, got both; the Synchronizer has its own comm")
    used = Synchronizer(Communicator() if comm is None else comm) if sync is None else sync
    used.broadcast_parameters(model)
    adapter = used.models.of(model).space.adapter
    if not isinstance(adapter, TinygradAdapter):
        raise ArgumentError(f"model: expected tinygrad's, as the optimizer is, got {type(model).__name__}")
    adapter.require_all_in(optimizer)
    seed = used.comm.bcast(Tensor._seed)
    if used.comm.size > 1:
        Tensor.manual_seed(zlib.crc32(f"{seed} {used.comm.rank}".encode()))

    def averaging(schedule: Callable[[], Any]) -> Any:
        if adapter.has_local_gradients():  # the first of a step averages for all
            used.sync_gradients(model)
        return schedule()

    for member in getattr(optimizer, "optimizers", [optimizer]):
        member.schedule_step = partial(averaging, member.schedule_step)
    return optimizer
