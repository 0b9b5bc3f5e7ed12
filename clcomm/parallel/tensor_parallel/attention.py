"""Attention with its heads divided between ranks."""

from __future__ import annotations

from clcomm.engine.nn.attention import MultiheadAttention
from clcomm.engine.parameter import Parameter
from clcomm.engine.tensor import Tensor
from clcomm.parallel.exchange import Exchange
from clcomm.parallel.tensor_parallel.linear import RowParallelLinear, column_linear


class HeadParallelAttention(MultiheadAttention):
    """A MultiheadAttention of which each rank computes `num_heads` heads; inputs and result are those of the whole.

    Args:
        in_proj_weight, in_proj_bias: this rank's rows of the three projections.
        out_proj: sums over the ranks.
        sequence: the dimension along which inputs and result are divided between the ranks; None: they are whole.
    """

    def __init__(
        self,
        num_heads: int,
        in_proj_weight: Parameter,
        in_proj_bias: Parameter | None,
        out_proj: RowParallelLinear,
        ranks: Exchange,
        sequence: int | None,
    ):
        self.num_heads = num_heads
        self.in_proj_weight, self.in_proj_bias, self.out_proj = in_proj_weight, in_proj_bias, out_proj
        self._ranks, self._sequence = ranks, sequence

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return column_linear(x, weight, bias, self._ranks, self._sequence)
