"""Softmax, log-softmax and log-sum-exp, stable for logits of any size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.device import Device
from clcomm.engine.ops.elementwise import mul
from clcomm.engine.ops.matmul import column_sums, linear, multiply, transposed_copy
from clcomm.engine.ops.shape import copy_part, fill, reshape, transpose
from clcomm.engine.ops.types import pytorch_names
from clcomm.engine.random_stream import RandomStream
from clcomm.engine.tensor import Shape, Tensor, copy_into, empty, float_tensor, whole_rows
from clcomm.engine.view import Block


class _RowOp(Op):
    """y = f(each row of x's last dimension); backward needs y alone."""

    kernel_name: str

    @classmethod
    def shape_of_none(cls, x: Tensor) -> Shape | None:
        return x.shape

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


@pytorch_names
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


@pytorch_names
def softmax(x: Tensor, axis: int | None = None) -> Tensor:
    """Return exp(x) / sum(exp(x)) along `axis`; None: PyTorch's choice, of 0, 1 and 3 dimensions the first, else 1.

    x: float32 of at least one dimension; the result has its shape.
    """
    return _along(SoftmaxOp, "softmax", x, axis)


@pytorch_names
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
    if not -x.ndim <= axis <= last:
        raise ArgumentError(f"{name}: axis {axis} does not fit a tensor of shape {x.shape}")
    if axis in (-1, last):
        whole_rows(name, x)
        return op.apply(x)
    order = list(range(x.ndim))
    order[axis], order[last] = order[last], order[axis]
    return transpose(op.apply(transpose(x, tuple(order))), tuple(order))


# --- Dropout; its mask is computed from counters in forward and again in backward. ---

#: Elements whose random words are computed together, as in dropout.cl.
_GROUP = 32


class DropoutOp(Op):
    """x / (1 - p) where an element is kept, else 0; `p` is below 1."""

    keeps_columns = True

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, p: float, stream: RandomStream | None) -> Tensor:
        ctx.p, ticket = p, (RandomStream.of(x.device) if stream is None else stream).ticket()
        ctx.save(ticket)
        return masked(x, ticket, p, empty(x.device, x.shape))

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ticket,) = ctx.saved
        return (masked(grad, ticket, ctx.p, ctx.out(0)),)


def masked(x: Tensor, ticket: Tensor, p: float, out: Tensor) -> Tensor:
    """Queue out = x / (1 - p) where the draw of a ticket keeps an element, else 0; return out."""
    device, size = x.device, x.numel()
    threshold = min(round(p * 2**32), 2**32 - 1)
    kernel = device.kernel("dropout", "dropout")
    device.launch(kernel, *device.grid(size), out, x, ticket, threshold, 1.0 / (1.0 - p), size, -(-size // _GROUP))
    return out


def dropout(x: Tensor, p: float = 0.5, training: bool = True, *, stream: RandomStream | None = None) -> Tensor:
    """Return x with each element set to 0 with probability p, and divided by 1 - p else; x itself if not `training`.

    x: float32 of any shape, which the result has too.

    The mask follows from `stream`, by default the device's RandomStream: the seed, the rank, the number of draws
    before, and the element's index; it does not depend on the device. With p of 1 all elements are 0; NaN and infinity
    become NaN where they are dropped, as in PyTorch. Source: Srivastava et al., "Dropout: a simple way to prevent
    neural networks from overfitting", 2014. Raises ArgumentError unless p is from 0 to 1.
    """
    float_tensor("dropout", x)
    check_probability("dropout", p)
    if not training or p == 0:
        return x
    return mul(x, 0.0) if p == 1 else DropoutOp.apply(x, p=float(p), stream=stream)


def check_probability(name: str, p: float) -> None:
    if not isinstance(p, (int, float)) or not 0 <= p <= 1:
        raise ArgumentError(f"{name}: expected p from 0 to 1, got {p!r}")


# --- Recurrent layers over a sequence: a product and a kernel each step, backward too. T N H: steps, rows, states. ---


class Cell(NamedTuple):
    """A kind of cell: its number in recurrent.cl, its gates, what it keeps of them, and its states."""

    number: int
    gates: int
    kept: int
    states: int


CELLS = {"tanh": Cell(0, 1, 1, 1), "relu": Cell(1, 1, 1, 1), "lstm": Cell(2, 4, 4, 2), "gru": Cell(3, 3, 4, 1)}


class RecurrentOp(Op):
    """The states after each step from the gates' parts x W_ih^T + b_ih [T, N, gates * H]; then the last h, and c.

    The result is [T + states, N, H]. `lengths`: int32 [N], each row's steps, after which results are 0.
    """

    @staticmethod
    def forward(
        ctx: Context, gates: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor | None, c: Tensor | None,
        lengths: Tensor | None, *, cell: Cell, reverse: bool,
    ) -> Tensor:  # fmt: skip
        device, (steps, rows, _), columns = gates.device, gates.shape, weight.shape[1]
        out = empty(device, (steps + cell.states, rows, columns))
        kept = empty(device, (steps, rows, cell.kept * columns))
        before = empty(device, (steps, rows, columns))
        cells = empty(device, (steps, rows, columns)) if cell.states > 1 else before
        states = [_begun(device, (rows, columns), each) for each in (h, c)[: cell.states]]
        products = empty(device, (rows, cell.gates * columns))
        turned = transposed_copy(weight) if device.is_cpu else None
        added = device.keep(("zeros", products.shape[1]), lambda: np.zeros(products.shape[1], np.float32))
        until = _until(device, lengths, steps, rows)
        kernel = device.kernel("recurrent", "recurrent_step", CELL=cell.number)
        grid = device.row_grid(rows, columns)
        for number in range(steps):
            if not number and h is None:
                fill(products, 0.0)
            elif turned is None:
                multiply(states[0], weight, products, transpose_b=True)
            else:
                multiply(states[0], turned, products)
            device.launch(
                kernel, *grid, out, kept, before, cells, states[0], states[-1], gates, products,
                added if bias is None else bias, until, steps - 1 - number if reverse else number, rows, columns,
            )  # fmt: skip
        for number, state in enumerate(states):
            copy_part(state.shape, out, _row(out, steps + number), state, _row(state, 0))
        ctx.cell, ctx.reverse, ctx.until = cell, reverse, until
        ctx.save(weight, kept, before, cells)
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Queue the steps' gradients, the last one first, then those of W_hh and b_hh over all steps at once."""
        weight, kept, before, cells = ctx.saved
        cell, device, (steps, rows, columns) = ctx.cell, grad.device, before.shape
        wide = (steps, rows, cell.gates * columns)
        dgates = ctx.out(0) if ctx.needs[0] else empty(device, wide)
        dhidden = empty(device, wide) if cell is CELLS["gru"] else dgates
        states = [_begun(device, (rows, columns), grad, steps + number) for number in range(cell.states)]
        products, step = empty(device, (rows, columns)), empty(device, wide[1:])
        fill(products, 0.0)
        kernel = device.kernel("recurrent", "recurrent_gradient", CELL=cell.number)
        grid = device.row_grid(rows, columns)
        for number in range(steps):
            device.launch(
                kernel, *grid, dgates, dhidden, step, states[0], states[-1], grad, kept, before, cells, products,
                ctx.until, number if ctx.reverse else steps - 1 - number, rows, columns,
            )  # fmt: skip
            if number < steps - 1 or ctx.needs[3]:
                multiply(step, weight, products)
        dw, db, dh, dc = (ctx.out(index) if ctx.needs[index] else None for index in range(1, 5))
        flat = dhidden.alias((steps * rows, wide[2]))
        if dw is not None:
            multiply(flat, before.alias((steps * rows, columns)), dw, transpose_a=True)
        if db is not None:
            column_sums(flat, db)
        if dh is not None:
            add = device.kernel("elementwise", "add_into")
            copy_into(dh, states[0])
            device.launch(add, *device.grid(dh.numel()), dh, products, dh.numel())
        if dc is not None:
            copy_into(dc, states[1])
        return dgates if ctx.needs[0] else None, dw, db, dh, dc, None


def _row(x: Tensor, index: int) -> Block:
    return Block(index * x.shape[-2] * x.shape[-1], (x.shape[-1], 1))


def _begun(device: Device, shape: tuple[int, int], source: Tensor | None, index: int = 0) -> Tensor:
    """Return a copy of the matrix `index` of the source; zeros without one."""
    out = empty(device, shape)
    if source is None:
        fill(out, 0.0)
    else:
        copy_part(shape, out, _row(out, 0), source, _row(source, index))
    return out


def _until(device: Device, lengths: Tensor | None, steps: int, rows: int) -> Tensor | object:
    if lengths is not None:
        return lengths
    return device.keep(("lengths", steps, rows), lambda: np.full(rows, steps, np.int32))


def recurrent(
    x: Tensor, weights: list[Tensor], biases: list[Tensor] | None, states: list[Tensor] | None, cell: Cell,
    lengths: Tensor | None = None, *, reverse: bool = False,
) -> Tensor:  # fmt: skip
    """Return the states after each step of one layer in one direction, then the last ones: [T + states, N, H].

    Args:
        x: float32 [T, N, C].
        weights: W_ih [gates * H, C] and W_hh [gates * H, H].
        biases: b_ih and b_hh, each [gates * H]; None: none.
        states: h, and c of an LSTM, before the first step, [N, H]; None: zeros.
        lengths: int32 [N]: the steps of each row, after which results are 0 and states stay; None: all.
        reverse: from the last step to the first.
    """
    own, hidden = (None, None) if biases is None else biases
    gates = linear(x, weights[0], own)
    h, c = (*(states or ()), None, None)[:2]
    return RecurrentOp.apply(gates, weights[1], hidden, h, c, lengths, cell=cell, reverse=reverse)
