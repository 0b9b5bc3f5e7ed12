"""netcl's `nn`: layers whose first argument is a queue: a Device, or the OpenCL queue of `DeviceManager.default`."""

from __future__ import annotations

from clcomm.engine import nn
from clcomm.engine.functional import cross_entropy, mse_loss
from clcomm.engine.nn import Dropout, Flatten, MaxPool2d, Module, ReLU, Sequential, Sigmoid, Tanh
from clcomm.netcl.distributed.device_manager import device_of

__all__ = [
    "Conv2d",
    "Dropout",
    "Flatten",
    "Linear",
    "MaxPool2d",
    "Module",
    "ReLU",
    "Sequential",
    "Sigmoid",
    "Tanh",
    "cross_entropy",
    "mse_loss",
]


def Linear(queue: object, in_features: int, out_features: int, bias: bool = True) -> nn.Linear:
    """Return the engine's Linear on a device; None: on the default one."""
    return nn.Linear(in_features, out_features, bias, device=device_of(queue))


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
) -> nn.Conv2d:
    """Return the engine's Conv2d on a device; None: on the default one."""
    return nn.Conv2d(
        in_channels, out_channels, kernel_size, stride, pad, groups=groups, bias=bias, device=device_of(queue)
    )
