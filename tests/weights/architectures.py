"""Architectures of the engine's layers, each beside the same one of PyTorch's."""

from __future__ import annotations

from clcomm.engine import (
    AvgPool2d,
    Conv2d,
    Flatten,
    Linear,
    LogSoftmax,
    MaxPool2d,
    ReLU,
    Sequential,
    Sigmoid,
    Softmax,
    Tanh,
)

#: By name: the shape of a sample, and the layers as (name, arguments).
ARCHITECTURES = {
    "linear": ((5,), [("Linear", 5, 3)]),
    "without bias": ((5,), [("Linear", 5, 4, False), ("Tanh",), ("Linear", 4, 2)]),
    "perceptron": ((2, 3), [("Flatten",), ("Linear", 6, 7), ("ReLU",), ("Linear", 7, 7), ("Sigmoid",), ("Softmax",)]),
    "fused": ((1, 8, 8), [("Conv2d", 1, 4, 3, 1, 1), ("ReLU",), ("MaxPool2d", 2), ("Flatten",), ("Linear", 64, 3)]),
    "strided": ((3, 9, 7), [("Conv2d", 3, 5, 3, 2, 1), ("Tanh",), ("AvgPool2d", 2), ("Flatten",), ("LogSoftmax",)]),
    "padded pools": ((2, 7, 7), [("MaxPool2d", 3, 2, 1), ("AvgPool2d", 3, 1, 1), ("Conv2d", 2, 3, 1), ("Flatten",)]),
    "images": ((2, 6, 6), [("Conv2d", 2, 3, (3, 1), 1, (1, 0)), ("ReLU",), ("Conv2d", 3, 2, 3)]),
}
_OURS = {
    kind.__name__: kind
    for kind in (AvgPool2d, Conv2d, Flatten, Linear, LogSoftmax, MaxPool2d, ReLU, Sigmoid, Softmax, Tanh)
}


def ours(name):
    """The architecture of the engine's layers, those of its second half in a Sequential of their own."""
    layers = [_OURS[kind](*arguments) for kind, *arguments in ARCHITECTURES[name][1]]
    half = len(layers) // 2
    return Sequential(*layers[:half], Sequential(*layers[half:]))


def theirs(name):
    """The same of PyTorch's."""
    import torch

    layers = []
    for kind, *arguments in ARCHITECTURES[name][1]:
        options = {"dim": 1} if "Softmax" in kind else {}
        layers.append(getattr(torch.nn, kind)(*arguments, **options))
    half = len(layers) // 2
    return torch.nn.Sequential(*layers[:half], torch.nn.Sequential(*layers[half:]))
