"""Layers, losses and the base class of models."""

from clcomm.engine.nn.attention import MultiheadAttention
from clcomm.engine.nn.containers import ModuleDict, ModuleList, ParameterList
from clcomm.engine.nn.convolutions import Conv2d, ConvTranspose2d
from clcomm.engine.nn.init import Generator, manual_seed
from clcomm.engine.nn.layers import (
    GELU,
    AdaptiveAvgPool2d,
    AvgPool2d,
    BCEWithLogitsLoss,
    CrossEntropyLoss,
    Dropout,
    Embedding,
    Flatten,
    LeakyReLU,
    Linear,
    LogSoftmax,
    MaxPool2d,
    MSELoss,
    NLLLoss,
    ReLU,
    Sigmoid,
    SiLU,
    SmoothL1Loss,
    Softmax,
    Tanh,
)
from clcomm.engine.nn.module import Module
from clcomm.engine.nn.norms import BatchNorm1d, BatchNorm2d, GroupNorm, LayerNorm
from clcomm.engine.nn.sequential import Sequential

__all__ = [
    "GELU",
    "AdaptiveAvgPool2d",
    "AvgPool2d",
    "BCEWithLogitsLoss",
    "BatchNorm1d",
    "BatchNorm2d",
    "Conv2d",
    "ConvTranspose2d",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "Flatten",
    "Generator",
    "GroupNorm",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LogSoftmax",
    "MSELoss",
    "MaxPool2d",
    "Module",
    "ModuleDict",
    "ModuleList",
    "MultiheadAttention",
    "NLLLoss",
    "ParameterList",
    "ReLU",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "SmoothL1Loss",
    "Softmax",
    "Tanh",
    "manual_seed",
]
