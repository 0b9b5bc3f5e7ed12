"""The names of all functions of tensors, and which of them are methods of Tensor: the one place that lists them.

`python -m docs.stubs` writes from this what type checkers and editors read: functional.pyi and tensor_functions.pyi.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from inspect import signature
from types import FunctionType
from typing import Any, NamedTuple

from clcomm.engine.ops.in_place import overwrite
from clcomm.engine.ops.shape import squeeze, unsqueeze
from clcomm.engine.ops.types import pytorch_names, typed
from clcomm.engine.tensor import Tensor
from clcomm.engine.tensor_in_place import InPlaceMethods
from clcomm.engine.tensor_methods import TensorMethods
from clcomm.engine.tensor_shapes import ShapeMethods

#: A file of clcomm/engine/ops, and its functions: `name`; `.name`, a method of Tensor too; `.name_`, a method with a
#: form in place besides, `name_`; `other=name`, another name for one.
_TABLE = """
activation: gelu leaky_relu .relu_ .sigmoid_ silu .tanh_
arrangement: .dot .flip meshgrid .narrow .outer pad .repeat .roll .unbind unfold windows
attention: attention_weights multi_head_attention packed_attention scaled_dot_product_attention
batch_norm: batch_norm
batched_matmul: .matmul
blocks: concat cat=concat concatenate=concat .split stack
class_losses: cross_entropy ctc_loss nll_loss
comparisons: equal_to .eq=equal_to greater_or_equal .ge=greater_or_equal greater_than .gt=greater_than less_or_equal
comparisons: .le=less_or_equal less_than .lt=less_than .logical_and .logical_not .logical_or .logical_xor .masked_fill_
comparisons: not_equal_to .ne=not_equal_to one_hot to_bool to_int .tril_ .triu_ where
composed: binary_cross_entropy cosine_similarity elu glu hardsigmoid hardswish hardtanh huber_loss kl_div l1_loss
composed: logsigmoid mish normalize .prelu relu6 rms_norm softplus threshold
conv2d: conv2d conv_relu_pool conv_transpose2d
dropout: dropout
elementwise: .add .mul_ .multiply_=mul .sub .subtract_=sub
formulas: .addcdiv_ .addcmul_ .allclose .amax .amin .clamp_max_ .clamp_min_ .cosh_ .count_nonzero .cumprod .diff .equal
formulas: .erfc .exp2_ .frac_ .isclose .kthvalue .lerp_ .log2_ .log10_ .logaddexp .logit_ .nan_to_num_ .nansum .neg_
formulas: .negative .quantile .ravel .reciprocal_ .sinh_ .tan_
functions: .abs_ .absolute=abs .acos_ .arccos=acos .asin_ .arcsin=asin .atan_ .arctan=atan .atan2 .arctan2=atan2
functions: .clamp_ .clip_=clamp .cos_ .erf_ .exp_ .expm1_ .hypot_ .log_ .maximum .minimum .pow_ .rsqrt_ .sin_ .sqrt_
functions: .square_ .xlogy
in_place: assign overwrite .scatter_
indexing: embedding .gather .index_select .scatter_add_ spread take
joining: atleast_1d atleast_2d atleast_3d block_diag broadcast_tensors cartesian_prod column_stack dstack .hsplit
joining: hstack .tensor_split .vsplit vstack row_stack=vstack
loss: binary_cross_entropy_with_logits mse_loss smooth_l1_loss
matmul: linear
matrices: .addmm_ .addmv .baddbmm .bmm cdist .cross .diag .diag_embed .diagonal .dist einsum .ger .inner .kron .mm .mv
matrices: pairwise_distance pdist tensordot .trace vector_norm
norms: group_norm layer_norm .var
one_dimension: adaptive_avg_pool1d adaptive_max_pool1d avg_pool1d conv1d conv_transpose1d max_pool1d
ordered: .all .any .argmax .argmin .argsort .chunk .cumsum_ .max .median .min .norm .prod .sort .std std_mean .topk
ordered: var_mean
picking: .argwhere .bincount bucketize .fliplr .flipud .index_add_ .index_fill_ .isin .masked_select .movedim
picking: .moveaxis=movedim .nonzero .repeat_interleave .rot90 searchsorted .select .take_along_dim .tile .unflatten
picking: .unique
pool: adaptive_avg_pool2d avg_pool2d max_pool2d
rarer: alpha_dropout celu channel_shuffle cosine_embedding_loss dropout1d dropout2d dropout3d gaussian_nll_loss
rarer: gumbel_softmax .hardshrink hinge_embedding_loss instance_norm margin_ranking_loss multi_margin_loss
rarer: multilabel_soft_margin_loss poisson_nll_loss selu soft_margin_loss softmin softshrink softsign tanhshrink
rarer: triplet_margin_loss
reduce: .broadcast_to .mean .sum
rounding: .ceil_ .div_ .divide_=div .true_divide=div .floor_ .floor_divide_ .fmod_ .log1p_ .remainder_ .round_ .sign_
rounding: .trunc_
sampling: adaptive_max_pool2d affine_grid fold grid_sample interpolate upsample=interpolate local_response_norm
sampling: lp_pool2d pixel_shuffle pixel_unshuffle
shape: .clone .flatten reshape .squeeze swap_dimensions .swapaxes=swap_dimensions .swapdims=swap_dimensions transpose
shape: permute=transpose .unsqueeze
softmax: .log_softmax .logsumexp .softmax
three_dimensions: adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d conv3d conv_transpose3d max_pool3d
types: to_float
"""
#: Operators between two, each with a form in place; those that a number on the left calls; and all others.
_BETWEEN = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_divide", "mod": "remainder",
    "pow": "pow", "and": "bits &", "or": "bits |", "xor": "bits ^", "lshift": "shifted <<",
    "rshift": "shifted >>",
}  # fmt: skip
_OF_NUMBERS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_OTHERS = {
    "matmul": "matmul", "lt": "less_than", "le": "less_or_equal", "gt": "greater_than", "ge": "greater_or_equal",
    "neg": "neg", "abs": "abs", "invert": "inverted", "getitem": "take",
}  # fmt: skip
#: What operators and methods of Tensor call besides; the functions of images take one without its batch, too.
_OF_METHODS = {
    "ops.comparisons": ("bits", "inverted"), "ops.in_place": ("write",), "ops.shape": ("contiguous", "taken_again"),
    "ops.types": ("shifted",), "view": ("following",),
}  # fmt: skip
_OF_IMAGES = ("conv", "conv_transpose", "max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool")
_BATCHED = {"conv_relu_pool": 4} | {f"{name}{d}d": d + 2 for name in _OF_IMAGES for d in (1, 2, 3)}


class Entry(NamedTuple):
    """A public function: its name, its file and its name there; whether it is a method, and has a form in place."""

    name: str
    file: str
    own_name: str
    is_method: bool
    has_in_place: bool


def entries() -> Iterator[Entry]:
    """Yield all public functions."""
    for row in _TABLE.strip().splitlines():
        file, _, names = row.partition(": ")
        for each in names.split():
            marked, _, other = each.partition("=")
            name = marked.strip("._")
            yield Entry(name, file, other or name, marked.startswith("."), marked.endswith("_"))


def functions() -> dict[str, Callable[..., Any]]:
    """Return all functions by their names, with those in place and those for methods; give the methods to Tensor."""
    found: dict[str, Callable[..., Any]] = {}
    for file, names in _OF_METHODS.items():
        found |= {name: getattr(import_module(f"clcomm.engine.{file}"), name) for name in names}
    for _class in (ShapeMethods, InPlaceMethods, TensorMethods, Tensor):
        for name, method in [*vars(_class).items()]:
            if not name.startswith("_") and isinstance(method, FunctionType):
                setattr(_class, name, typed(method, name))
    methods: set[str] = set()
    for each in entries():
        function = getattr(import_module(f"clcomm.engine.ops.{each.file}"), each.own_name)
        if {"axis", "keepdims"} & {*signature(function).parameters}:
            function = pytorch_names(function)
        if each.name in _BATCHED:
            function = _unbatched(function, _BATCHED[each.name])
        own = {each.name: typed(function, each.name)}
        if each.has_in_place:
            own[f"{each.name}_"] = _in_place(own[each.name])
        found |= own
        methods.update(own if each.is_method else ())
    for name, method in {**{each: found[each] for each in sorted(methods)}, **operators(found)}.items():
        setattr(Tensor, name, method)
    return found


def operators(found: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return the operators of Tensor by their methods' names, of the functions that were found."""
    own = {f"__{name}__": found[function] for name, function in _OTHERS.items()}
    for name, function in _BETWEEN.items():
        called, _, sign = function.partition(" ")
        operation = _signed(found[called], sign) if sign else found[called]
        own |= {f"__{name}__": operation, f"__i{name}__": _in_place(operation)}
        if name in _OF_NUMBERS:
            own[f"__r{name}__"] = operation if name in ("add", "mul") else _turned(operation)
    return own


def _signed(function: Callable[..., Tensor], sign: str) -> Callable[..., Tensor]:
    return lambda a, b: function(sign, a, b)


def _turned(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda own, other: function(other, own)


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
