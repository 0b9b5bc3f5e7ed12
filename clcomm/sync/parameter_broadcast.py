"""One rank's parameters, buffers and frozen parameters, sent to all ranks."""

from __future__ import annotations

import numpy as np

from clcomm.communicator import Communicator
from clcomm.sync.agreement import require_agreement
from clcomm.sync.shared_space import SharedSpace

#: The label under which the Communicator's stats count parameters.
PARAMETERS = "parameters"


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


def broadcast_buffers(comm: Communicator, space: SharedSpace, root: int) -> None:
    """Give every rank root's buffers and frozen parameters, which have to be alike but for their values; collective."""
    _broadcast(comm, space, space.adapter.extra_state(), root)


def _broadcast(comm: Communicator, space: SharedSpace, state: dict[str, np.ndarray], root: int) -> None:
    for array in state.values():
        comm.broadcast(array, root, label=PARAMETERS)
    if state:
        space.adapter.load_extra_state(state)
