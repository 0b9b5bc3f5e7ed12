"""Trains nanoGPT's model with its optimizer: its train.py needs a prepared dataset and mixed precision."""

import numpy as np
import torch
from model import GPT, GPTConfig

torch.manual_seed(1337)
rng = np.random.default_rng(1)
model = GPT(GPTConfig(block_size=32, vocab_size=40, n_layer=3, n_head=4, n_embd=64, dropout=0.0, bias=False))
optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")
for _ in range(100):
    tokens = rng.integers(0, 8, (8, 33)).cumsum(1) % 40
    x, y = torch.tensor(tokens[:, :-1]), torch.tensor(tokens[:, 1:])
    logits, loss = model(x, y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
