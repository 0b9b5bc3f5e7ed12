"""A tensor's methods that are the functions of their names, with the tensor first; `functional` sets them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

# --- A tensor's methods that give its elements another shape or place; each calls the function of the same name. ---

AnyTensor = TypeVar("AnyTensor")  # Tensor, whose module imports this one
Result = TypeVar("Result", covariant=True)


class Functions(Protocol[Result]):
    def __getattr__(self, name: str) -> Callable[..., Result]: ...


class ShapeMethods(Generic[AnyTensor]):
    """The methods of Tensor that change its shape, or the order of its elements."""

    __slots__ = ()

    _functional: Functions[AnyTensor]  # which imports this file and sets it
    shape: tuple[int, ...]

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the length of one dimension."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def reshape(self, *shape: int | Sequence[int]) -> AnyTensor:
        """Return the same elements in another shape, one dimension of which may be -1; shares memory."""
        return self._functional.reshape(self, sizes_of(shape))

    def transpose(self, *axes: int | Sequence[int]) -> AnyTensor:
        """Return the tensor with two dimensions swapped, as PyTorch's `transpose(0, 1)`.

        More or fewer numbers, or a sequence, are the new order of all dimensions, reversed by default, as in NumPy.
        """
        if len(axes) == 2 and all(isinstance(axis, (int, np.integer)) for axis in axes):
            return self._functional.swap_dimensions(self, *sizes_of(axes))
        return self._functional.transpose(self, sizes_of(axes) or None)

    def permute(self, *axes: int | Sequence[int]) -> AnyTensor:
        """Return the tensor with its dimensions in the order of `axes`."""
        return self._functional.transpose(self, sizes_of(axes))

    @property
    def T(self) -> AnyTensor:
        """The tensor with its dimensions reversed."""
        return self._functional.transpose(self, None)

    def view(self, *shape: int | Sequence[int]) -> AnyTensor:
        """Return `reshape`, which shares memory as PyTorch's view does."""
        return self._functional.reshape(self, sizes_of(shape))

    def expand(self, *shape: int | Sequence[int]) -> AnyTensor:
        """Return the tensor repeated along dimensions of size 1 and new ones in front; -1 keeps a size."""
        return self._functional.broadcast_to(self, sizes_of(shape))

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    ndimension, nelement = dim, numel

    def contiguous(self) -> AnyTensor:
        """Return the tensor itself, or a copy of a view whose elements PyTorch has apart."""
        return self._functional.contiguous(self)

    def is_contiguous(self) -> bool:
        """Return whether the elements are in their order, one behind the other: True, but for views."""
        return True

    def stride(self, dim: int | None = None) -> Any:
        """Return how many elements apart neighbours along each dimension are, or along one."""
        steps = tuple([math.prod(self.shape[d + 1 :]) for d in range(len(self.shape))])
        return steps if dim is None else steps[dim]

    @property
    def mT(self) -> AnyTensor:
        """The tensor with its last two dimensions swapped."""
        return self._functional.swap_dimensions(self, -2, -1)

    def view_as(self, other: Any) -> AnyTensor:
        """Return the elements in the shape of another tensor."""
        return self._functional.reshape(self, other.shape)

    def expand_as(self, other: Any) -> AnyTensor:
        """Return the tensor repeated to the shape of another one."""
        return self._functional.broadcast_to(self, other.shape)

    def t(self) -> AnyTensor:
        """Return a matrix transposed."""
        return self._functional.transpose(self, None)


def sizes_of(given: tuple[int | Sequence[int], ...]) -> tuple[int, ...]:
    if len(given) == 1 and not isinstance(given[0], (int, np.integer)):
        return tuple(map(index, given[0]))
    return tuple(map(index, given))  # type: ignore[arg-type]


# --- A tensor's methods that are the functions of their names, with the tensor first; `functional` sets them ---


class FunctionMethods(Generic[AnyTensor]):
    """The methods of Tensor that have no text of their own: `x.exp()` is `functional.exp(x)`.

    One whose name ends with an underscore gives x itself the result of the function without it, see
    `functional.overwrite`.
    """

    __slots__ = ()

    abs: Callable[..., AnyTensor]
    abs_: Callable[..., AnyTensor]
    absolute: Callable[..., AnyTensor]
    acos: Callable[..., AnyTensor]
    acos_: Callable[..., AnyTensor]
    add: Callable[..., AnyTensor]
    addcdiv: Callable[..., AnyTensor]
    addcdiv_: Callable[..., AnyTensor]
    addcmul: Callable[..., AnyTensor]
    addcmul_: Callable[..., AnyTensor]
    addmm: Callable[..., AnyTensor]
    addmm_: Callable[..., AnyTensor]
    addmv: Callable[..., AnyTensor]
    all: Callable[..., AnyTensor]
    amax: Callable[..., AnyTensor]
    amin: Callable[..., AnyTensor]
    any: Callable[..., AnyTensor]
    arccos: Callable[..., AnyTensor]
    arcsin: Callable[..., AnyTensor]
    arctan: Callable[..., AnyTensor]
    arctan2: Callable[..., AnyTensor]
    argmax: Callable[..., AnyTensor]
    argmin: Callable[..., AnyTensor]
    argsort: Callable[..., AnyTensor]
    argwhere: Callable[..., AnyTensor]
    asin: Callable[..., AnyTensor]
    asin_: Callable[..., AnyTensor]
    atan: Callable[..., AnyTensor]
    atan2: Callable[..., AnyTensor]
    atan_: Callable[..., AnyTensor]
    baddbmm: Callable[..., AnyTensor]
    bincount: Callable[..., AnyTensor]
    bmm: Callable[..., AnyTensor]
    broadcast_to: Callable[..., AnyTensor]
    ceil: Callable[..., AnyTensor]
    ceil_: Callable[..., AnyTensor]
    clamp: Callable[..., AnyTensor]
    clamp_: Callable[..., AnyTensor]
    clamp_max: Callable[..., AnyTensor]
    clamp_max_: Callable[..., AnyTensor]
    clamp_min: Callable[..., AnyTensor]
    clamp_min_: Callable[..., AnyTensor]
    clip: Callable[..., AnyTensor]
    clip_: Callable[..., AnyTensor]
    clone: Callable[..., AnyTensor]
    cos: Callable[..., AnyTensor]
    cos_: Callable[..., AnyTensor]
    cosh: Callable[..., AnyTensor]
    cosh_: Callable[..., AnyTensor]
    count_nonzero: Callable[..., AnyTensor]
    cross: Callable[..., AnyTensor]
    cumprod: Callable[..., AnyTensor]
    cumsum: Callable[..., AnyTensor]
    cumsum_: Callable[..., AnyTensor]
    diag: Callable[..., AnyTensor]
    diag_embed: Callable[..., AnyTensor]
    diagonal: Callable[..., AnyTensor]
    diff: Callable[..., AnyTensor]
    dist: Callable[..., AnyTensor]
    div: Callable[..., AnyTensor]
    div_: Callable[..., AnyTensor]
    divide: Callable[..., AnyTensor]
    divide_: Callable[..., AnyTensor]
    dot: Callable[..., AnyTensor]
    eq: Callable[..., AnyTensor]
    erf: Callable[..., AnyTensor]
    erf_: Callable[..., AnyTensor]
    erfc: Callable[..., AnyTensor]
    exp: Callable[..., AnyTensor]
    exp2: Callable[..., AnyTensor]
    exp2_: Callable[..., AnyTensor]
    exp_: Callable[..., AnyTensor]
    expm1: Callable[..., AnyTensor]
    expm1_: Callable[..., AnyTensor]
    flatten: Callable[..., AnyTensor]
    flip: Callable[..., AnyTensor]
    fliplr: Callable[..., AnyTensor]
    flipud: Callable[..., AnyTensor]
    floor: Callable[..., AnyTensor]
    floor_: Callable[..., AnyTensor]
    floor_divide: Callable[..., AnyTensor]
    floor_divide_: Callable[..., AnyTensor]
    fmod: Callable[..., AnyTensor]
    fmod_: Callable[..., AnyTensor]
    frac: Callable[..., AnyTensor]
    frac_: Callable[..., AnyTensor]
    gather: Callable[..., AnyTensor]
    ge: Callable[..., AnyTensor]
    ger: Callable[..., AnyTensor]
    gt: Callable[..., AnyTensor]
    hardshrink: Callable[..., AnyTensor]
    hypot: Callable[..., AnyTensor]
    hypot_: Callable[..., AnyTensor]
    index_add: Callable[..., AnyTensor]
    index_add_: Callable[..., AnyTensor]
    index_fill: Callable[..., AnyTensor]
    index_fill_: Callable[..., AnyTensor]
    index_select: Callable[..., AnyTensor]
    inner: Callable[..., AnyTensor]
    isclose: Callable[..., AnyTensor]
    isin: Callable[..., AnyTensor]
    kron: Callable[..., AnyTensor]
    le: Callable[..., AnyTensor]
    lerp: Callable[..., AnyTensor]
    lerp_: Callable[..., AnyTensor]
    log: Callable[..., AnyTensor]
    log10: Callable[..., AnyTensor]
    log10_: Callable[..., AnyTensor]
    log1p: Callable[..., AnyTensor]
    log1p_: Callable[..., AnyTensor]
    log2: Callable[..., AnyTensor]
    log2_: Callable[..., AnyTensor]
    log_: Callable[..., AnyTensor]
    log_softmax: Callable[..., AnyTensor]
    logaddexp: Callable[..., AnyTensor]
    logical_and: Callable[..., AnyTensor]
    logical_not: Callable[..., AnyTensor]
    logical_or: Callable[..., AnyTensor]
    logical_xor: Callable[..., AnyTensor]
    logit: Callable[..., AnyTensor]
    logit_: Callable[..., AnyTensor]
    logsumexp: Callable[..., AnyTensor]
    lt: Callable[..., AnyTensor]
    masked_fill: Callable[..., AnyTensor]
    masked_fill_: Callable[..., AnyTensor]
    masked_select: Callable[..., AnyTensor]
    matmul: Callable[..., AnyTensor]
    maximum: Callable[..., AnyTensor]
    mean: Callable[..., AnyTensor]
    minimum: Callable[..., AnyTensor]
    mm: Callable[..., AnyTensor]
    moveaxis: Callable[..., AnyTensor]
    movedim: Callable[..., AnyTensor]
    mul: Callable[..., AnyTensor]
    mul_: Callable[..., AnyTensor]
    multiply: Callable[..., AnyTensor]
    multiply_: Callable[..., AnyTensor]
    mv: Callable[..., AnyTensor]
    nan_to_num: Callable[..., AnyTensor]
    nan_to_num_: Callable[..., AnyTensor]
    nansum: Callable[..., AnyTensor]
    narrow: Callable[..., AnyTensor]
    ne: Callable[..., AnyTensor]
    neg: Callable[..., AnyTensor]
    neg_: Callable[..., AnyTensor]
    negative: Callable[..., AnyTensor]
    norm: Callable[..., AnyTensor]
    outer: Callable[..., AnyTensor]
    pow: Callable[..., AnyTensor]
    pow_: Callable[..., AnyTensor]
    prelu: Callable[..., AnyTensor]
    prod: Callable[..., AnyTensor]
    quantile: Callable[..., AnyTensor]
    ravel: Callable[..., AnyTensor]
    reciprocal: Callable[..., AnyTensor]
    reciprocal_: Callable[..., AnyTensor]
    relu: Callable[..., AnyTensor]
    relu_: Callable[..., AnyTensor]
    remainder: Callable[..., AnyTensor]
    remainder_: Callable[..., AnyTensor]
    repeat: Callable[..., AnyTensor]
    repeat_interleave: Callable[..., AnyTensor]
    roll: Callable[..., AnyTensor]
    rot90: Callable[..., AnyTensor]
    round: Callable[..., AnyTensor]
    round_: Callable[..., AnyTensor]
    rsqrt: Callable[..., AnyTensor]
    rsqrt_: Callable[..., AnyTensor]
    scatter: Callable[..., AnyTensor]
    scatter_: Callable[..., AnyTensor]
    scatter_add: Callable[..., AnyTensor]
    scatter_add_: Callable[..., AnyTensor]
    select: Callable[..., AnyTensor]
    sigmoid: Callable[..., AnyTensor]
    sigmoid_: Callable[..., AnyTensor]
    sign: Callable[..., AnyTensor]
    sign_: Callable[..., AnyTensor]
    sin: Callable[..., AnyTensor]
    sin_: Callable[..., AnyTensor]
    sinh: Callable[..., AnyTensor]
    sinh_: Callable[..., AnyTensor]
    softmax: Callable[..., AnyTensor]
    sqrt: Callable[..., AnyTensor]
    sqrt_: Callable[..., AnyTensor]
    square: Callable[..., AnyTensor]
    square_: Callable[..., AnyTensor]
    squeeze: Callable[..., AnyTensor]
    std: Callable[..., AnyTensor]
    sub: Callable[..., AnyTensor]
    subtract: Callable[..., AnyTensor]
    subtract_: Callable[..., AnyTensor]
    sum: Callable[..., AnyTensor]
    swapaxes: Callable[..., AnyTensor]
    swapdims: Callable[..., AnyTensor]
    take_along_dim: Callable[..., AnyTensor]
    tan: Callable[..., AnyTensor]
    tan_: Callable[..., AnyTensor]
    tanh: Callable[..., AnyTensor]
    tanh_: Callable[..., AnyTensor]
    tile: Callable[..., AnyTensor]
    trace: Callable[..., AnyTensor]
    tril: Callable[..., AnyTensor]
    tril_: Callable[..., AnyTensor]
    triu: Callable[..., AnyTensor]
    triu_: Callable[..., AnyTensor]
    true_divide: Callable[..., AnyTensor]
    trunc: Callable[..., AnyTensor]
    trunc_: Callable[..., AnyTensor]
    unflatten: Callable[..., AnyTensor]
    unsqueeze: Callable[..., AnyTensor]
    var: Callable[..., AnyTensor]
    xlogy: Callable[..., AnyTensor]
    allclose: Callable[..., Any]
    chunk: Callable[..., Any]
    equal: Callable[..., Any]
    hsplit: Callable[..., Any]
    kthvalue: Callable[..., Any]
    max: Callable[..., Any]
    median: Callable[..., Any]
    min: Callable[..., Any]
    sort: Callable[..., Any]
    nonzero: Callable[..., Any]
    split: Callable[..., Any]
    tensor_split: Callable[..., Any]
    topk: Callable[..., Any]
    unbind: Callable[..., Any]
    unique: Callable[..., Any]
    vsplit: Callable[..., Any]
