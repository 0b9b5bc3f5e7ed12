"""Architectures of the engine's layers, each beside the same one of PyTorch's."""

from __future__ import annotations

from clcomm.engine import (
    GELU,
    AdaptiveAvgPool2d,
    AvgPool2d,
    BatchNorm1d,
    BatchNorm2d,
    Conv2d,
    Flatten,
    GroupNorm,
    LayerNorm,
    LeakyReLU,
    Linear,
    LogSoftmax,
    MaxPool2d,
    ReLU,
    Sequential,
    Sigmoid,
    SiLU,
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
    "gates": ((5,), [("Linear", 5, 6), ("GELU",), ("SiLU",), ("Linear", 6, 4), ("LeakyReLU", 0.2), ("GELU", "tanh")]),
    "norms": ((3, 4), [("LayerNorm", 4), ("LayerNorm", (3, 4), 1e-2), ("Flatten",), ("LayerNorm", 12, 1e-5, False)]),
    "batch norms": ((2, 6, 6), [("BatchNorm2d", 2), ("Conv2d", 2, 3, 3), ("BatchNorm2d", 3, 1e-2, 0.1, False)]),
    "batch norm of rows": ((5,), [("Linear", 5, 4), ("BatchNorm1d", 4), ("ReLU",)]),
    "group norm": ((4, 6, 6), [("GroupNorm", 2, 4), ("GroupNorm", 4, 4, 1e-2, False), ("AdaptiveAvgPool2d", 2)]),
    "images": ((2, 6, 6), [("Conv2d", 2, 3, (3, 1), 1, (1, 0)), ("ReLU",), ("Conv2d", 3, 2, 3)]),
}
_LAYERS = (
    AdaptiveAvgPool2d, AvgPool2d, BatchNorm1d, BatchNorm2d, Conv2d, Flatten, GELU, GroupNorm, LayerNorm, LeakyReLU,
    Linear, LogSoftmax, MaxPool2d, ReLU, Sigmoid, SiLU, Softmax, Tanh,
)  # fmt: skip
_OURS = {kind.__name__: kind for kind in _LAYERS}


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
