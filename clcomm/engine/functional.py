"""All functions of tensors in one module, usually imported as F."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

from clcomm.engine.ops.activation import gelu, leaky_relu, relu, sigmoid, silu, tanh
from clcomm.engine.ops.argument_types import typed
from clcomm.engine.ops.arrangement import dot, flip, meshgrid, narrow, outer, pad, repeat, roll, unbind, unfold, windows
from clcomm.engine.ops.attention import (
    attention_weights,
    multi_head_attention,
    packed_attention,
    scaled_dot_product_attention,
)
from clcomm.engine.ops.batch_norm import batch_norm
from clcomm.engine.ops.batched_matmul import matmul
from clcomm.engine.ops.blocks import concat, split, stack
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
    cosine_similarity,
    elu,
    glu,
    hardsigmoid,
    hardswish,
    hardtanh,
    huber_loss,
    kl_div,
    l1_loss,
    logsigmoid,
    mish,
    normalize,
    prelu,
    relu6,
    rms_norm,
    softplus,
    threshold,
)
from clcomm.engine.ops.conv2d import conv2d, conv_relu_pool, conv_transpose2d
from clcomm.engine.ops.ctc import ctc_loss
from clcomm.engine.ops.dropout import dropout
from clcomm.engine.ops.einsum import einsum
from clcomm.engine.ops.elementwise import add, mul, sub
from clcomm.engine.ops.formulas import (
    addcdiv,
    addcmul,
    allclose,
    amax,
    amin,
    clamp_max,
    clamp_min,
    cosh,
    count_nonzero,
    cumprod,
    diff,
    equal,
    erfc,
    exp2,
    frac,
    isclose,
    kthvalue,
    lerp,
    log2,
    log10,
    logaddexp,
    logit,
    nan_to_num,
    nansum,
    neg,
    negative,
    quantile,
    ravel,
    reciprocal,
    sinh,
    tan,
)
from clcomm.engine.ops.functions import (
    abs,
    acos,
    asin,
    atan,
    atan2,
    clamp,
    cos,
    erf,
    exp,
    expm1,
    hypot,
    log,
    maximum,
    minimum,
    pow,
    rsqrt,
    sin,
    sqrt,
    square,
    xlogy,
)
from clcomm.engine.ops.group_norm import group_norm
from clcomm.engine.ops.in_place import assign, overwrite, scatter
from clcomm.engine.ops.in_place import write as write
from clcomm.engine.ops.indexing import embedding, gather, index_select, scatter_add, spread, take
from clcomm.engine.ops.integers import shifted  # noqa: F401 - an operator's
from clcomm.engine.ops.joining import (
    atleast_1d,
    atleast_2d,
    atleast_3d,
    block_diag,
    broadcast_tensors,
    cartesian_prod,
    column_stack,
    dstack,
    hsplit,
    hstack,
    tensor_split,
    vsplit,
    vstack,
)
from clcomm.engine.ops.layer_norm import layer_norm
from clcomm.engine.ops.loss import binary_cross_entropy_with_logits, mse_loss, smooth_l1_loss
from clcomm.engine.ops.matmul import linear
from clcomm.engine.ops.matrices import (
    addmm,
    addmv,
    baddbmm,
    cdist,
    cross,
    diag,
    diag_embed,
    diagonal,
    dist,
    ger,
    inner,
    kron,
    mv,
    pairwise_distance,
    pdist,
    tensordot,
    trace,
    vector_norm,
)
from clcomm.engine.ops.one_dimension import (
    adaptive_avg_pool1d,
    adaptive_max_pool1d,
    avg_pool1d,
    conv1d,
    conv_transpose1d,
    max_pool1d,
)
from clcomm.engine.ops.ordered import (
    all,
    any,
    argmax,
    argmin,
    argsort,
    chunk,
    cumsum,
    max,
    median,
    min,
    norm,
    prod,
    sort,
    std,
    std_mean,
    topk,
    var_mean,
)
from clcomm.engine.ops.parts import taken_again as taken_again
from clcomm.engine.ops.picking import (
    argwhere,
    bincount,
    bucketize,
    fliplr,
    flipud,
    index_add,
    index_fill,
    isin,
    masked_select,
    movedim,
    nonzero,
    repeat_interleave,
    rot90,
    searchsorted,
    select,
    take_along_dim,
    tile,
    unflatten,
    unique,
)
from clcomm.engine.ops.pool import adaptive_avg_pool2d, avg_pool2d, max_pool2d
from clcomm.engine.ops.rarer_activations import (
    alpha_dropout,
    celu,
    channel_shuffle,
    dropout1d,
    dropout2d,
    dropout3d,
    gumbel_softmax,
    hardshrink,
    instance_norm,
    selu,
    softmin,
    softshrink,
    softsign,
    tanhshrink,
)
from clcomm.engine.ops.rarer_losses import (
    cosine_embedding_loss,
    gaussian_nll_loss,
    hinge_embedding_loss,
    margin_ranking_loss,
    multi_margin_loss,
    multilabel_soft_margin_loss,
    poisson_nll_loss,
    soft_margin_loss,
    triplet_margin_loss,
)
from clcomm.engine.ops.reduce import broadcast_to, mean, sum
from clcomm.engine.ops.resampling import adaptive_max_pool2d, interpolate, pixel_shuffle, pixel_unshuffle
from clcomm.engine.ops.rounding import ceil, div, floor, floor_divide, fmod, log1p, remainder, round, sign, trunc
from clcomm.engine.ops.sampling import affine_grid, fold, grid_sample, local_response_norm, lp_pool2d
from clcomm.engine.ops.shape import clone, flatten, reshape, squeeze, swap_dimensions, transpose, unsqueeze
from clcomm.engine.ops.shape import contiguous as contiguous
from clcomm.engine.ops.softmax import log_softmax, logsumexp, softmax
from clcomm.engine.ops.three_dimensions import (
    adaptive_avg_pool3d,
    adaptive_max_pool3d,
    avg_pool3d,
    conv3d,
    conv_transpose3d,
    max_pool3d,
)
from clcomm.engine.ops.variance import var
from clcomm.engine.tensor import Tensor
from clcomm.engine.tensor_functions import FunctionMethods
from clcomm.engine.tensor_in_place import InPlaceMethods
from clcomm.engine.tensor_methods import TensorMethods
from clcomm.engine.tensor_shapes import ShapeMethods
from clcomm.engine.view import following as following

__all__ = [
    "abs",
    "absolute",
    "acos",
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "adaptive_max_pool1d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "add",
    "addcdiv",
    "addcmul",
    "addmm",
    "addmv",
    "affine_grid",
    "all",
    "allclose",
    "alpha_dropout",
    "amax",
    "amin",
    "any",
    "arccos",
    "arcsin",
    "arctan",
    "arctan2",
    "argmax",
    "argmin",
    "argsort",
    "argwhere",
    "asin",
    "assign",
    "atan",
    "atan2",
    "atleast_1d",
    "atleast_2d",
    "atleast_3d",
    "attention_weights",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "baddbmm",
    "batch_norm",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "bincount",
    "block_diag",
    "bmm",
    "broadcast_tensors",
    "broadcast_to",
    "bucketize",
    "cartesian_prod",
    "cat",
    "cdist",
    "ceil",
    "celu",
    "channel_shuffle",
    "chunk",
    "clamp",
    "clamp_max",
    "clamp_min",
    "clip",
    "clone",
    "column_stack",
    "concat",
    "concatenate",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_relu_pool",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "cos",
    "cosh",
    "cosine_embedding_loss",
    "cosine_similarity",
    "count_nonzero",
    "cross",
    "cross_entropy",
    "ctc_loss",
    "cumprod",
    "cumsum",
    "diag",
    "diag_embed",
    "diagonal",
    "diff",
    "dist",
    "div",
    "divide",
    "dot",
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "dstack",
    "einsum",
    "elu",
    "embedding",
    "eq",
    "equal",
    "equal_to",
    "erf",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "flatten",
    "flip",
    "fliplr",
    "flipud",
    "floor",
    "floor_divide",
    "fmod",
    "fold",
    "frac",
    "gather",
    "gaussian_nll_loss",
    "ge",
    "gelu",
    "ger",
    "glu",
    "greater_or_equal",
    "greater_than",
    "grid_sample",
    "group_norm",
    "gt",
    "gumbel_softmax",
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "hinge_embedding_loss",
    "hsplit",
    "hstack",
    "huber_loss",
    "hypot",
    "index_add",
    "index_fill",
    "index_select",
    "inner",
    "instance_norm",
    "interpolate",
    "isclose",
    "isin",
    "kl_div",
    "kron",
    "kthvalue",
    "l1_loss",
    "layer_norm",
    "le",
    "leaky_relu",
    "lerp",
    "less_or_equal",
    "less_than",
    "linear",
    "local_response_norm",
    "log",
    "log1p",
    "log2",
    "log10",
    "log_softmax",
    "logaddexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "logit",
    "logsigmoid",
    "logsumexp",
    "lp_pool2d",
    "lt",
    "margin_ranking_loss",
    "masked_fill",
    "masked_select",
    "matmul",
    "max",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "maximum",
    "mean",
    "median",
    "meshgrid",
    "min",
    "minimum",
    "mish",
    "mm",
    "moveaxis",
    "movedim",
    "mse_loss",
    "mul",
    "multi_head_attention",
    "multi_margin_loss",
    "multilabel_soft_margin_loss",
    "multiply",
    "mv",
    "nan_to_num",
    "nansum",
    "narrow",
    "ne",
    "neg",
    "negative",
    "nll_loss",
    "nonzero",
    "norm",
    "normalize",
    "not_equal_to",
    "one_hot",
    "outer",
    "overwrite",
    "packed_attention",
    "pad",
    "pairwise_distance",
    "pdist",
    "permute",
    "pixel_shuffle",
    "pixel_unshuffle",
    "poisson_nll_loss",
    "pow",
    "prelu",
    "prod",
    "quantile",
    "ravel",
    "reciprocal",
    "relu",
    "relu6",
    "remainder",
    "repeat",
    "repeat_interleave",
    "reshape",
    "rms_norm",
    "roll",
    "rot90",
    "round",
    "row_stack",
    "rsqrt",
    "scaled_dot_product_attention",
    "scatter",
    "scatter_add",
    "searchsorted",
    "select",
    "selu",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "sinh",
    "smooth_l1_loss",
    "soft_margin_loss",
    "softmax",
    "softmin",
    "softplus",
    "softshrink",
    "softsign",
    "sort",
    "split",
    "spread",
    "sqrt",
    "square",
    "squeeze",
    "stack",
    "std",
    "std_mean",
    "sub",
    "subtract",
    "sum",
    "swap_dimensions",
    "swapaxes",
    "swapdims",
    "take",
    "take_along_dim",
    "tan",
    "tanh",
    "tanhshrink",
    "tensor_split",
    "tensordot",
    "threshold",
    "tile",
    "to_bool",
    "to_float",
    "to_int",
    "topk",
    "trace",
    "transpose",
    "tril",
    "triplet_margin_loss",
    "triu",
    "true_divide",
    "trunc",
    "unbind",
    "unflatten",
    "unfold",
    "unique",
    "unsqueeze",
    "upsample",
    "var",
    "var_mean",
    "vector_norm",
    "vsplit",
    "vstack",
    "where",
    "windows",
    "xlogy",
]  # fmt: skip

cat = concatenate = concat
mm = bmm = matmul
eq, ne, lt, le, gt, ge = equal_to, not_equal_to, less_than, less_or_equal, greater_than, greater_or_equal
clip, absolute, permute, moveaxis, upsample = clamp, abs, transpose, movedim, interpolate
swapaxes = swapdims = swap_dimensions
multiply, subtract, divide, true_divide = mul, sub, div, div
arccos, arcsin, arctan, arctan2 = acos, asin, atan, atan2
row_stack = vstack

# A tensor's operators call these functions; tensor.py cannot import this module, which imports it.
Tensor._functional = sys.modules[__name__]  # type: ignore[misc]


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def method(x: Tensor, *given: Any, **named: Any) -> Tensor:
        return overwrite(x, lambda own: function(own, *given, **named))

    method.__name__ = method.__qualname__ = f"{function.__name__}_"
    method.__doc__ = f"Give the tensor the result of `{function.__name__}`, and return it."
    return method


def _unbatched(function: Callable[..., Tensor], dimensions: int) -> Callable[..., Tensor]:
    """Return a function of [N, C, ...] that also takes a single [C, ...]."""

    @wraps(function)
    def call(x: Tensor, *given: Any, **named: Any) -> Tensor:
        if isinstance(x, Tensor) and x.ndim == dimensions - 1:
            return squeeze(function(unsqueeze(x, 0), *given, **named), 0)
        return function(x, *given, **named)

    return call


conv_relu_pool = _unbatched(conv_relu_pool, 4)
for _d in (1, 2, 3):
    for _name in ("conv", "conv_transpose", "max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool"):
        globals()[f"{_name}{_d}d"] = _unbatched(globals()[f"{_name}{_d}d"], _d + 2)
for _name in __all__:
    globals()[_name] = typed(globals()[_name], _name)
for _class in (ShapeMethods, InPlaceMethods, TensorMethods, Tensor):
    for _name, _method in [*vars(_class).items()]:
        if not _name.startswith("_") and isinstance(_method, FunctionType):
            setattr(_class, _name, typed(_method, _name))
for _name in FunctionMethods.__annotations__:
    if _name.endswith("_"):
        globals()[_name] = _in_place(globals()[_name[:-1]])
    setattr(Tensor, _name, globals()[_name])
