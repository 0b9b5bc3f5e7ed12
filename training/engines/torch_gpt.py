"""The GPT of models.gpt in PyTorch, with the same names and shapes of parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class TorchGPT(nn.Module):
    """Tokens [N, T] -> logits [N, T, vocabulary]; initial values are PyTorch's, to be loaded over."""

    def __init__(
        self, vocabulary: int, context: int = 256, layers: int = 6, width: int = 192, heads: int = 6, *,
        tied: bool = True, approximate: str = "tanh",
    ):  # fmt: skip
        super().__init__()
        blocks = nn.ModuleList(_Block(width, heads, approximate) for _ in range(layers))
        embedding = nn.Embedding(vocabulary, width)
        self.transformer = nn.ModuleDict({
            "wte": embedding, "wpe": nn.Embedding(context, width), "h": blocks,
            "ln_f": nn.LayerNorm(width),
        })  # fmt: skip
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        parts: Any = self.transformer
        x = parts["wte"](tokens) + parts["wpe"](torch.arange(tokens.shape[-1], device=tokens.device))
        for block in parts["h"]:
            x = block(x)
        logits: torch.Tensor = self.lm_head(parts["ln_f"](x))
        return logits


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of logits [N, T, vocabulary] against the tokens [N, T] that come next."""
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, approximate: str):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), _Attention(width, heads)
        self.ln_2, self.mlp = nn.LayerNorm(width), _MLP(width, approximate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split(width, -1)
        )
        result = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(result.transpose(1, 2).reshape(batch, tokens, width))


class _MLP(nn.Module):
    def __init__(self, width: int, approximate: str):
        super().__init__()
        self.approximate = approximate
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate=self.approximate))
