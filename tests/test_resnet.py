"""The residual network: PyTorch's names, initial values, losses, gradients and statistics, in both modes."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Tensor
from clcomm.engine import functional as F
from clcomm.optim import SGD
from models import ResNet

SHAPE, SIZES = (3, 12, 10), ((2, 1), 6)


def pair(torch, device, seed=3, classes=5):
    from training.engines import torch_engine

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        theirs = torch_engine.ResNet(SHAPE, classes, *SIZES)
    return ResNet(SHAPE, classes, *SIZES, device=device, seed=seed), theirs


def assert_same_state(ours, theirs, **tolerance):
    state = theirs.state_dict()
    assert list(ours.state_dict()) == list(state)
    for name, value in ours.state_dict().items():
        np.testing.assert_allclose(value, state[name].numpy(), err_msg=name, **tolerance)


def test_the_default_is_resnet_18(torch, device):
    ours = ResNet(device=device, seed=0)
    assert ours.parameter_count() == 11_173_962
    from training.engines import torch_engine

    theirs = torch_engine.make_module("resnet", (3, 32, 32), 10, 0)
    assert_same_state(ours, theirs, rtol=0, atol=0)
    stages = [name for name in ours.state_dict() if name.endswith("conv1.weight")]
    assert stages == ["conv1.weight", *(f"layer{s}.{b}.conv1.weight" for s in range(1, 5) for b in range(2))]


def test_losses_gradients_and_statistics_as_pytorch_over_steps(torch, device):
    ours, theirs = pair(torch, device)
    optimizer = SGD(ours, lr=0.02, momentum=0.9, weight_decay=5e-4)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    rng = np.random.default_rng(2)
    for step in range(8):
        x, y = rng.standard_normal((9, *SHAPE)).astype(np.float32), rng.integers(0, 5, 9)
        loss = F.cross_entropy(ours(Tensor(x, device)), y)
        loss.backward()
        reference.zero_grad()
        their_loss = torch.nn.functional.cross_entropy(theirs(torch.tensor(x)), torch.tensor(y))
        their_loss.backward()
        assert loss.item() == pytest.approx(their_loss.item(), rel=1e-4)
        if step == 0:
            for (name, own), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
                gradient = other.grad.numpy()
                atol = 1e-4 * np.abs(gradient).max()
                np.testing.assert_allclose(own.grad.numpy(), gradient, rtol=1e-3, atol=atol, err_msg=name)
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
    assert_same_state(ours, theirs, rtol=5e-3, atol=5e-4)
    ours.eval()
    theirs.eval()
    x = rng.standard_normal((4, *SHAPE)).astype(np.float32)
    np.testing.assert_allclose(ours(Tensor(x, device)).numpy(), theirs(torch.tensor(x)).detach(), rtol=2e-2, atol=2e-3)


def test_pytorchs_weights_are_loaded_and_given_back(torch, device):
    ours, theirs = pair(torch, device)
    theirs(torch.randn(8, *SHAPE))  # moves the statistics
    ours.load_state_dict({name: value.numpy() for name, value in theirs.state_dict().items()})
    assert_same_state(ours, theirs, rtol=0, atol=0)
    theirs.eval()
    x = np.random.default_rng(1).standard_normal((3, *SHAPE)).astype(np.float32)
    found, expected = ours.eval()(Tensor(x, device)).numpy(), theirs(torch.tensor(x)).detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("in_shape", [(28, 28), (0, 3, 28)])
def test_images_that_do_not_fit(in_shape):
    with pytest.raises(ArgumentError, match="in_shape: expected"):
        ResNet(in_shape)
