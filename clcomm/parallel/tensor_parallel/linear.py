"""Linear layers divided between ranks, by outputs (column-parallel) or inputs (row-parallel), and attention by heads.

Source: Shoeybi et al., "Megatron-LM", 2019.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from clcomm.engine import functional as F
from clcomm.engine.autograd import Context, Op
from clcomm.engine.nn.attention import MultiheadAttention
from clcomm.engine.nn.layers import Linear
from clcomm.engine.nn.module import Module
from clcomm.engine.ops.matmul import LinearOp, checked_rows, column_sums, linear_of_part, multiply
from clcomm.engine.ops.types import launch_broadcast
from clcomm.engine.tensor import Tensor, empty
from clcomm.parallel.exchange import ACTIVATIONS, INPUT_GRADIENTS, Exchange
from clcomm.parallel.tensor_parallel.functions import gather_from_ranks, reduce_scatter_to_ranks, scatter_to_ranks
from clcomm.parallel.tensor_parallel.sequence import shared_gradients


class ColumnLinear(LinearOp):
    """y = x weight^T + bias for x that is the same on all ranks; the gradient of x is summed over them."""

    shape_of_none = Op.shape_of_none  # nothing is exchanged of a tensor without elements: it is refused

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None, *, ranks: Exchange) -> Tensor:  # type: ignore[override]
        ctx.ranks = ranks
        return LinearOp.forward(ctx, x, weight, bias, relu=False)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        """dx = the sum of dy W, which may move while dW = dy^T x and db, the column sums of dy, are computed."""
        x, weight, _ = ctx.saved
        dx = dw = db = pending = None
        if ctx.needs[0]:
            pending = ctx.ranks.sum(x.shape, INPUT_GRADIENTS)
            multiply(grad, weight, pending.own)
            pending.start()
        if ctx.needs[2]:
            db = ctx.out(2)
            column_sums(grad, db)
        if ctx.needs[1]:
            dw = ctx.out(1)
            multiply(grad, x, dw, transpose_a=True)
        if pending is not None:
            dx = pending.copied(partial(ctx.out, 0))
        return dx, dw, db


class RowLinear(LinearOp):
    """y = the sum over the ranks of x weight^T, plus the bias that all have; the gradients need no exchange."""

    shape_of_none = Op.shape_of_none

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None, *, ranks: Exchange) -> Tensor:  # type: ignore[override]
        pending = ranks.sum((x.shape[0], weight.shape[0]), ACTIVATIONS)
        multiply(x, weight, pending.own, transpose_b=True)
        ctx.save(x, weight, None)
        if bias is None:
            return pending.copied()
        out = empty(x.device, pending.own.shape)
        launch_broadcast("add_broadcast", out, pending.total(), bias)
        return out


class DividedLayer(Module):
    """A layer of which each rank has a part, with the whole one's attributes; `division` is its style."""

    ranks: Exchange
    division: Any


class ColumnParallelLinear(DividedLayer, Linear):
    """A Linear of which each rank computes some outputs, with its rows of the weight and its part of the bias."""

    def forward(self, x: Tensor) -> Tensor:
        ranks = self.ranks
        y = column_linear(x, self.weight, self.bias, ranks, self.division.sequence_axis)
        if self.division.gather_output:
            return gather_from_ranks(y, ranks)
        if ranks.size > 1:
            y.whole_columns = ranks.size * y.shape[-1]
        return y


class RowParallelLinear(DividedLayer, Linear):
    """A Linear of which each rank sums over some inputs, with its columns of the weight and the whole bias."""

    def forward(self, x: Tensor) -> Tensor:
        ranks, columns = self.ranks, self.weight.shape[1]
        if self.division.split_input:
            checked_rows("RowParallel(split_input=True)", x, self.weight, self.bias, columns * ranks.size)
            x = scatter_to_ranks(x, ranks)
        remedy = f", of {columns * ranks.size} for {ranks.size} ranks; a whole x takes split_input=True"
        rows = checked_rows("RowParallel", x, self.weight, self.bias, columns, remedy)
        if self.division.sequence_axis is None:
            y = RowLinear.apply(rows, self.weight, self.bias, ranks=ranks)
            return F.reshape(y, (*x.shape[:-1], self.weight.shape[0]))
        part = reduce_scatter_to_ranks(linear_of_part(x, self.weight), ranks, self.division.sequence_axis)
        with shared_gradients([(self, "bias")], ranks):
            return part if self.bias is None else part + self.bias


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, ranks: Exchange, sequence: int | None = None
) -> Tensor:
    """Return x[..., in] weight[part of out, in]^T + bias[part of out]; backward sums the gradients of x.

    Args:
        sequence: the dimension along which x is divided between the ranks, and gathered first; None: x is whole.
    """
    if sequence is not None:
        return linear_of_part(gather_from_ranks(x, ranks, sequence, sums=True), weight, bias)
    rows = checked_rows("ColumnParallel", x, weight, bias)
    return F.reshape(ColumnLinear.apply(rows, weight, bias, ranks=ranks), (*x.shape[:-1], weight.shape[0]))


class HeadParallelAttention(DividedLayer, MultiheadAttention):
    """A MultiheadAttention of which each rank computes some heads; `out_proj` sums over the ranks."""

    _has_all_heads = False

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return column_linear(x, weight, bias, self.ranks, self.division.sequence_axis)
