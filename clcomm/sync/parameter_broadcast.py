"""One rank's parameters, buffers and frozen parameters, sent to all ranks."""

from __future__ import annotations

import itertools

import numpy as np

from clcomm.communicator import Communicator
from clcomm.sync.agreement import require_agreement
from clcomm.sync.shared_space import SharedSpace

#: The labels under which the Communicator's stats count parameters and buffers.
PARAMETERS, BUFFERS = "parameters", "buffers"


def broadcast_parameters(comm: Communicator, space: SharedSpace, root: int) -> None:
    """Give every rank root's parameters in one broadcast, and then what else its model keeps; collective.

    MismatchError is raised on every rank where buffers or frozen parameters differ in name, shape or dtype.
    """
    space.adapter.pull_parameters()
    comm.broadcast(space.arrays.params, root, label=PARAMETERS, nbytes=space.layout.nbytes)
    space.adapter.push_parameters()
    state = space.adapter.extra_state()
    lines = [f"{name} {array.shape} {array.dtype}" for name, array in state.items()]
    require_agreement(comm, "buffers and frozen parameters", lines, "build the same model on every rank")
    _broadcast(comm, space, state, root)


def _broadcast(comm: Communicator, space: SharedSpace, state: dict[str, np.ndarray], root: int) -> None:
    for array in state.values():
        comm.broadcast(array, root, label=PARAMETERS)
    if state:
        space.adapter.load_extra_state(state)


def broadcast_buffers(comm: Communicator, space: SharedSpace, root: int) -> None:
    """Give every rank root's buffers in one broadcast; collective where the model has any."""
    state = space.adapter.buffers()
    if not state:
        return
    arrays = list(state.values())
    packed = np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays])
    comm.broadcast(packed, root, label=BUFFERS)
    if comm.rank != root:
        ends = list(itertools.accumulate(array.nbytes for array in arrays))
        parts = np.split(packed, ends[:-1])
        loaded = (part.view(array.dtype).reshape(array.shape) for part, array in zip(parts, arrays, strict=True))
        space.adapter.load_buffers(dict(zip(state, loaded, strict=True)))
