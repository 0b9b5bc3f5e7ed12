"""Gradient clipping by the norm of all gradients together: PyTorch's formula, on the averaged gradients.

Each rank sums the squares of a part, in float64, and the parts are added in rank order: all ranks get the same bits,
whatever the bucket size and the transport, and with a sharded update the same as without.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.buckets import Bucket
from clcomm.base.flat_space.layout import FlatLayout, shard_bounds
from clcomm.base.host.arrays import hash_words
from clcomm.comm.communicator import Communicator
from clcomm.sync.model_ranks import ModelRanks

if TYPE_CHECKING:
    from clcomm.engine.parameter import Parameter, Stages
    from clcomm.sync.logical_shards import LogicalShards
    from clcomm.sync.model_ranks import ShardedUpdate
    from clcomm.sync.shared_space import SharedSpace
    from clcomm.sync.synchronizer import Synchronizer

#: The name of clipping as a phase, the label of what it communicates, and the part of a step that it is.
CLIPPING = "clipping"
_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def clip_grad_norm(sync: Synchronizer, model: object, max_norm: float) -> float:
    """Scale a model's averaged gradients so that their norm is at most `max_norm`, and return the norm before.

    Call it on every rank between `sync_gradients` and the optimizer's step. The norm is the 2-norm of all gradients
    as one vector; where it is NaN or Inf the gradients are not finite afterwards either, as in PyTorch. With a sharded
    update this call averages the gradients, and `step` uses the clipped ones. Of a model that tensor-parallel ranks
    divide, or the stages of a pipeline, the gradients of all ranks count, and a parameter that several have once.

    The formula is that of torch.nn.utils.clip_grad_norm_: gradients times max_norm / (norm + 1e-6), if that is below 1.

    Args:
        sync: the Synchronizer of the model.
        model: the model whose gradients are clipped.
        max_norm: the largest norm, above 0.

    Raises ArgumentError for a `max_norm` that is not above 0.
    """
    check_max_norm(max_norm)
    sync.models.refuse("clip_grad_norm: expected clcomm.engine.nn.utils.clip_grad_norm_")
    ours = sync.models.of(model)
    return clip_averaged(sync.comm, ours.space, ours.sharded_update, max_norm, sync.shards)


def check_max_norm(max_norm: float) -> None:
    """Raise ArgumentError unless it is a number above 0."""
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)) or not 0 < max_norm < math.inf:
        raise ArgumentError(f"max_norm: expected a number above 0, got {max_norm!r}")


def clip_averaged(
    comm: Communicator, space: SharedSpace, sharded: ShardedUpdate | None, max_norm: float,
    shards: LogicalShards | None = None,
) -> float:  # fmt: skip
    """Clip a model's averaged gradients, with a sharded update its; return the norm before. Collective.

    shards: into how many parts the gradients are cut, on any number of ranks; None: into one of each rank.
    """
    if sharded is not None:
        return sharded.clip_grad_norm(max_norm)
    if shards is None:
        part, written = averaged_part(comm, space)
        norm = global_norm(comm, space, named_parts(space.layout, part, comm.rank * space.shard_nbytes))
    else:
        gradients, written = _averaged(comm, space)
        norm = norm_of_shards(comm, space, shards, gradients)
    coefficient = clip_coefficient(norm, max_norm)
    if coefficient != 1.0:
        scale_averaged(comm, space, coefficient, written)
    return norm


def clip_own(parameters: Mapping[str, Parameter], stages: Stages, max_norm: float) -> float:
    """Clip gradients that no Synchronizer averages, of a stage's parameters, if it has any; return the norm before."""
    ranks = ModelRanks(parameters)
    ranks.stages = stages
    gradients = {name: each.grad for name, each in parameters.items()}
    values = {name: each.numpy() for name, each in gradients.items() if each is not None}
    norm = ranks.norm(ranks.own_squares((name, each.reshape(-1)) for name, each in values.items()).tolist())
    coefficient = clip_coefficient(norm, max_norm)
    for name, gradient in gradients.items() if coefficient != 1.0 else ():
        if gradient is not None:
            gradient.copy_from(values[name] * np.float32(coefficient))
    return norm


def global_norm(comm: Communicator, space: SharedSpace, parts: Iterable[tuple[str, np.ndarray]]) -> float:
    """Return the norm of a model's gradients together, the same bits on every rank; collective.

    Args:
        comm: the ranks that each have a part of the flat space.
        parts: what this rank has of each parameter's gradient, by name.
    """
    model = ModelRanks.of(space)
    sums = model.own_squares(parts)
    return model.norm([math.fsum(column) for column in comm.all_gather(sums, label=CLIPPING).T])


def norm_of_shards(comm: Communicator, space: SharedSpace, shards: LogicalShards, gradients: np.ndarray) -> float:
    """Return the norm of a model's averaged gradients from the sums of as many parts as there are shards; collective.

    gradients: bytes of the whole flat space, of which each rank sums the parts that its shards are numbered by.
    """
    model, layout = ModelRanks.of(space), space.layout
    bounds = shard_bounds(layout.span, shards.count, layout.alignment)
    sums = np.zeros((shards.count, 2))
    for shard in shards.own:
        start, stop = bounds[shard], bounds[shard + 1]
        sums[shard] = model.own_squares(named_parts(layout, gradients[start:stop], start))
    everyone = comm.all_reduce(sums, label=CLIPPING)  # to each sum the other ranks add zeros
    return model.norm([math.fsum(column) for column in everyone.T])


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Return the factor for gradients of this norm; 1.0: they stay unchanged."""
    coefficient = max_norm / (norm + _EPS)
    return 1.0 if coefficient >= 1 else coefficient


def scale(part: np.ndarray, coefficient: float) -> None:
    """Multiply an array by the coefficient, rounded to the array's dtype, in place."""
    with np.errstate(invalid="ignore"):  # Inf times 0 is NaN on purpose
        part *= part.dtype.type(coefficient)


def named_parts(layout: FlatLayout, part: np.ndarray, start: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the elements of each parameter in `part`, in its dtype, complex numbers as pairs of reals.

    part: bytes of the flat space, beginning at `start`.
    """
    for place in layout.ranges:
        first, last = max(place.start - start, 0), min(place.stop - start, part.size)
        if first < last:
            yield place.name, part[first:last].view(np.empty(0, place.dtype).real.dtype)


def averaged_part(comm: Communicator, space: SharedSpace) -> tuple[np.ndarray, Sequence[str]]:
    """Return this rank's shard of the averaged gradients, and the names of those that the program has changed since.

    Raises ArgumentError, on every rank, where the changed ones differ between ranks, as they have not been averaged.
    """
    gradients, written = _averaged(comm, space)
    start = comm.rank * space.shard_nbytes
    return gradients[start : start + space.shard_nbytes], written


def _averaged(comm: Communicator, space: SharedSpace) -> tuple[np.ndarray, Sequence[str]]:
    """Return the averaged gradients as they are now, and the names of those that the program has changed; see above."""
    written = space.adapter.pull_written()
    if space.padded.reduced is space.padded.grads:
        written = ()  # one rank: its own gradients are the averaged ones
    gradients = _current(space, written)
    if written:
        _require_alike(comm, gradients)
    return gradients, written


def scale_averaged(comm: Communicator, space: SharedSpace, coefficient: float, written: Sequence[str]) -> None:
    """Multiply all averaged gradients by the coefficient; written: as `averaged_part` returns it. Collective."""
    _scale_all(comm, space, coefficient)
    _scale_written(space, written, coefficient)


def _current(space: SharedSpace, written: Iterable[str]) -> np.ndarray:
    """Return the averaged gradients, those in `written` replaced by this rank's."""
    gradients = space.arrays.reduced
    if written:
        gradients = gradients.copy()
        for name in written:
            space.layout.view(gradients, name)[...] = space.layout.view(space.arrays.grads, name)
    return gradients


def _require_alike(comm: Communicator, gradients: np.ndarray) -> None:
    hashes = comm.all_gather(np.array([hash_words(gradients)], np.uint64), label=CLIPPING)[:, 0]
    others = np.flatnonzero(hashes != hashes[0])
    if others.size:
        raise ArgumentError(
            "gradients: expected sync_gradients() after the last backward, or the same changes of the averages on "
            f"every rank, got others on rank {others[0]} than on rank 0"
        )


def _scale_written(space: SharedSpace, written: Sequence[str], coefficient: float) -> None:
    """Scale gradients that the program has changed since they were averaged."""
    for name in written:
        gradient = space.layout.view(space.arrays.grads, name)
        scale(gradient.view(gradient.real.dtype), coefficient)
    if written:
        space.adapter.push_written(written)


def _scale_all(comm: Communicator, space: SharedSpace, coefficient: float) -> None:
    """Scale the averaged gradients; where a host's ranks share their memory, each rank scales a part."""
    start, stop = 0, space.layout.span
    shared = comm.is_common_on_host(space.arrays.reduced)
    if shared:
        bounds = shard_bounds(stop, comm.local_size, space.layout.alignment)
        start, stop = bounds[comm.local_rank], bounds[comm.local_rank + 1]
    for _, part in named_parts(space.layout, space.arrays.reduced[start:stop], start):
        scale(part, coefficient)
    if shared:
        comm.barrier()
    space.adapter.push_gradients(Bucket(0, space.layout.ranges, 0, space.layout.span))
