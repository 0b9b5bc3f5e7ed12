"""Layers of transformers, with PyTorch's parameters. Source: Vaswani et al., "Attention is all you need", 2017."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine import functional as F
from clcomm.engine.device import Device
from clcomm.engine.nn.attention import Mask, MultiheadAttention
from clcomm.engine.nn.containers import ModuleList
from clcomm.engine.nn.init import Generator, xavier_uniform_
from clcomm.engine.nn.layers import Dropout, Linear
from clcomm.engine.nn.module import Module
from clcomm.engine.nn.norms import LayerNorm
from clcomm.engine.tensor import Tensor

_ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu}


class TransformerEncoderLayer(Module):
    """Attention of a sequence to itself, then two linear layers, each with dropout, a sum and a LayerNorm.

    Inputs are [T, N, d_model], or [N, T, d_model] with `batch_first`.

    Args:
        d_model: values of a token.
        nhead: heads of the attention.
        dim_feedforward: values between the linear layers.
        dropout: of the attention's weights and of both parts' results.
        activation: between the linear layers: "relu", "gelu" or a function.
        layer_norm_eps: is added to the variance.
        batch_first: whether batches come first.
        norm_first: whether the LayerNorms come before the parts, not after the sums.
        bias: whether layers have biases.
        device: where the parameters are; by default `default_device()`.
        rng: the source of the initial values; by default the one that `manual_seed` seeds.
    """

    #: The names of the attentions; there is one more norm than these.
    _attentions: tuple[str, ...] = ("self_attn",)

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        *,
        device: Device | str | None = None,
        rng: Generator | None = None,
    ):
        if isinstance(activation, str) and activation not in _ACTIVATIONS:
            raise ArgumentError(f"activation: expected 'relu', 'gelu' or a function, got {activation!r}")
        for name in self._attentions:
            named: Any = {"batch_first": batch_first, "device": device, "rng": rng}
            setattr(self, name, MultiheadAttention(d_model, nhead, dropout, bias, **named))
        self.linear1 = Linear(d_model, dim_feedforward, bias, device=device, rng=rng)
        self.dropout = Dropout(dropout)
        self.linear2 = Linear(dim_feedforward, d_model, bias, device=device, rng=rng)
        self.norm_first = norm_first
        for number in range(1, len(self._attentions) + 2):
            setattr(self, f"norm{number}", LayerNorm(d_model, layer_norm_eps, bias=bias, device=device))
            setattr(self, f"dropout{number}", Dropout(dropout))
        self.activation: Any = _ACTIVATIONS[activation] if isinstance(activation, str) else activation

    def forward(
        self, src: Tensor, src_mask: Mask = None, src_key_padding_mask: Mask = None, is_causal: bool = False
    ) -> Tensor:
        """Return the sequence's tokens, each with what it attends to; masks are those of MultiheadAttention."""
        x = self._part(src, 1, lambda y: self._attended("self_attn", y, y, src_mask, src_key_padding_mask, is_causal))
        return self._part(x, 2, self._fed)

    def _attended(self, name: str, x: Tensor, memory: Tensor, mask: Mask, padding: Mask, is_causal: bool) -> Tensor:
        attention: MultiheadAttention = getattr(self, name)
        return attention(x, memory, memory, padding, False, mask, True, is_causal)[0]

    def _fed(self, x: Tensor) -> Tensor:
        return self.linear2(self.dropout(self.activation(self.linear1(x))))

    def _part(self, x: Tensor, number: int, part: Callable[[Tensor], Tensor]) -> Tensor:
        norm: Module = getattr(self, f"norm{number}")
        dropout: Module = getattr(self, f"dropout{number}")
        return x + dropout(part(norm(x))) if self.norm_first else norm(x + dropout(part(x)))


class TransformerDecoderLayer(TransformerEncoderLayer):
    """A TransformerEncoderLayer that also attends to the results of an encoder, `memory`; arguments as there."""

    _attentions = ("self_attn", "multihead_attn")

    def forward(  # type: ignore[override]
        self, tgt: Tensor, memory: Tensor, tgt_mask: Mask = None, memory_mask: Mask = None,
        tgt_key_padding_mask: Mask = None, memory_key_padding_mask: Mask = None, tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return the sequence's tokens; masks are those of MultiheadAttention."""
        own = tgt_mask, tgt_key_padding_mask, tgt_is_causal
        other = memory_mask, memory_key_padding_mask, memory_is_causal
        x = self._part(tgt, 1, lambda y: self._attended("self_attn", y, y, *own))
        x = self._part(x, 2, lambda y: self._attended("multihead_attn", y, memory, *other))
        return self._part(x, 3, self._fed)


class _Stack(Module):
    def __init__(self, layer: Module, num_layers: int, norm: Module | None = None):
        self.layers = ModuleList([copy.deepcopy(layer) for _ in range(num_layers)])
        self.num_layers, self.norm = num_layers, norm

    def _run(self, x: Tensor, *given: Any, **named: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, *given, **named)
        return x if self.norm is None else self.norm(x)


class TransformerEncoder(_Stack):
    """`num_layers` copies of a TransformerEncoderLayer, then a norm if there is one."""

    def __init__(self, encoder_layer: Module, num_layers: int, norm: Module | None = None, **unused: bool):
        if unused.keys() - {"enable_nested_tensor", "mask_check"}:
            raise ArgumentError(f"TransformerEncoder: expected no argument {', '.join(sorted(unused))}")
        super().__init__(encoder_layer, num_layers, norm)

    def forward(
        self, src: Tensor, mask: Mask = None, src_key_padding_mask: Mask = None, is_causal: bool | None = None
    ) -> Tensor:
        """Return the last layer's tokens."""
        return self._run(src, mask, src_key_padding_mask, bool(is_causal))


class TransformerDecoder(_Stack):
    """`num_layers` copies of a TransformerDecoderLayer, then a norm if there is one."""

    def __init__(self, decoder_layer: Module, num_layers: int, norm: Module | None = None):
        super().__init__(decoder_layer, num_layers, norm)

    def forward(  # type: ignore[override]
        self, tgt: Tensor, memory: Tensor, tgt_mask: Mask = None, memory_mask: Mask = None,
        tgt_key_padding_mask: Mask = None, memory_key_padding_mask: Mask = None, tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return the last layer's tokens."""
        masks = tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask
        return self._run(tgt, memory, *masks, bool(tgt_is_causal), memory_is_causal)


class Transformer(Module):
    """An encoder and a decoder with a norm each, whose matrices are xavier_uniform; arguments as of their layers.

    Args:
        num_encoder_layers: layers of the encoder, and `num_decoder_layers` of the decoder.
        custom_encoder: stands for the encoder, and `custom_decoder` for the decoder.
    """

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        custom_encoder: Module | None = None,
        custom_decoder: Module | None = None,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        *,
        device: Device | str | None = None,
        rng: Generator | None = None,
    ):
        settings = (d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias)

        def stack(own: Module | None, kind: Any, layer: Any, count: int) -> Module:
            if own is not None:
                return own
            norm = LayerNorm(d_model, layer_norm_eps, bias=bias, device=device)
            return kind(layer(*settings, device=device, rng=rng), count, norm)  # type: ignore[no-any-return]

        self.encoder = stack(custom_encoder, TransformerEncoder, TransformerEncoderLayer, num_encoder_layers)
        self.decoder = stack(custom_decoder, TransformerDecoder, TransformerDecoderLayer, num_decoder_layers)
        self.d_model, self.nhead, self.batch_first = d_model, nhead, batch_first
        for parameter in self.parameters():
            if parameter.ndim > 1:
                xavier_uniform_(parameter, generator=rng)

    def forward(  # type: ignore[override]
        self, src: Tensor, tgt: Tensor, src_mask: Mask = None, tgt_mask: Mask = None, memory_mask: Mask = None,
        src_key_padding_mask: Mask = None, tgt_key_padding_mask: Mask = None, memory_key_padding_mask: Mask = None,
        src_is_causal: bool | None = None, tgt_is_causal: bool | None = None, memory_is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return the decoder's tokens."""
        memory = self.encoder(src, src_mask, src_key_padding_mask, src_is_causal)
        masks = tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask
        return self.decoder(tgt, memory, *masks, tgt_is_causal, memory_is_causal)

    @staticmethod
    def generate_square_subsequent_mask(sz: int, device: Device | str | None = None) -> Tensor:
        """Return [sz, sz] of 0 where a token may attend, and -inf after it."""
        return Tensor(np.triu(np.full((sz, sz), -np.inf, np.float32), 1), device)
