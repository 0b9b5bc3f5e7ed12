"""The native engine: tensors, automatic differentiation and modules on OpenCL devices."""

from clcomm.engine import functional, nn
from clcomm.engine.autograd import Op, no_grad
from clcomm.engine.capture import Replay
from clcomm.engine.device import Device, default_device, set_default_device
from clcomm.engine.flat import FlatSpace
from clcomm.engine.nn import (
    AvgPool2d,
    Conv2d,
    CrossEntropyLoss,
    Flatten,
    Generator,
    Linear,
    LogSoftmax,
    MaxPool2d,
    Module,
    MSELoss,
    ReLU,
    Sequential,
    Sigmoid,
    Softmax,
    Tanh,
    manual_seed,
)
from clcomm.engine.tensor import Parameter, Tensor
from clcomm.engine.timing import measure_overhead
from clcomm.errors import ArgumentError, DeviceError

__all__ = [
    "ArgumentError",
    "AvgPool2d",
    "Conv2d",
    "CrossEntropyLoss",
    "Device",
    "DeviceError",
    "FlatSpace",
    "Flatten",
    "Generator",
    "Linear",
    "LogSoftmax",
    "MSELoss",
    "MaxPool2d",
    "Module",
    "Op",
    "Parameter",
    "ReLU",
    "Replay",
    "Sequential",
    "Sigmoid",
    "Softmax",
    "Tanh",
    "Tensor",
    "default_device",
    "functional",
    "manual_seed",
    "measure_overhead",
    "nn",
    "no_grad",
    "set_default_device",
]
