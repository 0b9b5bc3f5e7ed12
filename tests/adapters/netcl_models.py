"""A small model of netcl's with its batches, and what float64 makes of them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from clcomm.sync.adapters.netcl import NetclModel, prepare

CLASSES = 3


def make_model(seed=0):
    """Two linear layers of netcl's, 4-5-3, with values that depend on the seed alone."""
    device = prepare()
    from netcl import nn

    model = NetclModel(nn.Sequential(nn.Linear(device.queue, 4, 5), nn.ReLU(), nn.Linear(device.queue, 5, CLASSES)))
    rng = np.random.default_rng(seed)
    for parameter in model.parameters():
        parameter.copy_from(rng.standard_normal(parameter.shape))
    return model


def batch(rows=6, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, 4)).astype(np.float32), rng.integers(0, CLASSES, rows)


def reference(model, x, y):
    """Loss, logits and gradients in float64."""
    w1, b1, w2, b2 = (parameter.numpy().astype(np.float64) for parameter in model.parameters())
    before = x @ w1.T + b1
    hidden = np.maximum(before, 0)
    logits = hidden @ w2.T + b2
    exponents = np.exp(logits - logits.max(1, keepdims=True))
    shares = exponents / exponents.sum(1, keepdims=True)
    rows = np.arange(len(y))
    d_logits = shares.copy()
    d_logits[rows, y] -= 1
    d_logits /= len(y)
    d_hidden = (d_logits @ w2) * (before > 0)
    gradients = [d_hidden.T @ x, d_hidden.sum(0), d_logits.T @ hidden, d_logits.sum(0)]
    return SimpleNamespace(loss=-np.log(shares[rows, y]).mean(), logits=logits, gradients=gradients)
