"""A data-parallel training step on several devices of one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.device import Device
from clcomm.engine.grad_slot import NONE
from clcomm.engine.parameter import Parameter
from clcomm.engine.replay import Replay
from clcomm.engine.tensor import Tensor
from clcomm.parallel.devices.replicas import Replicas, sync_grads

#: Computes the loss of a shard: (device, each array of the shard, parameters) -> the loss, or (loss, tape).
ForwardFn = Callable[..., Any]


def shard_batch(x: Any, num_shards: int, sizes: Sequence[int] | None = None) -> list[Any]:
    """Cut an array along axis 0 into parts of equal length, the first ones longer by one if they must be.

    sizes: the parts' lengths, which may be zero; None: equal ones. Raises ArgumentError for fewer elements than parts,
    and for `sizes` that do not add up to the length.
    """
    sizes = _sizes(len(x), num_shards, sizes)
    ends = np.cumsum(sizes).tolist()
    return [x[stop - size : stop] for size, stop in zip(sizes, ends, strict=True)]


def data_parallel_step(
    forward_fn: ForwardFn,
    param_replicas: Replicas,
    optimizers: Sequence[Any],
    batch: Sequence[Any],
    *,
    sizes: Sequence[int] | None = None,
    replay: bool = False,
    pre_shard_hook: Callable[..., object] | None = None,
    post_sync_hook: Callable[[Replicas], object] | None = None,
    post_step_hook: Callable[[int], object] | None = None,
) -> float:
    """Train one step with a shard of the batch on each device, and return the mean loss of this rank's samples.

    The gradients are averaged over all samples of all devices, and of all ranks where the replicas have a synchronizer.
    Within `forward_fn` the model's parameters are those of its device. Devices compute at the same time where their
    queues do; each optimizer's step follows, and every replica ends with the same bits.

    Args:
        forward_fn: called as forward_fn(device, *shards, params), with a Tensor on the device for each array of the
            batch; returns the mean loss of the shard, or netcl's pair of loss and tape.
        param_replicas: what `prepare_replicas` returned.
        optimizers: one for each device's parameters.
        batch: arrays of equal length, such as (images, labels).
        sizes: how many samples each device gets; 0: it computes nothing. None: equal shards.
        replay: record what each device queues in forward and backward, and queue it again in later steps with shards of
            equal shapes, as `Replay` does; `forward_fn` is then one function in all steps, and runs in few of them.
        pre_shard_hook: called with the arrays of the batch, first.
        post_sync_hook: called with `param_replicas` once gradients are averaged.
        post_step_hook: called with each device's index after its optimizer's step.

    Raises:
        ArgumentError: numbers of optimizers, samples or sizes that do not fit, or a result that is no loss.
    """
    replicas = Replicas.checked(param_replicas)
    if len(optimizers) != len(replicas):
        raise ArgumentError(f"optimizers: expected one for each of {len(replicas)} devices, got {len(optimizers)}")
    replicas.require_unchanged()
    sizes = _sizes(_length(batch), len(replicas), sizes)
    if pre_shard_hook is not None:
        pre_shard_hook(*batch)
    shards = list(zip(*(shard_batch(array, len(replicas), sizes) for array in batch), strict=True))
    losses = [_backward(forward_fn, replicas, index, shards[index], replay) for index, size in enumerate(sizes) if size]
    sync_grads(replicas, sizes)
    if post_sync_hook is not None:
        post_sync_hook(replicas)
    for index, optimizer in enumerate(optimizers):
        optimizer.step()
        optimizer.zero_grad()
        if post_step_hook is not None:
            post_step_hook(index)
    if replicas.is_mixed:
        replicas.copy_first()
    terms = zip(losses, filter(None, sizes), strict=True)
    return sum(loss.item() * size for loss, size in terms) / sum(sizes) if losses else math.nan


def _backward(forward_fn: ForwardFn, replicas: Replicas, index: int, arrays: Sequence[object], replay: bool) -> Tensor:
    """Queue a device's forward and backward, and return its loss."""
    device = replicas.devices[index]
    shard = [Tensor(array, device, copy=False) for array in arrays]
    run = _recorded(forward_fn, replicas, index) if replay else _forward_backward(forward_fn, device, replicas[0])
    with replicas.standing_in(index):
        loss = run(*shard)
    assert isinstance(loss, Tensor)
    if all(slot.state == NONE for slot in replicas.spaces[index].slots):
        raise ArgumentError(
            f"forward_fn: expected a loss of the parameters of param_replicas, got one whose backward left none of "
            f"device {index}'s a gradient; prepare_replicas takes those of the model that forward_fn uses"
        )
    device.queue.flush()
    return loss.detach()


def _forward_backward(forward_fn: ForwardFn, device: Device, params: list[Parameter]) -> Callable[..., Tensor]:
    """Return a function that runs forward and backward of a shard on a device, and returns the loss."""

    def forward_backward(*shard: Tensor) -> Tensor:
        result = forward_fn(device, *shard, params)
        loss, tape = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"shape {loss.shape}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ArgumentError(f"forward_fn: expected a loss of one element, or (loss, tape), got {got}")
        if loss.device is not device:
            raise ArgumentError(f"forward_fn: expected a loss on its device, {device}, got one on {loss.device}")
        if tape is None:
            loss.backward()
        else:
            tape.backward(loss)
        return loss

    return forward_backward


def _recorded(forward_fn: ForwardFn, replicas: Replicas, index: int) -> Replay:
    """Return the Replay of a function's steps on a device."""
    function, replay = replicas.recorded.get(index, (None, None))
    if replay is None or function != forward_fn:
        replay = Replay(_forward_backward(forward_fn, replicas.devices[index], replicas[0]))
        replicas.recorded[index] = forward_fn, replay
    return replay


def _length(batch: Sequence[object]) -> int:
    """Return the number of samples; ArgumentError unless all arrays have as many."""
    if not isinstance(batch, (tuple, list)) or not batch:
        raise ArgumentError(f"batch: expected arrays such as (images, labels), got {type(batch).__name__}")
    lengths = [len(array) for array in batch]
    if len(set(lengths)) > 1:
        raise ArgumentError(f"batch: expected arrays of equal length, got {' and '.join(map(str, lengths))}")
    return lengths[0]


def _sizes(length: int, count: int, sizes: Sequence[int] | None) -> list[int]:
    """Return the number of samples of each of `count` devices; ArgumentError where they do not fit."""
    if sizes is None:
        if length < count:
            raise ArgumentError(
                f"batch: expected at least {count} samples, one for each device, got {length}; sizes= can leave "
                "devices without any"
            )
        return [length // count + (index < length % count) for index in range(count)]
    found = list(sizes)
    fits = len(found) == count and all(isinstance(each, (int, np.integer)) and each >= 0 for each in found)
    if not fits or sum(found) != length:
        raise ArgumentError(f"sizes: expected {count} numbers from 0 up that add up to {length} samples, got {found}")
    return [int(each) for each in found]
