"""Trains a network of pytorch-cifar on drawn images, with its loss and optimizer: its main.py downloads CIFAR-10."""

import sys

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim

import models

torch.manual_seed(1)
rng = np.random.default_rng(1)
made = getattr(models, sys.argv[1])
net = made("VGG11") if sys.argv[1] == "VGG" else made()
criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(net.parameters(), lr=0.0001, momentum=0.9, weight_decay=5e-4)
shapes = rng.random((10, 3, 32, 32), dtype=np.float32)
for _ in range(100):
    labels = rng.integers(0, 10, 8)
    inputs = torch.tensor(shapes[labels] + rng.random((8, 3, 32, 32), dtype=np.float32))
    optimizer.zero_grad()
    loss = criterion(net(inputs), torch.tensor(labels))
    loss.backward()
    optimizer.step()
