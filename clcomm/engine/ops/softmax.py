"""Softmax, log-softmax and log-sum-exp, stable for logits of any size."""

from __future__ import annotations

import math
from collections.abc import Sequence

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.ops.shape import reshape, transpose
from clcomm.engine.ops.types import dimension_of
from clcomm.engine.tensor import Shape, Tensor, empty, float_tensor, whole_rows


class _RowOp(Op):
    """y = f(each row of x's last dimension); backward needs y alone."""

    kernel_name: str

    keeps_shape = True

    @classmethod
    def forward(cls, ctx: Context, x: Tensor) -> Tensor:
        device, columns = x.device, x.shape[-1]
        rows = x.numel() // columns
        y = empty(device, x.shape)
        device.launch(device.kernel("softmax", cls.kernel_name), *device.row_grid(rows, columns), y, x, rows, columns)
        ctx.save(y)
        return y

    @classmethod
    def backward(cls, ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved
        device, columns = y.device, y.shape[-1]
        rows, dx = y.numel() // columns, ctx.out(0)
        kernel = device.kernel("softmax", cls.kernel_name + "_grad")
        device.launch(kernel, *device.row_grid(rows, columns), dx, grad, y, rows, columns)
        return (dx,)


class SoftmaxOp(_RowOp):
    """exp(x) / sum(exp(x)) along the last dimension."""

    kernel_name = "softmax"


class LogSoftmaxOp(_RowOp):
    """x - log(sum(exp(x))) along the last dimension."""

    kernel_name = "log_softmax"


class LogSumExp(Op):
    """log(sum(exp(x))) along the last dimension."""

    @classmethod
    def shape_of_none(cls, x: Tensor) -> Shape | None:
        return x.shape[:-1] if x.shape[-1] else None

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        device, columns, y = x.device, x.shape[-1], empty(x.device, x.shape[:-1])
        kernel = device.kernel("softmax", "log_sum_exp")
        device.launch(kernel, *device.row_grid(y.numel(), columns), y, x, y.numel(), columns)
        ctx.save(x, y)
        return y

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved
        device, columns, dx = x.device, x.shape[-1], ctx.out(0)
        kernel = device.kernel("softmax", "log_sum_exp_grad")
        device.launch(kernel, *device.row_grid(y.numel(), columns), dx, grad, x, y, y.numel(), columns)
        return (dx,)


def logsumexp(x: Tensor, axis: int | Sequence[int] = -1, keepdims: bool = False) -> Tensor:
    """Return log(sum(exp(x))) over the dimensions `axis`, which `keepdims` keeps with size 1.

    x: float32 of at least one dimension.
    Raises ArgumentError for dimensions that x does not have.
    """
    float_tensor("logsumexp", x)
    given = (axis,) if isinstance(axis, int) else tuple(axis)
    axes = tuple([a + x.ndim if a < 0 else a for a in given])
    if not axes or len(set(axes)) != len(axes) or any(not 0 <= a < x.ndim for a in axes):
        raise ArgumentError(f"logsumexp: axis {axis} does not fit a tensor of shape {x.shape}")
    if x.ndim - 1 in axes:
        whole_rows("logsumexp", x)
    others = [d for d in range(x.ndim) if d not in axes]
    order, kept = (*others, *sorted(axes)), tuple([x.shape[d] for d in others])
    lying = x if order == tuple(range(x.ndim)) else transpose(x, order)
    y = LogSumExp.apply(reshape(lying, (*kept, math.prod([x.shape[d] for d in axes]))))
    return reshape(y, tuple([1 if d in axes else n for d, n in enumerate(x.shape)])) if keepdims else y


def softmax(x: Tensor, axis: int | None = None) -> Tensor:
    """Return exp(x) / sum(exp(x)) along `axis`; None: PyTorch's choice, of 0, 1 and 3 dimensions the first, else 1.

    x: float32 of at least one dimension; the result has its shape.
    """
    return _along(SoftmaxOp, "softmax", x, axis)


def log_softmax(x: Tensor, axis: int | None = None) -> Tensor:
    """Return x - log(sum(exp(x))) along `axis`; None: PyTorch's choice, of 0, 1 and 3 dimensions the first, else 1.

    x: float32 of at least one dimension; the result has its shape.
    """
    return _along(LogSoftmaxOp, "log_softmax", x, axis)


def _along(op: type[_RowOp], name: str, x: Tensor, axis: int | None) -> Tensor:
    float_tensor(name, x)
    last = x.ndim - 1
    if axis is None:
        axis = int(x.ndim not in (0, 1, 3))
    axis = dimension_of(name, x.shape, axis)
    if axis == last:
        whole_rows(name, x)
        return op.apply(x)
    order = list(range(x.ndim))
    order[axis], order[last] = order[last], order[axis]
    return transpose(op.apply(transpose(x, tuple(order))), tuple(order))
