"""netcl's names over this package's engine: a program has only to import `clcomm.netcl` instead of `netcl`.

That is for its documented data-parallel training on several devices of a process (docs/several-devices.md); with
netcl's own kernels, and ranks, see `clcomm.sync.adapters.netcl`. netcl's modules, such as
`clcomm.netcl.distributed`, are this one by their own names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import clcomm.parallel.devices as on_devices
from clcomm.base.errors import ArgumentError
from clcomm.engine import nn as layers
from clcomm.engine.device import Device, default_device, process_devices
from clcomm.engine.functional import cross_entropy, mse_loss, relu
from clcomm.engine.nn import Dropout, Flatten, MaxPool2d, Module, ReLU, Sequential, Sigmoid, Tanh
from clcomm.engine.parameter import Parameter
from clcomm.engine.tensor import Tensor
from clcomm.optim import SGD, Adam, AdamW, Optimizer, RMSProp
from clcomm.parallel.devices import (
    Replicas,
    all_reduce,
    all_reduce_p2p,
    broadcast,
    gather,
    replicate_params,
    scatter,
    shard_batch,
    sync_grads,
)
from clcomm.sync.synchronizer import Synchronizer

__all__ = [
    "SGD", "Adam", "AdamW", "Conv2d", "DeviceManager", "Dropout", "Flatten", "Linear", "MaxPool2d", "Module", "RMSProp",
    "ReLU", "Sequential", "Sigmoid", "Tanh", "Tape", "all_reduce", "all_reduce_p2p", "broadcast",
    "broadcast_params", "cross_entropy", "data_parallel_step", "gather", "mse_loss", "prepare_replicas", "relu",
    "replicate_params", "scatter", "shard_batch", "sync_grads", "tensor",
]  # fmt: skip


# --- devices ---


class DeviceManager(on_devices.DeviceManager):
    """clcomm's DeviceManager with netcl's `default`."""

    @staticmethod
    def default(device: str | None = "auto") -> Device:
        """Return the process's device: the same one at each call with a name.

        device: a name as for `Device.select`; "auto" or None: NETCL_DEVICE's or CLCOMM_DEVICE's, else the rank's own,
        on which layers without a queue lie. Raises DeviceError if no device fits.
        """
        if device is None or device == "auto":
            return default_device()
        by_name = process_devices().by_name
        if device not in by_name:
            own, found = default_device(), Device.select(device)
            by_name[device] = own if own.cl_device == found.cl_device else found
        return by_name[device]


def _device_of(queue: object) -> Any:
    """Return the Device with this OpenCL queue, of those that `default` returned; anything else as it is."""
    if queue is None or isinstance(queue, Device):
        return queue
    known = (*process_devices().by_name.values(), default_device())
    return next((each for each in known if each.queue is queue), queue)


# --- autograd and layers: the engine records operations by itself, so a tape has nothing to keep ---


def tensor(data: object, requires_grad: bool = False) -> Tensor:
    """Return a tensor whose gradient `Tape.backward` computes if asked, of an array or of a tensor as it is."""
    found = data if isinstance(data, Tensor) else Tensor(data)
    if requires_grad:
        found.requires_grad = True
    return found


class Tape:
    """A block whose operations `backward` differentiates."""

    def __enter__(self) -> Tape:
        return self

    def __exit__(self, *exception: object) -> None:
        """End the block; nothing was to be recorded here."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss to the parameters'."""
        loss.backward()


def Linear(queue: object, in_features: int, out_features: int, bias: bool = True) -> layers.Linear:
    """Return the engine's Linear on a device; None: on the default one."""
    return layers.Linear(in_features, out_features, bias, device=_device_of(queue))


def Conv2d(
    queue: object,
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    stride: int = 1,
    pad: int = 0,
    bias: bool = True,
    *,
    groups: int = 1,
) -> layers.Conv2d:
    """Return the engine's Conv2d on a device; None: on the default one."""
    return layers.Conv2d(
        in_channels, out_channels, kernel_size, stride, pad, groups=groups, bias=bias, device=_device_of(queue)
    )


# --- training on several devices: with lists, as clcomm.parallel.devices has it, and with a model and its loss ---


def prepare_replicas(
    params: Any,
    opt: Any,
    synchronizer: Synchronizer | None = None,
    *,
    n_replicas: int | None = None,
    devices: Sequence[Device | str] | None = None,
) -> Replicas:
    """Copy a model to several devices, each with an optimizer like the model's; or as `clcomm.parallel.devices` has it.

    Args:
        params: the model.
        opt: the optimizer of its parameters, before the first step. Queues: `clcomm.parallel.devices.prepare_replicas`.
        synchronizer: as there.
        n_replicas: the number of devices; None: of all of `devices`.
        devices: as DeviceManager takes them, the model's first; None: those of this process.

    Raises:
        ArgumentError: no model, other numbers of devices, a model that is not on the first, an optimizer that has
            made steps, or queues together with the last two arguments.
    """
    if not isinstance(opt, Optimizer):
        if n_replicas is not None or devices is not None:
            raise ArgumentError(f"opt: expected an optimizer with n_replicas or devices, got {type(opt).__name__}")
        return on_devices.prepare_replicas(params, opt, synchronizer)
    if not isinstance(params, Module):
        raise ArgumentError(f"params: expected the model with an optimizer, got {type(params).__name__}")
    replicas = on_devices.prepare_replicas(params, _queues(params, n_replicas, devices), synchronizer)
    others = [dict(zip(replicas[0], copies, strict=True)) for copies in replicas[1:]]
    replicas.optimizers = [opt, *(opt.like_this(copies) for copies in others)]
    return replicas


def data_parallel_step(
    *arguments: Any,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    tape_factory: Callable[[], AbstractContextManager[object]] = nullcontext,
    **hooks: Any,
) -> float:
    """Train one step and return the mean loss.

    Args:
        arguments: replicas with optimizers, and a batch whose last array has the targets; the model takes the others.
            Without `loss_fn`: those of `clcomm.parallel.devices.data_parallel_step`.
        loss_fn: (outputs, targets) -> the mean loss.
        tape_factory: makes the block in which a device computes it, such as `autograd.Tape`.
        hooks: the further arguments of `clcomm.parallel.devices.data_parallel_step`.

    Raises ArgumentError as that does, and for replicas without optimizers.
    """
    if loss_fn is None:
        return on_devices.data_parallel_step(*arguments, **hooks)
    if len(arguments) != 2:
        raise ArgumentError(f"data_parallel_step: expected replicas and a batch with loss_fn, got {len(arguments)}")
    replicas, batch = Replicas.checked(arguments[0]), arguments[1]
    if replicas.optimizers is None or replicas.model is None:
        raise ArgumentError("replicas: expected optimizers with loss_fn, got none; call prepare_replicas(model, opt)")
    forward = _Forward(replicas.model, loss_fn, tape_factory)
    return on_devices.data_parallel_step(forward, replicas, replicas.optimizers, batch, **hooks)


def broadcast_params(
    src_params: Any, dst_param_groups: Sequence[Sequence[Parameter]] | None = None, root: int = 0
) -> None:
    """Give all replicas those of replica `root`; with two arguments as `clcomm.parallel.devices.broadcast_params`."""
    if dst_param_groups is None:
        on_devices.broadcast_params(None, Replicas.checked(src_params), root)
    else:
        on_devices.broadcast_params(src_params, dst_param_groups, root)


@dataclass(frozen=True)
class _Forward:
    """Computes a shard's loss and its tape; equal ones are one function to a recorded step."""

    model: Module
    loss_fn: Callable[[Any, Any], Any]
    tape_factory: Callable[[], AbstractContextManager[object]]

    def __call__(self, device: Device, *arguments: object) -> Any:
        *inputs, targets, _ = arguments
        with self.tape_factory() as tape:
            loss = self.loss_fn(self.model(*inputs), targets)
        return loss if tape is None else (loss, tape)


def _queues(model: Module, count: int | None, devices: Sequence[Device | str] | None) -> list[Device]:
    """Return the replicas' devices: the model's own in place of one that is the same to OpenCL, as the first."""
    found = DeviceManager(devices).get_queues()
    if count is not None and (count > len(found) or (devices is not None and count != len(found))):
        raise ArgumentError(
            f"n_replicas: expected {len(found)}, the number of devices, got {count!r}; a name given several times in "
            'devices makes several queues on that device, as ["cpu:0", "cpu:0"] does'
        )
    own = next(iter(model.parameters())).device
    same = next((at for at, each in enumerate(found) if each.cl_device == own.cl_device), None)
    if same != 0:
        raise ArgumentError(f"devices[0]: expected the model's, {own}, got {found[0]}; build the model on devices[0]")
    return [own, *found[1:count]]


if os.environ.get("NETCL_DEVICE"):  # netcl's name of the variable
    os.environ.setdefault("CLCOMM_DEVICE", os.environ["NETCL_DEVICE"])

for _name in ("autograd", "nn", "optim", "distributed", "distributed.collectives", "distributed.data_parallel",
              "distributed.device_manager", "distributed.trainer"):  # fmt: skip
    sys.modules[f"{__name__}.{_name}"] = globals()[_name.rpartition(".")[2]] = sys.modules[__name__]
