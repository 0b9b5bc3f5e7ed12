"""Horovod's functions on models, optimizers and objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from clcomm.errors import ArgumentError
from clcomm.horovod.calls import OperationCall, like, root_in
from clcomm.horovod.operations import AllGatherObject, Broadcast, BroadcastObject
from clcomm.horovod.world import ProcessSet, global_process_set
from clcomm.synchronizer import PARAMETERS
from clcomm.tensors.arrays import on_host


def broadcast_parameters(params: object, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Give every rank root's tensors, in one broadcast for each dtype; collective.

    params: model.state_dict(), model.named_parameters() or model.parameters(); entries that are no tensors are left
    as they are. Raises MismatchError on every rank where names, shapes or dtypes differ.
    """
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (torch.Tensor, str)):
        pairs = [each if isinstance(each, tuple) else (str(index), each) for index, each in enumerate(params)]
    else:
        raise ArgumentError(f"params: expected a state_dict or parameters, got {type(params).__name__}")
    tensors = {name: each for name, each in pairs if isinstance(each, torch.Tensor)}
    root = root_in(process_set, root_rank)

    if tensors:
        lines = [f"{name} {tuple(each.shape)} {each.dtype}" for name, each in tensors.items()]
        sources = [on_host(each) for each in tensors.values()]
        change = like(list(tensors.values()), in_place=True)
        OperationCall(process_set, Broadcast(sources, PARAMETERS, root, lines), change).run()


def broadcast_optimizer_state(
    optimizer: Any, root_rank: int, model: Any = None, process_set: ProcessSet = global_process_set
) -> None:
    """Give every rank root's optimizer state and settings, such as the learning rate; collective.

    model: not needed. Raises ArgumentError for L-BFGS, as Horovod does.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ArgumentError("optimizer: expected another than L-BFGS, whose state is no dictionary of tensors")
    own = optimizer.state_dict()
    state = broadcast_object(own, root_rank, process_set=process_set)
    if process_set.rank() != root_in(process_set, root_rank):
        optimizer.load_state_dict(state)


def broadcast_object(
    obj: object, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return root's object on every rank; it is pickled. Collective."""
    root = root_in(process_set, root_rank)
    return OperationCall(process_set, BroadcastObject(obj, root, name or ""), lambda found: found).run()


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Return `broadcast_object` with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, name, process_set)


def allgather_object(obj: object, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return every rank's object, in rank order; they are pickled. Collective."""
    return OperationCall(process_set, AllGatherObject(obj, name or ""), lambda found: found).run()
