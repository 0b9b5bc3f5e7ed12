"""Multi-head attention as a layer."""

from __future__ import annotations

import math

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine import functional as F
from clcomm.engine.device import Device
from clcomm.engine.nn.init import Generator, uniform_values
from clcomm.engine.nn.layers import Linear
from clcomm.engine.nn.module import Module
from clcomm.engine.ops.dropout import check_probability
from clcomm.engine.parameter import Parameter
from clcomm.engine.tensor import Tensor

Mask = Tensor | np.ndarray | None


class MultiheadAttention(Module):
    """Multi-head attention: queries [N, T, embed_dim] attend to keys and values [N, S, embed_dim] -> [N, T, embed_dim].

    The parameters are those of PyTorch's layer, with its names, `in_proj_weight`, `in_proj_bias`, `out_proj.weight` and
    `out_proj.bias`, and its initial values. With `need_weights=False` and without dropout the weights of the values are
    never in memory. Source: Vaswani et al., "Attention is all you need", 2017.

    Args:
        embed_dim: the values of a token.
        num_heads: their number, which divides `embed_dim`.
        dropout: the probability with which a weight is set to 0 in training.
        bias: whether the four projections have biases.
        batch_first: inputs are [N, T, embed_dim]; else [T, N, embed_dim].
        device: where the parameters are; by default `default_device()`.
        rng: the source of the initial values; by default the one that `manual_seed` seeds.

    Raises ArgumentError for sizes below 1, and heads that do not divide `embed_dim`.
    """

    #: Of a layer that computes a part of the heads: it has no weights of all.
    _has_all_heads = True
    batch_first, dropout = True, 0.0

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
        if isinstance(dropout, bool):
            raise ArgumentError(f"dropout: expected a probability, got {dropout!r}")
        check_probability("MultiheadAttention", dropout)
        self.num_heads, self.dropout, self.batch_first = num_heads, dropout, batch_first
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
        key_padding_mask: Mask = None,
        need_weights: bool = True,
        attn_mask: Mask = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention's result, and its weights [N, T, S] or None.

        Args:
            query: [N, T, embed_dim], or [T, embed_dim].
            key: [N, S, embed_dim]; None: the queries.
            value: [N, S, embed_dim]; None: the keys.
            key_padding_mask: [N, S]: true for keys that no query sees, or added to their scores.
            need_weights: whether to return the weights, which are in memory then.
            attn_mask: added to the scores; of booleans: True where a query does not see a key, as in
                PyTorch's layer and the reverse of `scaled_dot_product_attention`'s; its shape broadcasts to
                [N, heads, T, S], or is [N * heads, T, S].
            average_attn_weights: return the mean of the heads' weights, not [N, heads, T, S].
            is_causal: whether query i sees only the keys up to i; that a mask beside it says so.

        Raises ArgumentError for shapes that do not fit, and for an int32 mask.
        """
        if need_weights and not self._has_all_heads:
            raise ArgumentError("need_weights: expected False, as each rank has a part of the heads, got True")
        key = query if key is None else key
        value = key if value is None else value
        if query.ndim == 2:  # one sequence
            many = {id(x): F.unsqueeze(x, 0 if self.batch_first else 1) for x in (query, key, value)}
            padding = None if key_padding_mask is None else key_padding_mask.reshape((1, -1))
            query, key, value = (many[id(x)] for x in (query, key, value))
            flags = padding, need_weights, attn_mask, average_attn_weights
            y, weights = self.forward(query, key, value, *flags, is_causal)
            return F.squeeze(y, 0 if self.batch_first else 1), None if weights is None else F.squeeze(weights, 0)
        if not self.batch_first:
            turned = {id(x): F.swap_dimensions(x, 0, 1) for x in (query, key, value)}
            query, key, value = (turned[id(x)] for x in (query, key, value))
        y, weights = self._attend(
            query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )
        return y if self.batch_first else F.swap_dimensions(y, 0, 1), weights

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, padding: Mask, need_weights: bool, mask: Mask,
        average: bool, is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        share = self.dropout if self.training else 0.0
        is_causal = is_causal and mask is None
        added = self._merged(mask, padding, query, is_causal and padding is not None)
        is_causal = is_causal and padding is None
        if not need_weights and not share:
            if query is key is value:
                packed = self._linear(query, self.in_proj_weight, self.in_proj_bias)
                return self.out_proj(F.packed_attention(packed, self.num_heads, added, is_causal)), None
            q, k, v = (self._projected(number, x) for number, x in enumerate((query, key, value)))
            return self.out_proj(F.multi_head_attention(q, k, v, self.num_heads, added, is_causal)), None
        heads = []
        for number, x in enumerate((query, key, value)):
            y = self._projected(number, x)
            heads.append(F.transpose(F.reshape(y, (*y.shape[:2], self.num_heads, -1)), (0, 2, 1, 3)))
        weights = F.dropout(F.attention_weights(heads[0], heads[1], added, is_causal), share)
        y = F.transpose(F.matmul(weights, heads[2]), (0, 2, 1, 3))
        y = self.out_proj(F.reshape(y, (*y.shape[:2], -1)))
        return y, (F.mean(weights, 1) if average else weights) if need_weights else None

    def _merged(self, mask: Mask, padding: Mask, query: Tensor, is_causal: bool) -> Mask:
        """Return both masks as one in scaled_dot_product_attention's form."""
        if mask is not None and len(mask.shape) == 3 and mask.shape[0] == query.shape[0] * self.num_heads:
            mask = mask.reshape((query.shape[0], self.num_heads, *mask.shape[1:]))
        if padding is None:
            return _added(mask)
        rows = F.reshape(_floats(padding, query.device), (query.shape[0], 1, 1, -1))
        if is_causal:
            mask = ~np.tri(query.shape[1], rows.shape[-1], dtype=bool)
        return rows if mask is None else rows + _floats(mask, query.device)

    def _projected(self, number: int, x: Tensor) -> Tensor:
        width = self.in_proj_weight.shape[0] // 3
        rows = slice(number * width, (number + 1) * width)
        bias = None if self.in_proj_bias is None else self.in_proj_bias[rows]
        return self._linear(x, self.in_proj_weight[rows], bias)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)


def _floats(mask: Tensor | np.ndarray, device: Device) -> Tensor:
    """Return a mask, true where a key is not seen, as what is added to scores."""
    own = mask if isinstance(mask, Tensor) else Tensor(mask, device)
    if own.dtype == np.bool_:
        return F.masked_fill(Tensor(np.zeros(own.shape, np.float32), device), own, -math.inf)
    if own.dtype != np.float32:
        raise ArgumentError(f"mask: expected booleans or float32 to add, got {own.dtype}")
    return own


def _added(mask: Mask) -> Mask:
    """Return the mask in scaled_dot_product_attention's form."""
    if mask is None or (isinstance(mask, Tensor) and mask.dtype == np.float32):
        return mask
    if isinstance(mask, Tensor) and mask.dtype == np.bool_:
        return ~mask
    if isinstance(mask, Tensor):
        raise ArgumentError("attn_mask: expected an array of booleans or float32 to add, got an int32 tensor")
    array = np.asarray(mask)
    return ~array if array.dtype.kind == "b" else array
