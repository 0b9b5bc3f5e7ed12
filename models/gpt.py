"""GPT: a transformer that predicts the next token. At its default sizes, with 98 tokens, 2.7 million parameters."""

from __future__ import annotations

import math

import numpy as np

from clcomm.engine import (
    ArgumentError,
    Device,
    Dropout,
    Embedding,
    Generator,
    LayerNorm,
    Linear,
    Module,
    Parameter,
    Sequential,
    Tensor,
)  # fmt: skip
from clcomm.engine import functional as F
from clcomm.engine.nn.init import normal_values
from clcomm.engine.recomputation import checkpoint

_STD = 0.02  # of the initial weights


class GPT(Module):
    """Tokens [N, T], int32 -> logits [N, T, vocabulary], of which each sees the tokens up to its own.

    Token and position embeddings; blocks of causal attention and a multilayer perceptron with GELU, each behind a layer
    norm and added to what it came from; a last layer norm and the head. The names in `state_dict()` are nanoGPT's and,
    with its transposed weights, GPT-2's: `transformer.wte.weight`, `transformer.wpe.weight`, then for each block
    `transformer.h.0.ln_1`, `attn.c_attn`, `attn.c_proj`, `ln_2`, `mlp.c_fc`, `mlp.c_proj`, each with weight and bias,
    `transformer.ln_f`, and `lm_head.weight`, which may be the token embedding's.
    Source: Radford et al., "Language models are unsupervised multitask learners", 2019.

    Args:
        vocabulary: the number of tokens.
        context: the most tokens that it sees.
        layers: the number of blocks.
        width: the values of a token between blocks.
        heads: of each attention; they divide the width.
        tied: whether the head's weight is the token embedding's.
        approximate: of GELU: "tanh", as in GPT-2, or "none".
        dropout: the share of values that training drops behind the embeddings, and of what attention and the
            perceptron add; attention's own weights are not dropped.
        recompute: whether backward computes the blocks' activations again, in place of keeping them.
        device: the device of the parameters; None: the default device.
        seed: of the initial values, GPT-2's: N(0, 0.02), less before an addition, biases 0; None: they come from the
            engine's own generator.

    Raises ArgumentError for sizes below 1, heads that do not divide the width, and a dropout that is no share.
    """

    #: Of the input, for what makes one.
    input_dtype = np.int32

    def __init__(
        self,
        vocabulary: int,
        context: int = 256,
        layers: int = 6,
        width: int = 192,
        heads: int = 6,
        *,
        tied: bool = True,
        approximate: str = "tanh",
        dropout: float = 0.0,
        recompute: bool = False,
        device: Device | str | None = None,
        seed: int | None = None,
    ):
        sizes = {"vocabulary": vocabulary, "context": context, "layers": layers, "width": width, "heads": heads}
        for name, value in sizes.items():
            if not isinstance(value, int) or value < 1:
                raise ArgumentError(f"{name}: expected a whole number of at least 1, got {value!r}")
        if width % heads:
            raise ArgumentError(f"heads: expected a number that divides the width {width}, got {heads}")
        rng = None if seed is None else Generator(seed)
        self.context = context
        self.transformer = _Transformer(vocabulary, context, layers, width, heads, approximate, dropout, device, rng)
        self.transformer.h.recompute = recompute
        embedding = self.transformer.wte.weight
        if tied:
            self.lm_head = Linear(width, vocabulary, bias=False, device=embedding.device, rng=Generator())
            self.lm_head.weight = embedding
        else:
            self.lm_head = _linear(width, vocabulary, _STD, False, embedding.device, rng)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.transformer(tokens))

    def pipeline_layers(self) -> list[Module]:
        """Return modules that compute `forward` one after another, for the stages of a pipeline.

        The first one and the last one share the embedding's weight where it is tied.
        """
        body = self.transformer
        blocks = [_Recomputed(block) for block in body.h] if body.h.recompute else [*body.h]
        return [_Embeddings(body.wte, body.wpe, body.drop), *blocks, body.ln_f, self.lm_head]


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits [N, T, vocabulary] against the tokens [N, T] that come next."""
    rows = math.prod(targets.shape)
    return F.cross_entropy(F.reshape(logits, (rows, logits.shape[-1])), F.reshape(targets, (rows,)))


class _Transformer(Module):
    """Tokens [N, T] -> [N, T, width]"""

    def __init__(
        self, vocabulary: int, context: int, layers: int, width: int, heads: int, approximate: str, dropout: float,
        device: Device | str | None, rng: Generator | None,
    ):  # fmt: skip
        self.wte = _embedding(vocabulary, width, device, rng)
        device = self.wte.weight.device
        self.wpe = _embedding(context, width, device, rng)
        self.drop = Dropout(dropout)
        added = _STD / math.sqrt(2 * layers)  # so that the sum of all blocks does not grow with their number
        self.h = _Blocks(*(_Block(width, heads, approximate, dropout, added, device, rng) for _ in range(layers)))
        self.ln_f = LayerNorm(width, device=device)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.ln_f(self.h(self.drop(_embedded(tokens, self.wte, self.wpe))))


def _embedded(tokens: Tensor, wte: Embedding, wpe: Embedding) -> Tensor:
    """Return the sum of token and position embeddings, [N, T, width]."""
    count, context = tokens.shape[-1], wpe.weight.shape[0]
    if tokens.ndim != 2 or count > context:
        raise ArgumentError(f"tokens: expected [N, T] with T up to {context}, got shape {tokens.shape}")
    return wte(tokens) + wpe.weight[:count]


class _Embeddings(Module):
    """Tokens [N, T] -> [N, T, width], by the embeddings of a transformer, and its dropout."""

    def __init__(self, wte: Embedding, wpe: Embedding, drop: Dropout):
        self.wte, self.wpe, self.drop = wte, wpe, drop

    def forward(self, tokens: Tensor) -> Tensor:
        return self.drop(_embedded(tokens, self.wte, self.wpe))


class _Recomputed(Module):
    """A block whose activations backward computes again."""

    def __init__(self, block: Module):
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x) if self.block.training else self.block(x)


class _Blocks(Sequential):
    """Blocks one after another; `recompute`: backward computes their activations again."""

    recompute = False

    def forward(self, x: Tensor) -> Tensor:
        if not (self.recompute and self.training):
            return super().forward(x)
        for block in self:
            x = checkpoint(block, x)
        return x


class _Block(Module):
    """x + attention(norm(x)), then x + mlp(norm(x))"""

    def __init__(
        self, width: int, heads: int, approximate: str, dropout: float, added: float, device: Device | str | None,
        rng: Generator | None,
    ):  # fmt: skip
        self.ln_1 = LayerNorm(width, device=device)
        self.attn = _Attention(width, heads, dropout, added, device, rng)
        self.ln_2 = LayerNorm(width, device=device)
        self.mlp = _MLP(width, approximate, dropout, added, device, rng)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class _Attention(Module):
    """Causal attention of several heads: queries, keys and values are one layer's."""

    def __init__(
        self, width: int, heads: int, dropout: float, added: float, device: Device | str | None, rng: Generator | None
    ):
        self.heads = heads
        self.c_attn = _linear(width, 3 * width, _STD, True, device, rng)
        self.c_proj = _linear(width, width, added, True, device, rng)
        self.resid_dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.resid_dropout(self.c_proj(F.packed_attention(self.c_attn(x), self.heads, is_causal=True)))


class _MLP(Module):
    """Two layers with GELU between them."""

    def __init__(
        self, width: int, approximate: str, dropout: float, added: float, device: Device | str | None,
        rng: Generator | None,
    ):  # fmt: skip
        self.approximate = approximate
        self.c_fc = _linear(width, 4 * width, _STD, True, device, rng)
        self.c_proj = _linear(4 * width, width, added, True, device, rng)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x), self.approximate)))


def _embedding(count: int, width: int, device: Device | str | None, rng: Generator | None) -> Embedding:
    layer = Embedding(count, width, device=device, rng=rng)
    layer.weight = Parameter(_STD * layer.weight.numpy(), layer.weight.device)
    return layer


def _linear(
    inputs: int, outputs: int, std: float, bias: bool, device: Device | str | None, rng: Generator | None
) -> Linear:
    """Return a layer of normally distributed weights, and biases of 0."""
    layer = Linear(inputs, outputs, bias=bias, device=device, rng=rng)
    device = layer.weight.device
    layer.weight = Parameter(std * normal_values((outputs, inputs), rng), device)
    if bias:
        layer.bias = Parameter(np.zeros(outputs, np.float32), device)
    return layer
