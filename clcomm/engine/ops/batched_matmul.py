"""Matrix products of tensors: the matrices of their last two dimensions, with NumPy's broadcasting of the others.

M N K: each result is M x N and its sums run over K.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.ops.matmul import MatMul, multiply, multiply_batch, same_device
from clcomm.engine.ops.reduce import sum_over
from clcomm.engine.ops.shape import reshape
from clcomm.engine.ops.types import broadcast_axes, broadcast_shape
from clcomm.engine.tensor import Shape, Tensor, empty, float_tensor, wrap


class BatchedMatMul(Op):
    """C[..., M, N] = op(A)[..., M, K] op(B)[..., K, N]; op transposes the operands named in `turned`."""

    @classmethod
    def shape_of_none(cls, a: Tensor, b: Tensor, *, turned: tuple[bool, bool]) -> Shape:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        return (*batch, a.shape[-1 - (not turned[0])], b.shape[-2 + (not turned[1])])

    @staticmethod
    def forward(ctx: Context, a: Tensor, b: Tensor, *, turned: tuple[bool, bool]) -> Tensor:
        ctx.turned = turned
        ctx.save(a, b)
        out = empty(a.device, BatchedMatMul.shape_of_none(a, b, turned=turned))
        _multiply(a, b, out, *turned)
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        """dA = dC op(B)^T and dB = op(A)^T dC, turned where A and B are, and summed where they were broadcast."""
        a, b = ctx.saved
        turned_a, turned_b = ctx.turned
        da = db = None
        if ctx.needs[0]:
            factors = (b, grad, turned_b, True) if turned_a else (grad, b, False, not turned_b)
            da = _gradient(ctx, 0, grad, *factors)
        if ctx.needs[1]:
            factors = (grad, a, True, turned_a) if turned_b else (a, grad, not turned_a, False)
            db = _gradient(ctx, 1, grad, *factors)
        return da, db


def _gradient(ctx: Context, index: int, grad: Tensor, left: Tensor, right: Tensor, *turned: bool) -> Tensor:
    """Return the gradient of input `index`, from products with those of the whole batch."""
    shape, batch = ctx.inputs[index].shape, grad.shape[:-2]
    out = ctx.out(index)
    if math.prod(shape[:-2]) == 1 and left.shape[:-2] == right.shape[:-2] and turned == (True, False):
        # The sum over the batch is a part of the products' sums.
        _multiply(_as_one(left), _as_one(right), wrap(out.device, out.buffer, shape[-2:]), *turned)
    elif shape[:-2] == batch:
        _multiply(left, right, out, *turned)
    else:
        whole = empty(out.device, (*batch, *shape[-2:]))
        _multiply(left, right, whole, *turned)
        sums = wrap(out.device, out.buffer, (1,) * (whole.ndim - out.ndim) + shape)
        sum_over(whole, broadcast_axes(shape, whole.shape), out=sums)
    return out


def _as_one(x: Tensor) -> Tensor:
    return x.alias((math.prod(x.shape[:-1]), x.shape[-1]))


def _multiply(a: Tensor, b: Tensor, out: Tensor, turned_a: bool, turned_b: bool) -> None:
    """Queue out = op(a) op(b): as one product where one matrix b serves all, else one for each of the batch."""
    count = math.prod(out.shape[:-2])
    if count == math.prod(a.shape[:-2]) and math.prod(b.shape[:-2]) == 1 and (count == 1 or not turned_a):
        left, whole = _as_one(a), out.alias((out.numel() // out.shape[-1], out.shape[-1]))
        multiply(left, b.alias(b.shape[-2:]), whole, transpose_a=turned_a, transpose_b=turned_b)
        return
    key = a.shape, b.shape, out.shape
    firsts = out.device.keep(("batches", *key), lambda: _firsts(*key))
    multiply_batch(a, b, out, firsts, transpose_a=turned_a, transpose_b=turned_b)


@lru_cache(maxsize=256)
def _firsts(a: Shape, b: Shape, out: Shape) -> np.ndarray:
    """Return, for each product of the batch, the first elements of its two factors."""
    places = []
    for shape in (a, b):
        numbers = np.arange(math.prod(shape[:-2]), dtype=np.int32).reshape(shape[:-2])
        places.append(np.broadcast_to(numbers * (shape[-2] * shape[-1]), out[:-2]).reshape(-1))
    return np.ascontiguousarray(np.stack(places, 1), np.int32)


def matmul(a: Tensor, b: Tensor, *, transpose_a: bool = False, transpose_b: bool = False) -> Tensor:
    """Return the matrix products of `a` [..., M, K] and `b` [..., K, N] as NumPy's matmul: [..., M, N].

    The dimensions before the last two broadcast. A vector counts as a row on the left and as a column on the right,
    and that dimension is left out of the result.

    Args:
        transpose_a: whether the matrices of `a` lie transposed, as [..., K, M]; they are not copied.
        transpose_b: the same for `b`, as [..., N, K].

    Raises ArgumentError unless both are float32 on one device, their shapes fit, and transposed operands are matrices.
    """
    turned = (bool(transpose_a), bool(transpose_b))
    for name, value, is_turned in (("a", a, turned[0]), ("b", b, turned[1])):
        least = 2 if is_turned else 1
        if float_tensor(f"matmul: {name}", value).ndim < least:
            raise ArgumentError(f"matmul: {name}: expected at least {_dimensions(least)}, got shape {value.shape}")
    same_device("matmul", a, b)
    left = reshape(a, (1, *a.shape)) if a.ndim == 1 else a
    right = reshape(b, (*b.shape, 1)) if b.ndim == 1 else b
    terms = left.shape[-2 if turned[0] else -1], right.shape[-1 if turned[1] else -2]
    if terms[0] != terms[1]:
        raise ArgumentError(
            f"matmul: expected as many rows in b as columns in a, got {terms[1]} and {terms[0]}; a has the shape "
            f"{a.shape}{' (transposed)' * turned[0]}, b {b.shape}{' (transposed)' * turned[1]}"
        )
    broadcast_shape("matmul", left.shape[:-2], right.shape[:-2])
    if left.ndim == right.ndim == 2 and turned == (False, False):
        product = MatMul.apply(left, right)
    else:
        product = BatchedMatMul.apply(left, right, turned=turned)
    if a.ndim > 1 and b.ndim > 1:
        return product
    rows, columns = product.shape[-2:]
    return reshape(product, (*product.shape[:-2], *[rows] * (a.ndim > 1), *[columns] * (b.ndim > 1)))


def _dimensions(count: int) -> str:
    return f"{count} dimension{'s' * (count > 1)}"
