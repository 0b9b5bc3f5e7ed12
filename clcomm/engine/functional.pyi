# Written by `python -m docs.stubs`.
from collections.abc import Callable
from typing import Any, Generic

from clcomm.engine.ops.activation import gelu as gelu
from clcomm.engine.ops.activation import leaky_relu as leaky_relu
from clcomm.engine.ops.activation import relu as relu
from clcomm.engine.ops.activation import sigmoid as sigmoid
from clcomm.engine.ops.activation import silu as silu
from clcomm.engine.ops.activation import tanh as tanh
from clcomm.engine.ops.arrangement import dot as dot
from clcomm.engine.ops.arrangement import flip as flip
from clcomm.engine.ops.arrangement import meshgrid as meshgrid
from clcomm.engine.ops.arrangement import narrow as narrow
from clcomm.engine.ops.arrangement import outer as outer
from clcomm.engine.ops.arrangement import pad as pad
from clcomm.engine.ops.arrangement import repeat as repeat
from clcomm.engine.ops.arrangement import roll as roll
from clcomm.engine.ops.arrangement import unbind as unbind
from clcomm.engine.ops.arrangement import unfold as unfold
from clcomm.engine.ops.arrangement import windows as windows
from clcomm.engine.ops.attention import attention_weights as attention_weights
from clcomm.engine.ops.attention import multi_head_attention as multi_head_attention
from clcomm.engine.ops.attention import packed_attention as packed_attention
from clcomm.engine.ops.attention import scaled_dot_product_attention as scaled_dot_product_attention
from clcomm.engine.ops.batch_norm import batch_norm as batch_norm
from clcomm.engine.ops.batched_matmul import matmul as matmul
from clcomm.engine.ops.blocks import concat as concat
from clcomm.engine.ops.blocks import concat as cat
from clcomm.engine.ops.blocks import concat as concatenate
from clcomm.engine.ops.blocks import split as split
from clcomm.engine.ops.blocks import stack as stack
from clcomm.engine.ops.class_losses import cross_entropy as cross_entropy
from clcomm.engine.ops.class_losses import ctc_loss as ctc_loss
from clcomm.engine.ops.class_losses import nll_loss as nll_loss
from clcomm.engine.ops.comparisons import equal_to as equal_to
from clcomm.engine.ops.comparisons import equal_to as eq
from clcomm.engine.ops.comparisons import greater_or_equal as greater_or_equal
from clcomm.engine.ops.comparisons import greater_or_equal as ge
from clcomm.engine.ops.comparisons import greater_than as greater_than
from clcomm.engine.ops.comparisons import greater_than as gt
from clcomm.engine.ops.comparisons import less_or_equal as less_or_equal
from clcomm.engine.ops.comparisons import less_or_equal as le
from clcomm.engine.ops.comparisons import less_than as less_than
from clcomm.engine.ops.comparisons import less_than as lt
from clcomm.engine.ops.comparisons import logical_and as logical_and
from clcomm.engine.ops.comparisons import logical_not as logical_not
from clcomm.engine.ops.comparisons import logical_or as logical_or
from clcomm.engine.ops.comparisons import logical_xor as logical_xor
from clcomm.engine.ops.comparisons import masked_fill as masked_fill
from clcomm.engine.ops.comparisons import not_equal_to as not_equal_to
from clcomm.engine.ops.comparisons import not_equal_to as ne
from clcomm.engine.ops.comparisons import one_hot as one_hot
from clcomm.engine.ops.comparisons import to_bool as to_bool
from clcomm.engine.ops.comparisons import to_int as to_int
from clcomm.engine.ops.comparisons import tril as tril
from clcomm.engine.ops.comparisons import triu as triu
from clcomm.engine.ops.comparisons import where as where
from clcomm.engine.ops.composed import binary_cross_entropy as binary_cross_entropy
from clcomm.engine.ops.composed import cosine_similarity as cosine_similarity
from clcomm.engine.ops.composed import elu as elu
from clcomm.engine.ops.composed import glu as glu
from clcomm.engine.ops.composed import hardsigmoid as hardsigmoid
from clcomm.engine.ops.composed import hardswish as hardswish
from clcomm.engine.ops.composed import hardtanh as hardtanh
from clcomm.engine.ops.composed import huber_loss as huber_loss
from clcomm.engine.ops.composed import kl_div as kl_div
from clcomm.engine.ops.composed import l1_loss as l1_loss
from clcomm.engine.ops.composed import logsigmoid as logsigmoid
from clcomm.engine.ops.composed import mish as mish
from clcomm.engine.ops.composed import normalize as normalize
from clcomm.engine.ops.composed import prelu as prelu
from clcomm.engine.ops.composed import relu6 as relu6
from clcomm.engine.ops.composed import rms_norm as rms_norm
from clcomm.engine.ops.composed import softplus as softplus
from clcomm.engine.ops.composed import threshold as threshold
from clcomm.engine.ops.conv2d import conv2d as conv2d
from clcomm.engine.ops.conv2d import conv_relu_pool as conv_relu_pool
from clcomm.engine.ops.conv2d import conv_transpose2d as conv_transpose2d
from clcomm.engine.ops.dropout import dropout as dropout
from clcomm.engine.ops.elementwise import add as add
from clcomm.engine.ops.elementwise import mul as mul
from clcomm.engine.ops.elementwise import mul as multiply
from clcomm.engine.ops.elementwise import sub as sub
from clcomm.engine.ops.elementwise import sub as subtract
from clcomm.engine.ops.formulas import addcdiv as addcdiv
from clcomm.engine.ops.formulas import addcmul as addcmul
from clcomm.engine.ops.formulas import allclose as allclose
from clcomm.engine.ops.formulas import amax as amax
from clcomm.engine.ops.formulas import amin as amin
from clcomm.engine.ops.formulas import clamp_max as clamp_max
from clcomm.engine.ops.formulas import clamp_min as clamp_min
from clcomm.engine.ops.formulas import cosh as cosh
from clcomm.engine.ops.formulas import count_nonzero as count_nonzero
from clcomm.engine.ops.formulas import cumprod as cumprod
from clcomm.engine.ops.formulas import diff as diff
from clcomm.engine.ops.formulas import equal as equal
from clcomm.engine.ops.formulas import erfc as erfc
from clcomm.engine.ops.formulas import exp2 as exp2
from clcomm.engine.ops.formulas import frac as frac
from clcomm.engine.ops.formulas import isclose as isclose
from clcomm.engine.ops.formulas import kthvalue as kthvalue
from clcomm.engine.ops.formulas import lerp as lerp
from clcomm.engine.ops.formulas import log2 as log2
from clcomm.engine.ops.formulas import log10 as log10
from clcomm.engine.ops.formulas import logaddexp as logaddexp
from clcomm.engine.ops.formulas import logit as logit
from clcomm.engine.ops.formulas import nan_to_num as nan_to_num
from clcomm.engine.ops.formulas import nansum as nansum
from clcomm.engine.ops.formulas import neg as neg
from clcomm.engine.ops.formulas import negative as negative
from clcomm.engine.ops.formulas import quantile as quantile
from clcomm.engine.ops.formulas import ravel as ravel
from clcomm.engine.ops.formulas import reciprocal as reciprocal
from clcomm.engine.ops.formulas import sinh as sinh
from clcomm.engine.ops.formulas import tan as tan
from clcomm.engine.ops.functions import abs as abs
from clcomm.engine.ops.functions import abs as absolute
from clcomm.engine.ops.functions import acos as acos
from clcomm.engine.ops.functions import acos as arccos
from clcomm.engine.ops.functions import asin as asin
from clcomm.engine.ops.functions import asin as arcsin
from clcomm.engine.ops.functions import atan as atan
from clcomm.engine.ops.functions import atan as arctan
from clcomm.engine.ops.functions import atan2 as atan2
from clcomm.engine.ops.functions import atan2 as arctan2
from clcomm.engine.ops.functions import clamp as clamp
from clcomm.engine.ops.functions import clamp as clip
from clcomm.engine.ops.functions import cos as cos
from clcomm.engine.ops.functions import erf as erf
from clcomm.engine.ops.functions import exp as exp
from clcomm.engine.ops.functions import expm1 as expm1
from clcomm.engine.ops.functions import hypot as hypot
from clcomm.engine.ops.functions import log as log
from clcomm.engine.ops.functions import maximum as maximum
from clcomm.engine.ops.functions import minimum as minimum
from clcomm.engine.ops.functions import pow as pow
from clcomm.engine.ops.functions import rsqrt as rsqrt
from clcomm.engine.ops.functions import sin as sin
from clcomm.engine.ops.functions import sqrt as sqrt
from clcomm.engine.ops.functions import square as square
from clcomm.engine.ops.functions import xlogy as xlogy
from clcomm.engine.ops.in_place import assign as assign
from clcomm.engine.ops.in_place import overwrite as overwrite
from clcomm.engine.ops.in_place import scatter as scatter
from clcomm.engine.ops.indexing import embedding as embedding
from clcomm.engine.ops.indexing import gather as gather
from clcomm.engine.ops.indexing import index_select as index_select
from clcomm.engine.ops.indexing import scatter_add as scatter_add
from clcomm.engine.ops.indexing import spread as spread
from clcomm.engine.ops.indexing import take as take
from clcomm.engine.ops.joining import atleast_1d as atleast_1d
from clcomm.engine.ops.joining import atleast_2d as atleast_2d
from clcomm.engine.ops.joining import atleast_3d as atleast_3d
from clcomm.engine.ops.joining import block_diag as block_diag
from clcomm.engine.ops.joining import broadcast_tensors as broadcast_tensors
from clcomm.engine.ops.joining import cartesian_prod as cartesian_prod
from clcomm.engine.ops.joining import column_stack as column_stack
from clcomm.engine.ops.joining import dstack as dstack
from clcomm.engine.ops.joining import hsplit as hsplit
from clcomm.engine.ops.joining import hstack as hstack
from clcomm.engine.ops.joining import tensor_split as tensor_split
from clcomm.engine.ops.joining import vsplit as vsplit
from clcomm.engine.ops.joining import vstack as vstack
from clcomm.engine.ops.joining import vstack as row_stack
from clcomm.engine.ops.loss import binary_cross_entropy_with_logits as binary_cross_entropy_with_logits
from clcomm.engine.ops.loss import mse_loss as mse_loss
from clcomm.engine.ops.loss import smooth_l1_loss as smooth_l1_loss
from clcomm.engine.ops.matmul import linear as linear
from clcomm.engine.ops.matrices import addmm as addmm
from clcomm.engine.ops.matrices import addmv as addmv
from clcomm.engine.ops.matrices import baddbmm as baddbmm
from clcomm.engine.ops.matrices import bmm as bmm
from clcomm.engine.ops.matrices import cdist as cdist
from clcomm.engine.ops.matrices import cross as cross
from clcomm.engine.ops.matrices import diag as diag
from clcomm.engine.ops.matrices import diag_embed as diag_embed
from clcomm.engine.ops.matrices import diagonal as diagonal
from clcomm.engine.ops.matrices import dist as dist
from clcomm.engine.ops.matrices import einsum as einsum
from clcomm.engine.ops.matrices import ger as ger
from clcomm.engine.ops.matrices import inner as inner
from clcomm.engine.ops.matrices import kron as kron
from clcomm.engine.ops.matrices import mm as mm
from clcomm.engine.ops.matrices import mv as mv
from clcomm.engine.ops.matrices import pairwise_distance as pairwise_distance
from clcomm.engine.ops.matrices import pdist as pdist
from clcomm.engine.ops.matrices import tensordot as tensordot
from clcomm.engine.ops.matrices import trace as trace
from clcomm.engine.ops.matrices import vector_norm as vector_norm
from clcomm.engine.ops.norms import group_norm as group_norm
from clcomm.engine.ops.norms import layer_norm as layer_norm
from clcomm.engine.ops.norms import var as var
from clcomm.engine.ops.one_dimension import adaptive_avg_pool1d as adaptive_avg_pool1d
from clcomm.engine.ops.one_dimension import adaptive_max_pool1d as adaptive_max_pool1d
from clcomm.engine.ops.one_dimension import avg_pool1d as avg_pool1d
from clcomm.engine.ops.one_dimension import conv1d as conv1d
from clcomm.engine.ops.one_dimension import conv_transpose1d as conv_transpose1d
from clcomm.engine.ops.one_dimension import max_pool1d as max_pool1d
from clcomm.engine.ops.ordered import all as all
from clcomm.engine.ops.ordered import any as any
from clcomm.engine.ops.ordered import argmax as argmax
from clcomm.engine.ops.ordered import argmin as argmin
from clcomm.engine.ops.ordered import argsort as argsort
from clcomm.engine.ops.ordered import chunk as chunk
from clcomm.engine.ops.ordered import cumsum as cumsum
from clcomm.engine.ops.ordered import max as max
from clcomm.engine.ops.ordered import median as median
from clcomm.engine.ops.ordered import min as min
from clcomm.engine.ops.ordered import norm as norm
from clcomm.engine.ops.ordered import prod as prod
from clcomm.engine.ops.ordered import sort as sort
from clcomm.engine.ops.ordered import std as std
from clcomm.engine.ops.ordered import std_mean as std_mean
from clcomm.engine.ops.ordered import topk as topk
from clcomm.engine.ops.ordered import var_mean as var_mean
from clcomm.engine.ops.picking import argwhere as argwhere
from clcomm.engine.ops.picking import bincount as bincount
from clcomm.engine.ops.picking import bucketize as bucketize
from clcomm.engine.ops.picking import fliplr as fliplr
from clcomm.engine.ops.picking import flipud as flipud
from clcomm.engine.ops.picking import index_add as index_add
from clcomm.engine.ops.picking import index_fill as index_fill
from clcomm.engine.ops.picking import isin as isin
from clcomm.engine.ops.picking import masked_select as masked_select
from clcomm.engine.ops.picking import movedim as movedim
from clcomm.engine.ops.picking import movedim as moveaxis
from clcomm.engine.ops.picking import nonzero as nonzero
from clcomm.engine.ops.picking import repeat_interleave as repeat_interleave
from clcomm.engine.ops.picking import rot90 as rot90
from clcomm.engine.ops.picking import searchsorted as searchsorted
from clcomm.engine.ops.picking import select as select
from clcomm.engine.ops.picking import take_along_dim as take_along_dim
from clcomm.engine.ops.picking import tile as tile
from clcomm.engine.ops.picking import unflatten as unflatten
from clcomm.engine.ops.picking import unique as unique
from clcomm.engine.ops.pool import adaptive_avg_pool2d as adaptive_avg_pool2d
from clcomm.engine.ops.pool import avg_pool2d as avg_pool2d
from clcomm.engine.ops.pool import max_pool2d as max_pool2d
from clcomm.engine.ops.rarer import alpha_dropout as alpha_dropout
from clcomm.engine.ops.rarer import celu as celu
from clcomm.engine.ops.rarer import channel_shuffle as channel_shuffle
from clcomm.engine.ops.rarer import cosine_embedding_loss as cosine_embedding_loss
from clcomm.engine.ops.rarer import dropout1d as dropout1d
from clcomm.engine.ops.rarer import dropout2d as dropout2d
from clcomm.engine.ops.rarer import dropout3d as dropout3d
from clcomm.engine.ops.rarer import gaussian_nll_loss as gaussian_nll_loss
from clcomm.engine.ops.rarer import gumbel_softmax as gumbel_softmax
from clcomm.engine.ops.rarer import hardshrink as hardshrink
from clcomm.engine.ops.rarer import hinge_embedding_loss as hinge_embedding_loss
from clcomm.engine.ops.rarer import instance_norm as instance_norm
from clcomm.engine.ops.rarer import margin_ranking_loss as margin_ranking_loss
from clcomm.engine.ops.rarer import multi_margin_loss as multi_margin_loss
from clcomm.engine.ops.rarer import multilabel_soft_margin_loss as multilabel_soft_margin_loss
from clcomm.engine.ops.rarer import poisson_nll_loss as poisson_nll_loss
from clcomm.engine.ops.rarer import selu as selu
from clcomm.engine.ops.rarer import soft_margin_loss as soft_margin_loss
from clcomm.engine.ops.rarer import softmin as softmin
from clcomm.engine.ops.rarer import softshrink as softshrink
from clcomm.engine.ops.rarer import softsign as softsign
from clcomm.engine.ops.rarer import tanhshrink as tanhshrink
from clcomm.engine.ops.rarer import triplet_margin_loss as triplet_margin_loss
from clcomm.engine.ops.reduce import broadcast_to as broadcast_to
from clcomm.engine.ops.reduce import mean as mean
from clcomm.engine.ops.reduce import sum as sum
from clcomm.engine.ops.rounding import ceil as ceil
from clcomm.engine.ops.rounding import div as div
from clcomm.engine.ops.rounding import div as divide
from clcomm.engine.ops.rounding import div as true_divide
from clcomm.engine.ops.rounding import floor as floor
from clcomm.engine.ops.rounding import floor_divide as floor_divide
from clcomm.engine.ops.rounding import fmod as fmod
from clcomm.engine.ops.rounding import log1p as log1p
from clcomm.engine.ops.rounding import remainder as remainder
from clcomm.engine.ops.rounding import round as round
from clcomm.engine.ops.rounding import sign as sign
from clcomm.engine.ops.rounding import trunc as trunc
from clcomm.engine.ops.sampling import adaptive_max_pool2d as adaptive_max_pool2d
from clcomm.engine.ops.sampling import affine_grid as affine_grid
from clcomm.engine.ops.sampling import fold as fold
from clcomm.engine.ops.sampling import grid_sample as grid_sample
from clcomm.engine.ops.sampling import interpolate as interpolate
from clcomm.engine.ops.sampling import interpolate as upsample
from clcomm.engine.ops.sampling import local_response_norm as local_response_norm
from clcomm.engine.ops.sampling import lp_pool2d as lp_pool2d
from clcomm.engine.ops.sampling import pixel_shuffle as pixel_shuffle
from clcomm.engine.ops.sampling import pixel_unshuffle as pixel_unshuffle
from clcomm.engine.ops.shape import clone as clone
from clcomm.engine.ops.shape import flatten as flatten
from clcomm.engine.ops.shape import reshape as reshape
from clcomm.engine.ops.shape import squeeze as squeeze
from clcomm.engine.ops.shape import swap_dimensions as swap_dimensions
from clcomm.engine.ops.shape import swap_dimensions as swapaxes
from clcomm.engine.ops.shape import swap_dimensions as swapdims
from clcomm.engine.ops.shape import transpose as transpose
from clcomm.engine.ops.shape import transpose as permute
from clcomm.engine.ops.shape import unsqueeze as unsqueeze
from clcomm.engine.ops.softmax import log_softmax as log_softmax
from clcomm.engine.ops.softmax import logsumexp as logsumexp
from clcomm.engine.ops.softmax import softmax as softmax
from clcomm.engine.ops.three_dimensions import adaptive_avg_pool3d as adaptive_avg_pool3d
from clcomm.engine.ops.three_dimensions import adaptive_max_pool3d as adaptive_max_pool3d
from clcomm.engine.ops.three_dimensions import avg_pool3d as avg_pool3d
from clcomm.engine.ops.three_dimensions import conv3d as conv3d
from clcomm.engine.ops.three_dimensions import conv_transpose3d as conv_transpose3d
from clcomm.engine.ops.three_dimensions import max_pool3d as max_pool3d
from clcomm.engine.ops.types import to_float as to_float
from clcomm.engine.tensor import Tensor

__all__ = ['abs', 'absolute', 'acos', 'adaptive_avg_pool1d', 'adaptive_avg_pool2d', 'adaptive_avg_pool3d', 'adaptive_max_pool1d', 'adaptive_max_pool2d', 'adaptive_max_pool3d', 'add', 'addcdiv', 'addcmul', 'addmm', 'addmv', 'affine_grid', 'all', 'allclose', 'alpha_dropout', 'amax', 'amin', 'any', 'arccos', 'arcsin', 'arctan', 'arctan2', 'argmax', 'argmin', 'argsort', 'argwhere', 'asin', 'assign', 'atan', 'atan2', 'atleast_1d', 'atleast_2d', 'atleast_3d', 'attention_weights', 'avg_pool1d', 'avg_pool2d', 'avg_pool3d', 'baddbmm', 'batch_norm', 'binary_cross_entropy', 'binary_cross_entropy_with_logits', 'bincount', 'block_diag', 'bmm', 'broadcast_tensors', 'broadcast_to', 'bucketize', 'cartesian_prod', 'cat', 'cdist', 'ceil', 'celu', 'channel_shuffle', 'chunk', 'clamp', 'clamp_max', 'clamp_min', 'clip', 'clone', 'column_stack', 'concat', 'concatenate', 'conv1d', 'conv2d', 'conv3d', 'conv_relu_pool', 'conv_transpose1d', 'conv_transpose2d', 'conv_transpose3d', 'cos', 'cosh', 'cosine_embedding_loss', 'cosine_similarity', 'count_nonzero', 'cross', 'cross_entropy', 'ctc_loss', 'cumprod', 'cumsum', 'diag', 'diag_embed', 'diagonal', 'diff', 'dist', 'div', 'divide', 'dot', 'dropout', 'dropout1d', 'dropout2d', 'dropout3d', 'dstack', 'einsum', 'elu', 'embedding', 'eq', 'equal', 'equal_to', 'erf', 'erfc', 'exp', 'exp2', 'expm1', 'flatten', 'flip', 'fliplr', 'flipud', 'floor', 'floor_divide', 'fmod', 'fold', 'frac', 'gather', 'gaussian_nll_loss', 'ge', 'gelu', 'ger', 'glu', 'greater_or_equal', 'greater_than', 'grid_sample', 'group_norm', 'gt', 'gumbel_softmax', 'hardshrink', 'hardsigmoid', 'hardswish', 'hardtanh', 'hinge_embedding_loss', 'hsplit', 'hstack', 'huber_loss', 'hypot', 'index_add', 'index_fill', 'index_select', 'inner', 'instance_norm', 'interpolate', 'isclose', 'isin', 'kl_div', 'kron', 'kthvalue', 'l1_loss', 'layer_norm', 'le', 'leaky_relu', 'lerp', 'less_or_equal', 'less_than', 'linear', 'local_response_norm', 'log', 'log10', 'log1p', 'log2', 'log_softmax', 'logaddexp', 'logical_and', 'logical_not', 'logical_or', 'logical_xor', 'logit', 'logsigmoid', 'logsumexp', 'lp_pool2d', 'lt', 'margin_ranking_loss', 'masked_fill', 'masked_select', 'matmul', 'max', 'max_pool1d', 'max_pool2d', 'max_pool3d', 'maximum', 'mean', 'median', 'meshgrid', 'min', 'minimum', 'mish', 'mm', 'moveaxis', 'movedim', 'mse_loss', 'mul', 'multi_head_attention', 'multi_margin_loss', 'multilabel_soft_margin_loss', 'multiply', 'mv', 'nan_to_num', 'nansum', 'narrow', 'ne', 'neg', 'negative', 'nll_loss', 'nonzero', 'norm', 'normalize', 'not_equal_to', 'one_hot', 'outer', 'overwrite', 'packed_attention', 'pad', 'pairwise_distance', 'pdist', 'permute', 'pixel_shuffle', 'pixel_unshuffle', 'poisson_nll_loss', 'pow', 'prelu', 'prod', 'quantile', 'ravel', 'reciprocal', 'relu', 'relu6', 'remainder', 'repeat', 'repeat_interleave', 'reshape', 'rms_norm', 'roll', 'rot90', 'round', 'row_stack', 'rsqrt', 'scaled_dot_product_attention', 'scatter', 'scatter_add', 'searchsorted', 'select', 'selu', 'sigmoid', 'sign', 'silu', 'sin', 'sinh', 'smooth_l1_loss', 'soft_margin_loss', 'softmax', 'softmin', 'softplus', 'softshrink', 'softsign', 'sort', 'split', 'spread', 'sqrt', 'square', 'squeeze', 'stack', 'std', 'std_mean', 'sub', 'subtract', 'sum', 'swap_dimensions', 'swapaxes', 'swapdims', 'take', 'take_along_dim', 'tan', 'tanh', 'tanhshrink', 'tensor_split', 'tensordot', 'threshold', 'tile', 'to_bool', 'to_float', 'to_int', 'topk', 'trace', 'transpose', 'tril', 'triplet_margin_loss', 'triu', 'true_divide', 'trunc', 'unbind', 'unflatten', 'unfold', 'unique', 'unsqueeze', 'upsample', 'var', 'var_mean', 'vector_norm', 'vsplit', 'vstack', 'where', 'windows', 'xlogy']

relu_: Callable[..., Tensor]
sigmoid_: Callable[..., Tensor]
tanh_: Callable[..., Tensor]
masked_fill_: Callable[..., Tensor]
tril_: Callable[..., Tensor]
triu_: Callable[..., Tensor]
mul_: Callable[..., Tensor]
multiply_: Callable[..., Tensor]
subtract_: Callable[..., Tensor]
addcdiv_: Callable[..., Tensor]
addcmul_: Callable[..., Tensor]
clamp_max_: Callable[..., Tensor]
clamp_min_: Callable[..., Tensor]
cosh_: Callable[..., Tensor]
exp2_: Callable[..., Tensor]
frac_: Callable[..., Tensor]
lerp_: Callable[..., Tensor]
log2_: Callable[..., Tensor]
log10_: Callable[..., Tensor]
logit_: Callable[..., Tensor]
nan_to_num_: Callable[..., Tensor]
neg_: Callable[..., Tensor]
reciprocal_: Callable[..., Tensor]
sinh_: Callable[..., Tensor]
tan_: Callable[..., Tensor]
abs_: Callable[..., Tensor]
acos_: Callable[..., Tensor]
asin_: Callable[..., Tensor]
atan_: Callable[..., Tensor]
clamp_: Callable[..., Tensor]
clip_: Callable[..., Tensor]
cos_: Callable[..., Tensor]
erf_: Callable[..., Tensor]
exp_: Callable[..., Tensor]
expm1_: Callable[..., Tensor]
hypot_: Callable[..., Tensor]
log_: Callable[..., Tensor]
pow_: Callable[..., Tensor]
rsqrt_: Callable[..., Tensor]
sin_: Callable[..., Tensor]
sqrt_: Callable[..., Tensor]
square_: Callable[..., Tensor]
scatter_: Callable[..., Tensor]
scatter_add_: Callable[..., Tensor]
addmm_: Callable[..., Tensor]
cumsum_: Callable[..., Tensor]
index_add_: Callable[..., Tensor]
index_fill_: Callable[..., Tensor]
ceil_: Callable[..., Tensor]
div_: Callable[..., Tensor]
divide_: Callable[..., Tensor]
floor_: Callable[..., Tensor]
floor_divide_: Callable[..., Tensor]
fmod_: Callable[..., Tensor]
log1p_: Callable[..., Tensor]
remainder_: Callable[..., Tensor]
round_: Callable[..., Tensor]
sign_: Callable[..., Tensor]
trunc_: Callable[..., Tensor]
