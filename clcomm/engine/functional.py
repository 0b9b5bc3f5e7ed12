"""All functions of tensors in one module, usually imported as F."""

from __future__ import annotations

import sys

from clcomm.engine.ops.activation import gelu, leaky_relu, relu, sigmoid, silu, tanh
from clcomm.engine.ops.attention import (
    attention_weights,
    multi_head_attention,
    packed_attention,
    scaled_dot_product_attention,
)
from clcomm.engine.ops.batch_norm import batch_norm, group_norm
from clcomm.engine.ops.batched_matmul import matmul
from clcomm.engine.ops.blocks import concat, pad, split, stack
from clcomm.engine.ops.casts import to_float
from clcomm.engine.ops.class_losses import cross_entropy, nll_loss
from clcomm.engine.ops.comparisons import (
    equal_to,
    greater_or_equal,
    greater_than,
    less_or_equal,
    less_than,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    masked_fill,
    not_equal_to,
    one_hot,
    to_bool,
    to_int,
    tril,
    triu,
    where,
)
from clcomm.engine.ops.composed import (
    binary_cross_entropy,
    elu,
    hardsigmoid,
    hardswish,
    hardtanh,
    huber_loss,
    kl_div,
    l1_loss,
    mish,
    prelu,
    relu6,
    rms_norm,
    softplus,
)
from clcomm.engine.ops.conv2d import conv2d, conv_relu_pool, conv_transpose2d
from clcomm.engine.ops.dropout import dropout
from clcomm.engine.ops.einsum import einsum
from clcomm.engine.ops.elementwise import add, div, mul, sub
from clcomm.engine.ops.functions import (
    abs,
    clamp,
    cos,
    erf,
    exp,
    log,
    maximum,
    minimum,
    pow,
    rsqrt,
    sin,
    sqrt,
    square,
)
from clcomm.engine.ops.in_place import overwrite
from clcomm.engine.ops.indexing import embedding, gather, index_select, take
from clcomm.engine.ops.layer_norm import layer_norm
from clcomm.engine.ops.loss import binary_cross_entropy_with_logits, mse_loss, smooth_l1_loss
from clcomm.engine.ops.matmul import linear
from clcomm.engine.ops.one_dimension import adaptive_avg_pool1d, avg_pool1d, conv1d, conv_transpose1d, max_pool1d
from clcomm.engine.ops.ordered import (
    all,
    any,
    argmax,
    argmin,
    argsort,
    chunk,
    cumsum,
    max,
    min,
    norm,
    prod,
    sort,
    std,
    topk,
)
from clcomm.engine.ops.pool import adaptive_avg_pool2d, avg_pool2d, max_pool2d
from clcomm.engine.ops.reduce import broadcast_to, mean, sum
from clcomm.engine.ops.resampling import adaptive_max_pool2d, interpolate, pixel_shuffle, pixel_unshuffle
from clcomm.engine.ops.shape import clone, flatten, reshape, squeeze, swap_dimensions, transpose, unsqueeze
from clcomm.engine.ops.softmax import log_softmax, logsumexp, softmax
from clcomm.engine.ops.variance import var
from clcomm.engine.tensor import Tensor

__all__ = [
    "abs",
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_max_pool2d",
    "add",
    "all",
    "any",
    "argmax",
    "argmin",
    "argsort",
    "attention_weights",
    "avg_pool1d",
    "avg_pool2d",
    "batch_norm",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "broadcast_to",
    "cat",
    "chunk",
    "clamp",
    "clone",
    "concat",
    "conv1d",
    "conv2d",
    "conv_relu_pool",
    "conv_transpose1d",
    "conv_transpose2d",
    "cos",
    "cross_entropy",
    "cumsum",
    "div",
    "dropout",
    "einsum",
    "elu",
    "embedding",
    "equal_to",
    "erf",
    "exp",
    "flatten",
    "gather",
    "gelu",
    "greater_or_equal",
    "greater_than",
    "group_norm",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "huber_loss",
    "index_select",
    "interpolate",
    "kl_div",
    "l1_loss",
    "layer_norm",
    "leaky_relu",
    "less_or_equal",
    "less_than",
    "linear",
    "log",
    "log_softmax",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "logsumexp",
    "masked_fill",
    "matmul",
    "max",
    "max_pool1d",
    "max_pool2d",
    "maximum",
    "mean",
    "min",
    "minimum",
    "mish",
    "mse_loss",
    "mul",
    "multi_head_attention",
    "nll_loss",
    "norm",
    "not_equal_to",
    "one_hot",
    "overwrite",
    "packed_attention",
    "pad",
    "pixel_shuffle",
    "pixel_unshuffle",
    "pow",
    "prelu",
    "prod",
    "relu",
    "relu6",
    "reshape",
    "rms_norm",
    "rsqrt",
    "scaled_dot_product_attention",
    "sigmoid",
    "silu",
    "sin",
    "smooth_l1_loss",
    "softmax",
    "softplus",
    "sort",
    "split",
    "sqrt",
    "square",
    "squeeze",
    "stack",
    "std",
    "sub",
    "sum",
    "swap_dimensions",
    "take",
    "tanh",
    "to_bool",
    "to_float",
    "to_int",
    "topk",
    "transpose",
    "tril",
    "triu",
    "unsqueeze",
    "var",
    "where",
]

cat = concat

# A tensor's operators call these functions; tensor.py cannot import this module, which imports it.
Tensor._functional = sys.modules[__name__]  # type: ignore[misc]
