"""Trains Pytorch-UNet's network on drawn discs: its train.py needs a dataset of photographs."""

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from unet.unet_model import UNet

torch.manual_seed(1)
rng = np.random.default_rng(1)
model = UNet(n_channels=3, n_classes=2, bilinear=True)
criterion = nn.CrossEntropyLoss()
optimizer = optim.RMSprop(model.parameters(), lr=1e-7, weight_decay=1e-8, momentum=0.9)
rows, columns = np.mgrid[:33, :33]
for _ in range(100):
    centres = rng.integers(8, 24, (2, 2))
    discs = np.stack([(rows - a) ** 2 + (columns - b) ** 2 < 60 for a, b in centres])
    images = torch.tensor((discs[:, None] + rng.random((2, 3, 33, 33))).astype(np.float32))
    loss = criterion(model(images), torch.tensor(discs.astype(np.int64)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
