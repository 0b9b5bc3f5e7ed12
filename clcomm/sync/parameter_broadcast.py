"""Parameters, buffers and frozen parameters of one rank sent to all, and the mean of all ranks' parameters."""

from __future__ import annotations

import itertools

import numpy as np

from clcomm.base.flat_space.precision import BF16, FP16
from clcomm.base.host.bfloat16 import BFLOAT16, from_bfloat16, to_bfloat16
from clcomm.comm.communicator import Communicator
from clcomm.sync.agreement import require_agreement
from clcomm.sync.shared_space import SharedSpace

#: The labels under which the Communicator's stats count parameters and buffers.
PARAMETERS, BUFFERS = "parameters", "buffers"
#: Bytes of an array up to which it is copied to travel with others.
_SMALL = 1 << 20
#: What parameters stored in 16 bits are.
_STORED = {BF16: BFLOAT16, FP16: np.dtype(np.float16)}


def broadcast_parameters(comm: Communicator, space: SharedSpace, root: int) -> None:
    """Give every rank root's parameters in one broadcast, and then what else its model keeps; collective.

    Parameters of which each rank has a shard exist once, and stay as they are.

    MismatchError is raised on every rank where buffers or frozen parameters differ in name, shape or dtype.
    """
    if space.has_parameters:
        space.adapter.pull_parameters()
        comm.broadcast(space.arrays.params, root, label=PARAMETERS, nbytes=space.params_nbytes)
        space.adapter.push_parameters()
    state = dict(sorted(space.adapter.extra_state().items()))  # libraries list them in other orders
    lines = [f"{name} {array.shape} {array.dtype}" for name, array in state.items()]
    require_agreement(comm, "buffers and frozen parameters", lines, "build the same model on every rank")
    received = _broadcast(comm, state, root, PARAMETERS)
    if received and comm.rank != root:
        space.adapter.load_extra_state(received)


def average_parameters(comm: Communicator, space: SharedSpace) -> None:
    """Give every rank the mean of all ranks' parameters, in one all-reduce for each run of equal dtypes; collective.

    Parameters stored in 16 bits are averaged in float32 and rounded once.
    """
    space.adapter.pull_parameters()
    nbytes = space.precision.nbytes
    for bucket in space.layout.buckets(space.layout.span):
        dtype = np.dtype(_STORED.get(space.precision, bucket.dtype))
        values = space.arrays.params[nbytes(bucket.start) : nbytes(bucket.stop)].view(dtype)
        mean = values
        if dtype.itemsize == 2:  # whose sums, or a host's of bfloat16, would be rounded to 16 bits
            mean = from_bfloat16(values) if dtype == BFLOAT16 else values.astype(np.float32)
        comm.all_reduce(mean, "mean", label=PARAMETERS, nbytes=nbytes(bucket.nbytes))
        if mean is not values:
            values[:] = to_bfloat16(mean) if dtype == BFLOAT16 else mean
    space.adapter.push_parameters()


def broadcast_buffers(comm: Communicator, space: SharedSpace, root: int) -> None:
    """Give every rank root's buffers; collective where the model has any."""
    received = _broadcast(comm, dict(sorted(space.adapter.buffers().items())), root, BUFFERS)
    if received and comm.rank != root:
        space.adapter.load_buffers(received)


def _broadcast(comm: Communicator, state: dict[str, np.ndarray], root: int, label: str) -> dict[str, np.ndarray]:
    """Return root's arrays, of the same names, shapes and dtypes on every rank: small ones travel in one broadcast."""
    small = {name: array for name, array in state.items() if array.nbytes <= _SMALL}
    received = {name: comm.broadcast(array, root, label=label) for name, array in state.items() if name not in small}
    if not small:
        return received
    packed = np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in small.values()])
    comm.broadcast(packed, root, label=label)
    parts = np.split(packed, list(itertools.accumulate(array.nbytes for array in small.values()))[:-1])
    for (name, array), part in zip(small.items(), parts, strict=True):
        received[name] = part.copy().view(array.dtype).reshape(array.shape)  # aligned
    return received
