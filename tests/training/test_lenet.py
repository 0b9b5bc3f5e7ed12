"""LeNet-5 on digits of 28 x 28 pixels: its loss falls; test_engines compares its gradients with PyTorch's."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.engine import CrossEntropyLoss, Device, Replay, Tensor
from clcomm.optim import SGD
from models import LeNet

STEPS, BATCH, LR, MOMENTUM = 200, 64, 0.01, 0.9


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return what each step trains on: the bundled digits, three times as wide and high, with a border."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    images = (digits.images / 8 - 0.6).astype(np.float32)
    images = np.pad(images.repeat(3, 1).repeat(3, 2), ((0, 0), (2, 2), (2, 2)))[:, None]
    rng = np.random.default_rng(0)
    chosen = [rng.choice(len(images), BATCH, replace=False) for _ in range(STEPS)]
    return [(np.ascontiguousarray(images[each]), digits.target[each]) for each in chosen]


def losses_of(device: Device) -> list[float]:
    """Return the loss of each step, replayed as the Trainer does it."""
    model, loss_fn = LeNet(device=device, seed=3), CrossEntropyLoss()
    model.flat_space()
    optimizer = SGD(model, LR, momentum=MOMENTUM)

    def forward_backward(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_fn(model(x), y)
        loss.backward()
        return loss

    replay, losses = Replay(forward_backward), []
    for x, y in batches():
        losses.append(replay(Tensor(x, device), Tensor(y, device)).item())
        optimizer.step()
        optimizer.zero_grad()
    assert replay.replayed > 0.9 * STEPS  # the others run as they are, to be recorded and compared
    return losses


def test_its_loss_falls(device):
    losses = losses_of(device)
    assert losses[0] == pytest.approx(np.log(10), abs=0.1)
    assert np.mean(losses[-20:]) < 0.27
