"""Trains the network of fast_neural_style/neural_style/transformer_net.py: its training needs VGG's weights."""

import numpy as np
import torch
from torch.optim import Adam
from transformer_net import TransformerNet

torch.manual_seed(42)
rng = np.random.default_rng(1)
transformer = TransformerNet()
optimizer = Adam(transformer.parameters(), 1e-5)
mse_loss = torch.nn.MSELoss()
for _ in range(100):
    x = torch.tensor(rng.random((1, 3, 24, 24), dtype=np.float32))
    optimizer.zero_grad()
    loss = mse_loss(transformer(x), 1 - x)
    loss.backward()
    optimizer.step()
