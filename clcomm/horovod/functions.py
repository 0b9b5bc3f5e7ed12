"""Horovod's functions on models, optimizers and objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from clcomm.base.errors import ArgumentError
from clcomm.horovod.calls import OperationCall, like, refused_in_set, root_in, sources
from clcomm.horovod.operations import AllGatherObject, Broadcast, BroadcastObject
from clcomm.horovod.world import ProcessSet, global_process_set
from clcomm.sync.synchronizer import PARAMETERS

#: The label of copies of an optimizer's state.
_STATE = "optimizer state"


@refused_in_set
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
        given = list(tensors.values())
        own = sources(given, process_set, PARAMETERS)
        lines = [f"{name} {tuple(each.shape)} {each.dtype}" for name, each in tensors.items()]
        operation = Broadcast(own, PARAMETERS, root, lines)
        OperationCall(process_set, operation, like(given, process_set, PARAMETERS, in_place=True)).run()


@refused_in_set
def broadcast_optimizer_state(
    optimizer: Any, root_rank: int, model: Any = None, process_set: ProcessSet = global_process_set
) -> None:
    """Give every rank root's optimizer state and settings, such as the learning rate; collective.

    model: not needed. Raises ArgumentError for L-BFGS, as Horovod does.
    """
    if isinstance(optimizer, torch.optim.LBFGS) or not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            "optimizer: expected a torch.optim.Optimizer other than L-BFGS, whose state is no dictionary of tensors, "
            f"got {type(optimizer).__name__}"
        )
    is_root = process_set.rank() == root_in(process_set, root_rank)
    own = _on_host(optimizer.state_dict(), process_set) if is_root else None
    state = broadcast_object(own, root_rank, process_set=process_set)
    if not is_root:
        optimizer.load_state_dict(state)


def _on_host(state: Any, process_set: ProcessSet) -> Any:
    """Return a state with tensors on the host, which a rank without root's device can unpickle."""
    if isinstance(state, torch.Tensor):
        return sources([state], process_set, _STATE)[0]
    if isinstance(state, dict):
        return {key: _on_host(value, process_set) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_on_host(each, process_set) for each in state)
    return state


@refused_in_set
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


@refused_in_set
def allgather_object(obj: object, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return every rank's object, in rank order; they are pickled. Collective."""
    return OperationCall(process_set, AllGatherObject(obj, name or ""), lambda found: found).run()
