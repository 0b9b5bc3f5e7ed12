"""A Synchronizer's replicas: given to all ranks, averaged and compared, so that they start alike and stay alike."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.parameters import BF16, FP16
from clcomm.base.host.arrays import BFLOAT16, from_bfloat16, to_bfloat16
from clcomm.comm.communicator import Communicator
from clcomm.comm.stats.events import count_step
from clcomm.sync.agreement import CHECKS, refused, require_agreement
from clcomm.sync.divergence import is_due
from clcomm.sync.model_ranks import ModelRanks, is_divided, refuse_mixing
from clcomm.sync.model_sync import ModelSync
from clcomm.sync.shared_space import SharedSpace

if TYPE_CHECKING:
    from clcomm.sync.policies.policy import LocalSteps

_log = logging.getLogger("clcomm")


def broadcast(ours: ModelSync, root: int) -> None:
    """See `Synchronizer.broadcast_parameters`."""
    ours.require_unchanged()
    broadcast_parameters(ours.comm, ours.space, root)
    ours.models.guard.require_alike(ours.space)
    ours.is_alike, ours.local_steps = True, None  # a policy starts from these
    if ours.sharded_update is not None:
        ours.sharded_update.shard(ours.space)


def broadcast_buffers(ours: ModelSync, root: int) -> None:
    """See `Synchronizer.broadcast_buffers`."""
    ours.require_unchanged()
    received = _broadcast(ours.comm, dict(sorted(ours.space.adapter.buffers().items())), root, BUFFERS)
    if received and ours.comm.rank != root:
        ours.space.adapter.load_buffers(received)
    if ours.sharded_steps is not None:
        ours.sharded_steps.start_over()


@refused
def average(ours: ModelSync) -> None:
    """See `Synchronizer.average_parameters`."""
    ours.require_unchanged()
    if ours.sharded_update is not None:
        raise ArgumentError(
            "average_parameters: expected a model without a DistributedOptimizer, which keeps the parameters alike "
            "in each step, got one with it"
        )
    ours.models.refuse("average_parameters: expected no call")
    if ours.models.in_join or ours.expected_weight is not None:
        call = "join() around it" if ours.models.in_join else "expect_samples() before it"
        raise ArgumentError(f"average_parameters: expected no {call}, as all ranks' parameters count alike, got one")
    refuse_mixing(ours.space, "average_parameters", "whose backward adds up gradients of ranks that differ")
    average_parameters(ours.comm, ours.space)


# --- comparisons ---


def check(ours: ModelSync, *, repairs: bool = False, with_frozen: bool = False, with_state: bool = False) -> None:
    """See `Synchronizer.check_replicas`.

    Args:
        repairs: whatever `on_divergence` says, make the replicas alike.
        with_frozen, with_state: compare frozen parameters, or the attached optimizer's state, too.
    """
    if ours.local_steps is not None:
        return  # ranks differ between a policy's outer steps
    if ours.sharded_update is not None:
        ours.sharded_update.require_same_settings()
    ours.models.guard.check(ours.space, partial(broadcast, ours), with_frozen, with_state, repairs)


def check_start(ours: ModelSync) -> None:
    """Compare the replicas before a model's first synchronisation, unless they are to differ; collective."""
    # Of a model whose gradients were reduced in backward, broadcast_parameters has divided the replicas.
    if ours.settings.check_start and ours.space.arrays.grads.size:
        ours.models.guard.check_start(ours.space, partial(broadcast, ours))
        if ours.shard_mean is None:
            _expect_gradients(ours)
    ours.has_started = True


def compare_settings(ours: ModelSync) -> None:
    """Compare what optimizers step with where that is new, unless ranks have those of several libraries."""
    if (new := ours.space.adapter.new_settings()) and not ours.space.has_several_libraries:
        ours.stepped_with.compare(ours.comm, new)


def _expect_gradients(ours: ModelSync) -> None:
    """Log a warning where no rank has a gradient; collective."""
    counts = ours.comm.all_gather(np.array([ours.space.adapter.has_gradients()], np.uint8), label=CHECKS)
    if not counts.any() and ours.comm.rank == 0:
        _log.warning("sync_gradients: expected gradients, got none on any rank; call loss.backward() before it")


def count_synchronisation(ours: ModelSync) -> None:
    """Note that a model's gradients were averaged, and compare the replicas where that is due."""
    ours.count_synchronisation()
    _count_step(ours)
    every, is_mixed = ours.models.guard.every, ours.space.is_mixed
    if (every or is_mixed) and is_due(ours.synchronisations, every, is_mixed):
        check(ours, repairs=not every)


def _count_step(ours: ModelSync) -> None:
    if count_step(id(ours)):
        ours.comm.stats.steps.averaged(ours.comm.communicated(), ours.comm.stats.state)


# --- Parameters, buffers and frozen parameters of one rank sent to all, and the mean of all ranks' parameters. ---

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


# --- Steps of a policy: ranks average no gradients, and exchange parameters after the steps that are due. ---


@refused
def gradients_ready(ours: ModelSync, is_weighted: bool) -> None:
    """Note that a step's gradients are complete, which this rank's optimizer uses as they are.

    Raises ArgumentError where they are to be weighed, and where `finish_step` has not followed the step before.
    """
    if is_weighted or ours.models.in_join:
        ours.models.refuse("samples: expected None")
    ours.require_unchanged()
    if ours.local_steps is None:
        refuse_mixing(ours.space, "policy", "whose backward adds up gradients of ranks that differ")
        if is_divided(ours.space) or ModelRanks.of(ours.space).stages is not None:
            raise ArgumentError(
                "policy: expected a model that each rank has whole, as codes and clipping look at a rank's numbers "
                "alone, got one that tensor-parallel ranks or stages divide"
            )
        if not ours.has_started:
            check_start(ours)
        _start(ours)
    elif ours.is_in_step:
        raise ArgumentError(
            "sync_gradients: expected finish_step(model) after the optimizer's step, which the policy counts, got "
            "two steps without it"
        )
    ours.is_in_step = True


@refused
def finish_step(ours: ModelSync) -> None:
    """Take the outer step that is due after the optimizer's; collective then. Raises ArgumentError before any."""
    if ours.local_steps is None:
        raise ArgumentError("finish_step: expected sync_gradients(model) before it, as in every step, got none")
    ours.require_unchanged()
    ours.is_in_step = False
    ours.local_steps.step_finished()
    _count_step(ours)


def align(ours: ModelSync) -> None:
    """See `Synchronizer.align_parameters`."""
    if ours.local_steps is not None:
        ours.require_unchanged()
        ours.local_steps.align()


@refused
def load_local_steps(ours: ModelSync, state: Mapping[str, np.ndarray]) -> None:
    """Go on from a `saved_state`; collective. Raises ArgumentError, changing nothing, for another model's."""
    if state:
        (ours.local_steps or _start(ours)).load_state(state)


def _start(ours: ModelSync) -> LocalSteps:
    from clcomm.sync.policies.policy import ModelParameters  # here, as most programs have no policy

    space, policy = ours.space, ours.settings.policy
    assert policy is not None
    parameters = ModelParameters(
        space.layout, lambda: space.arrays.params, space.adapter.pull_parameters, space.adapter.push_parameters
    )
    ours.local_steps = steps = policy.start(ours.comm, parameters)
    return steps
