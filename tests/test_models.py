"""The models: size, PyTorch's initial values, PyTorch's loss and gradients, other image sizes."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Tensor, manual_seed
from clcomm.engine import functional as F
from clcomm.optim import SGD
from models import MLP, ConvNet


def torch_convnet(torch, in_shape=(1, 28, 28), classes=10):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = torch.nn.Conv2d(in_shape[0], 16, 3, padding=1)
            self.conv2 = torch.nn.Conv2d(16, 32, 3, padding=1)
            self.fc1 = torch.nn.Linear(32 * (in_shape[1] // 4) * (in_shape[2] // 4), 128)
            self.fc2 = torch.nn.Linear(128, classes)

        def forward(self, x):
            x = torch.max_pool2d(torch.relu(self.conv1(x)), 2)
            x = torch.max_pool2d(torch.relu(self.conv2(x)), 2)
            return self.fc2(torch.relu(self.fc1(x.flatten(1))))

    return Net()


def torch_mlp(torch, in_shape=(1, 28, 28), classes=10):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = torch.nn.Linear(int(np.prod(in_shape)), 128)
            self.fc2 = torch.nn.Linear(128, 128)
            self.fc3 = torch.nn.Linear(128, classes)

        def forward(self, x):
            return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x.flatten(1))))))

    return Net()


PAIRS = {"convnet": (ConvNet, torch_convnet), "mlp": (MLP, torch_mlp)}


def test_convnet_has_lizardists_parameters_in_its_order(device):
    model = ConvNet(device=device)
    assert model.parameter_count() == 206_922
    names = [f"{layer}.{part}" for layer in ("conv1", "conv2", "fc1", "fc2") for part in ("weight", "bias")]
    assert [name for name, _ in model.named_parameters()] == names
    assert model.flat_space().layout.nbytes == 827_688


def test_mlp_has_its_parameters(device):
    assert MLP(device=device).parameter_count() == 784 * 128 + 128 + 128 * 128 + 128 + 128 * 10 + 10


@pytest.mark.parametrize("name", sorted(PAIRS))
@pytest.mark.parametrize(("in_shape", "batch"), [((1, 28, 28), 5), ((1, 8, 8), 3), ((3, 13, 9), 1)])
def test_values_loss_and_gradients_as_pytorch(device, name, in_shape, batch):
    torch = pytest.importorskip("torch")
    make, reference = PAIRS[name]
    torch.manual_seed(42)
    theirs = reference(torch, in_shape, 7)
    ours = make(in_shape, 7, device=device, seed=42)
    expected = dict(theirs.named_parameters())
    assert {n: p.tobytes() for n, p in ours.state_dict().items()} == {
        n: p.detach().numpy().tobytes() for n, p in expected.items()
    }
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((batch, *in_shape)).astype(np.float32), rng.integers(0, 7, batch)
    loss = F.cross_entropy(ours(Tensor(x, device)), y)
    loss.backward()
    their_loss = torch.nn.functional.cross_entropy(theirs(torch.tensor(x)), torch.tensor(y))
    their_loss.backward()
    assert loss.item() == pytest.approx(their_loss.item(), rel=1e-5)
    for parameter_name, parameter in ours.named_parameters():
        gradient = expected[parameter_name].grad.numpy()
        np.testing.assert_allclose(parameter.grad.numpy(), gradient, rtol=1e-4, atol=1e-5 * np.abs(gradient).max())


@pytest.mark.parametrize("make", [MLP, ConvNet])
def test_training_as_pytorch_over_steps(device, make):
    torch = pytest.importorskip("torch")
    torch.manual_seed(3)
    theirs = dict(PAIRS.values())[make](torch, (1, 8, 8))
    ours = make((1, 8, 8), device=device, seed=3)
    optimizer = SGD(ours, lr=0.05, momentum=0.9)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9)
    rng = np.random.default_rng(2)
    for _ in range(10):
        x, y = rng.standard_normal((16, 1, 8, 8)).astype(np.float32), rng.integers(0, 10, 16)
        loss = F.cross_entropy(ours(Tensor(x, device)), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.zero_grad()
        their_loss = torch.nn.functional.cross_entropy(theirs(torch.tensor(x)), torch.tensor(y))
        their_loss.backward()
        reference.step()
        assert loss.item() == pytest.approx(their_loss.item(), rel=1e-4)


@pytest.mark.parametrize("make", [MLP, ConvNet])
def test_same_seed_same_bits(device, make):
    def trained() -> bytes:
        model = make((1, 8, 8), device=device, seed=9)
        optimizer = SGD(model, lr=0.1, momentum=0.9)
        rng = np.random.default_rng(4)
        for _ in range(3):
            x, y = rng.standard_normal((13, 1, 8, 8)).astype(np.float32), rng.integers(0, 10, 13)
            F.cross_entropy(model(Tensor(x, device)), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return b"".join(value.tobytes() for value in model.state_dict().values())

    assert trained() == trained()


def test_without_a_seed_the_engines_generator_counts(device):
    manual_seed(6)
    first = MLP((1, 4, 4), device=device).state_dict()
    second = MLP((1, 4, 4), device=device, seed=6).state_dict()
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)


@pytest.mark.parametrize("in_shape", [(28, 28), (1, 3, 28)])
def test_images_that_are_too_small(in_shape):
    with pytest.raises(ArgumentError, match="in_shape: expected"):
        ConvNet(in_shape)
