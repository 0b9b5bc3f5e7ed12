"""Horovod's functions on models, optimizers and objects, and its SyncBatchNorm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from clcomm.base.errors import ArgumentError
from clcomm.horovod import world
from clcomm.horovod.calls import OperationCall, Sum, allreduce, call_of, refused_in_set, root_in, sources
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
        call_of(Broadcast, [*tensors.values()], process_set, PARAMETERS, root, [*tensors], in_place=True).run()


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


# --- Batch normalisation over all ranks' batches (S. Ioffe and C. Szegedy, 2015; Horovod's SyncBatchNorm). ---


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """BatchNorm with the mean and variance of all ranks' batches in training; arguments as for torch's BatchNorm2d.

    Its forward and backward are collective. Raises ValueError on every rank where all of them together have one value
    for each channel.
    """

    def _check_input_dim(self, values: torch.Tensor) -> None:
        if values.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {values.dim()}")

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the normalised values, (batch, channels, ...)."""
        self._check_input_dim(values)
        by_batch = self.training or not self.track_running_stats
        if not by_batch or world.size() == 1:
            return super().forward(values)
        axes = [axis for axis in range(values.dim()) if axis != 1]
        wide = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
        count = wide.new_full((1,), values.numel() // values.shape[1])
        totals = allreduce(torch.cat([count, wide.sum(axes)]), op=Sum, name="batch norm mean")
        count, mean = totals[0].detach(), totals[1:] / totals[0].detach()
        if count <= 1:
            raise ValueError(f"expected more than 1 value per channel when training, got input size {values.shape}")
        shape = [1, -1, *[1] * (values.dim() - 2)]
        centred = wide - mean.reshape(shape)
        variance = allreduce((centred * centred).sum(axes), op=Sum, name="batch norm variance") / count
        if self.training and self.track_running_stats:
            self._track(mean.detach(), variance.detach() * count / (count - 1))
        normal = (centred * torch.rsqrt(variance + self.eps).reshape(shape)).to(values.dtype)
        return normal if not self.affine else normal * self.weight.reshape(shape) + self.bias.reshape(shape)

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        assert self.num_batches_tracked is not None and self.running_mean is not None and self.running_var is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)
