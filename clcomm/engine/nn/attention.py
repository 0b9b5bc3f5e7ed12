"""Multi-head attention as a layer."""

from __future__ import annotations

import math

import numpy as np

from clcomm.engine import functional as F
from clcomm.engine.device import Device
from clcomm.engine.nn.init import Generator, uniform_values
from clcomm.engine.nn.layers import Linear
from clcomm.engine.nn.module import Module
from clcomm.engine.parameter import Parameter
from clcomm.engine.tensor import Tensor
from clcomm.errors import ArgumentError


class MultiheadAttention(Module):
    """Multi-head attention: queries [N, T, embed_dim] attend to keys and values [N, S, embed_dim] -> [N, T, embed_dim].

    The parameters are those of PyTorch's layer, with its names, `in_proj_weight`, `in_proj_bias`, `out_proj.weight` and
    `out_proj.bias`, and its initial values; batches come first, and the weights of the values are not returned.
    Source: Vaswani et al., "Attention is all you need", 2017.

    Args:
        embed_dim: the values of a token.
        num_heads: their number, which divides `embed_dim`.
        dropout: of the attention's weights: 0.0, as there is none.
        bias: whether the four projections have biases.
        batch_first: True, as batches come first; PyTorch's default, False, is refused.
        device: where the parameters are; by default `default_device()`.
        rng: the source of the initial values; by default the one that `manual_seed` seeds.

    Raises ArgumentError for sizes below 1, heads that do not divide `embed_dim`, and another `dropout` or
    `batch_first`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        batch_first: bool = False,
        device: Device | str | None = None,
        rng: Generator | None = None,
    ):
        if not isinstance(num_heads, int) or num_heads < 1 or embed_dim % num_heads:
            raise ArgumentError(f"num_heads: expected a number that divides embed_dim {embed_dim}, got {num_heads!r}")
        if isinstance(dropout, bool) or dropout != 0:
            raise ArgumentError(f"dropout: expected 0.0, as weights are not dropped here, got {dropout!r}")
        if batch_first is not True:
            raise ArgumentError(
                f"batch_first: expected True, as x is [N, T, embed_dim] here, got {batch_first!r}, PyTorch's default, "
                "for [T, N, embed_dim]"
            )
        self.num_heads = num_heads
        out_proj = Linear(embed_dim, embed_dim, bias=bias, device=device, rng=rng)
        device = out_proj.weight.device
        bound = math.sqrt(6.0 / (4 * embed_dim))  # Glorot and Bengio, 2010, of all three projections as one
        self.in_proj_weight = Parameter(uniform_values((3 * embed_dim, embed_dim), bound, rng), device)
        self.in_proj_bias = Parameter(np.zeros(3 * embed_dim, np.float32), device) if bias else None
        if bias:
            out_proj.bias = Parameter(np.zeros(embed_dim, np.float32), device)
        self.out_proj = out_proj

    def forward(  # type: ignore[override]  # a pair, as PyTorch's
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        need_weights: bool = True,
        attn_mask: Tensor | np.ndarray | None = None,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Return the attention's result and None, as PyTorch's layer does without weights.

        Args:
            query: [N, T, embed_dim].
            key: [N, S, embed_dim]; None: the queries.
            value: [N, S, embed_dim]; None: the keys.
            need_weights: False, as the weights are never in memory; PyTorch's default, True, is refused.
            attn_mask: added to the scores; of booleans: True where a query does not see a key, as in
                PyTorch's layer and the reverse of `scaled_dot_product_attention`'s; its shape broadcasts to
                [N, heads, T, S].
            is_causal: whether query i sees only the keys up to i; not with a mask.

        Raises ArgumentError for shapes that do not fit, for an int32 mask, and without `need_weights=False`.
        """
        if need_weights is not False:
            raise ArgumentError(
                f"need_weights: expected False, as attention keeps no weights here, got {need_weights!r}"
            )
        added = _added(attn_mask)
        key = query if key is None else key
        value = key if value is None else value
        if query is key is value:
            packed = self._linear(query, self.in_proj_weight, self.in_proj_bias)
            return self.out_proj(F.packed_attention(packed, self.num_heads, added, is_causal)), None
        q, k, v = (self._projected(number, x) for number, x in enumerate((query, key, value)))
        return self.out_proj(F.multi_head_attention(q, k, v, self.num_heads, added, is_causal)), None

    def _projected(self, number: int, x: Tensor) -> Tensor:
        width = self.in_proj_weight.shape[0] // 3
        rows = slice(number * width, (number + 1) * width)
        bias = None if self.in_proj_bias is None else self.in_proj_bias[rows]
        return self._linear(x, self.in_proj_weight[rows], bias)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)


def _added(mask: Tensor | np.ndarray | None) -> Tensor | np.ndarray | None:
    """Return the mask in scaled_dot_product_attention's form."""
    if mask is None or (isinstance(mask, Tensor) and mask.dtype == np.float32):
        return mask
    if isinstance(mask, Tensor) and mask.dtype == np.bool_:
        return ~mask
    if isinstance(mask, Tensor):
        raise ArgumentError("attn_mask: expected an array of booleans or float32 to add, got an int32 tensor")
    array = np.asarray(mask)
    return ~array if array.dtype.kind == "b" else array
