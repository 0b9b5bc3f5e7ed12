"""Recurrent layers over a sequence: a product and a kernel each step, backward too. T N H: steps, rows, states."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from clcomm.engine.autograd import Context, Op
from clcomm.engine.device import Device
from clcomm.engine.ops.matmul import column_sums, linear, multiply, transposed_copy
from clcomm.engine.ops.shape import copy_part, fill
from clcomm.engine.tensor import Tensor, copy_into, empty
from clcomm.engine.view import Block


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
