"""LeNet-5 on digits of 28 x 28 pixels: its loss falls as PyTorch's does from the same start."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.engine import CrossEntropyLoss, Device, Replay, Tensor
from clcomm.optim import SGD
from models import LeNet

STEPS, BATCH, LR, MOMENTUM = 200, 64, 0.01, 0.9
#: Steps whose losses are compared one by one. Rounding, which depends on the CPU, grows by some 10% a step: on one
#: without AVX-512 from 1e-7 to 5e-5 in step 75, and to 2e-3 in step 97.
ALIKE = 75


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


def pytorch_losses(device: Device) -> list[float]:
    """Return the losses of the same network in PyTorch, from the same start on the same batches."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    start = {
        name: torch.tensor(value, requires_grad=True)
        for name, value in LeNet(device=device, seed=3).state_dict().items()
    }
    optimizer, f, losses = torch.optim.SGD(start.values(), LR, momentum=MOMENTUM), torch.nn.functional, []
    for images, labels in batches():
        x = torch.tensor(images)
        for name, padding in (("conv1", 2), ("conv2", 0)):
            x = f.conv2d(x, start[f"{name}.weight"], start[f"{name}.bias"], padding=padding)
            x = f.max_pool2d(torch.relu(x), 2)
        x = x.flatten(1)
        for name in ("fc1", "fc2"):
            x = torch.relu(f.linear(x, start[f"{name}.weight"], start[f"{name}.bias"]))
        loss = f.cross_entropy(f.linear(x, start["fc3.weight"], start["fc3.bias"]), torch.tensor(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_its_loss_falls(device):
    losses = losses_of(device)
    assert losses[0] == pytest.approx(np.log(10), abs=0.1)
    assert np.mean(losses[-20:]) < 0.27


def test_its_loss_falls_as_pytorchs(device):
    expected, losses = pytorch_losses(device), losses_of(device)
    np.testing.assert_allclose(losses[:ALIKE], expected[:ALIKE], rtol=1e-3)
    assert np.mean(losses[-20:]) == pytest.approx(np.mean(expected[-20:]), rel=0.1)
