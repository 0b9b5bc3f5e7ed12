"""All functions of tensors in one module, usually imported as F."""

from __future__ import annotations

import sys

from clcomm.engine.ops.activation import gelu, leaky_relu, relu, sigmoid, silu, tanh
from clcomm.engine.ops.attention import multi_head_attention, packed_attention, scaled_dot_product_attention
from clcomm.engine.ops.batch_norm import batch_norm, group_norm
from clcomm.engine.ops.batched_matmul import matmul
from clcomm.engine.ops.blocks import concat, pad, split, stack, take
from clcomm.engine.ops.class_losses import cross_entropy, nll_loss
from clcomm.engine.ops.conv2d import conv2d, conv_relu_pool, conv_transpose2d
from clcomm.engine.ops.dropout import dropout
from clcomm.engine.ops.elementwise import add, div, mul, sub
from clcomm.engine.ops.in_place import overwrite
from clcomm.engine.ops.indexing import embedding, gather, index_select
from clcomm.engine.ops.layer_norm import layer_norm
from clcomm.engine.ops.loss import binary_cross_entropy_with_logits, mse_loss, smooth_l1_loss
from clcomm.engine.ops.matmul import linear
from clcomm.engine.ops.pool import adaptive_avg_pool2d, avg_pool2d, max_pool2d
from clcomm.engine.ops.reduce import argmax, mean, sum
from clcomm.engine.ops.shape import flatten, reshape, swap_dimensions, transpose
from clcomm.engine.ops.softmax import log_softmax, logsumexp, softmax
from clcomm.engine.ops.variance import var
from clcomm.engine.tensor import Tensor

__all__ = [
    "adaptive_avg_pool2d",
    "add",
    "argmax",
    "avg_pool2d",
    "batch_norm",
    "binary_cross_entropy_with_logits",
    "concat",
    "conv2d",
    "conv_relu_pool",
    "conv_transpose2d",
    "cross_entropy",
    "div",
    "dropout",
    "embedding",
    "flatten",
    "gather",
    "gelu",
    "group_norm",
    "index_select",
    "layer_norm",
    "leaky_relu",
    "linear",
    "log_softmax",
    "logsumexp",
    "matmul",
    "max_pool2d",
    "mean",
    "mse_loss",
    "mul",
    "multi_head_attention",
    "nll_loss",
    "overwrite",
    "packed_attention",
    "pad",
    "relu",
    "reshape",
    "scaled_dot_product_attention",
    "sigmoid",
    "silu",
    "smooth_l1_loss",
    "softmax",
    "split",
    "stack",
    "sub",
    "sum",
    "swap_dimensions",
    "take",
    "tanh",
    "transpose",
    "var",
]

# A tensor's operators call these functions; tensor.py cannot import this module, which imports it.
Tensor._functional = sys.modules[__name__]  # type: ignore[misc]
