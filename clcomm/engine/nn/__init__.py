"""Layers, losses and the base class of models."""

from clcomm.engine.nn.init import Generator, manual_seed
from clcomm.engine.nn.layers import (
    AvgPool2d,
    Conv2d,
    Flatten,
    Linear,
    LogSoftmax,
    MaxPool2d,
    ReLU,
    Sigmoid,
    Softmax,
    Tanh,
)
from clcomm.engine.nn.losses import CrossEntropyLoss, MSELoss
from clcomm.engine.nn.module import Module
from clcomm.engine.nn.sequential import Sequential

__all__ = [
    "AvgPool2d",
    "Conv2d",
    "CrossEntropyLoss",
    "Flatten",
    "Generator",
    "Linear",
    "LogSoftmax",
    "MSELoss",
    "MaxPool2d",
    "Module",
    "ReLU",
    "Sequential",
    "Sigmoid",
    "Softmax",
    "Tanh",
    "manual_seed",
]
