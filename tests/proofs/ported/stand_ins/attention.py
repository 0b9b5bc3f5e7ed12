"""Trains the Transformer of attention-is-all-you-need-pytorch to reverse sequences: its train.py needs corpora."""

import numpy as np
import torch
import torch.nn.functional as F
import torch.optim as optim
from transformer.Models import Transformer

torch.manual_seed(1)
rng = np.random.default_rng(1)
model = Transformer(
    20, 20, src_pad_idx=0, trg_pad_idx=0, d_word_vec=32, d_model=32, d_inner=64, n_layers=2, n_head=2, d_k=16, d_v=16,
    dropout=0.0, n_position=20,
)  # fmt: skip
optimizer = optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-09)
for _ in range(100):
    tokens = rng.integers(1, 20, (8, 9))
    tokens[:4, 6:] = 0
    source, target = torch.tensor(tokens), torch.tensor(tokens[:, ::-1].copy())
    optimizer.zero_grad()
    predicted = model(source, target[:, :-1])
    loss = F.cross_entropy(predicted, target[:, 1:].contiguous().view(-1), ignore_index=0, reduction="sum")
    loss.backward()
    optimizer.step()
