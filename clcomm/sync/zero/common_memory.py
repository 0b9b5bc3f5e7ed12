"""Memory in which all ranks have one copy of a model."""

from __future__ import annotations

import numpy as np

from clcomm.comm.communicator import Communicator
from clcomm.sync.adapters.adapter import FlatArrays
from clcomm.sync.agreement import CHECKS
from clcomm.sync.shared_space import SharedSpace


def move_to_common_memory(comm: Communicator, space: SharedSpace, *, with_gradients: bool) -> np.ndarray | None:
    """Move parameters, and gradients if asked, into memory common to all ranks, if there is any; collective.

    Returns the parameters, or all ranks' gradients, float32 with a row for each; None where nothing was moved.
    """
    flat, padded = space.adapter.flat_space, space.padded  # type: ignore[attr-defined]
    if comm.size == 1 or not all(comm.all_gather_object(not flat.is_staged, label=CHECKS)):
        return None
    params, grads, moved = comm.allocate_common(padded.params.nbytes), padded.grads, None
    if with_gradients:
        moved = comm.allocate_common(comm.size * padded.grads.nbytes)
    if not all(comm.is_common(each) for each in (params, moved) if each is not None):
        return None
    if moved is not None:
        moved = moved.view(np.float32).reshape(comm.size, -1)
        grads = moved[comm.rank].view(np.uint8)
    space.move(FlatArrays(params, grads, padded.reduced))  # all ranks write the same params
    del padded
    comm.memory.free_unused()  # each rank's own: without it they stayed until the next allocation
    return params if moved is None else moved
