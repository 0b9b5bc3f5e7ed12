"""The models: size, seeds and image sizes; training/test_engines has PyTorch's values, losses and gradients."""

from __future__ import annotations

import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import manual_seed
from models import MLP, ConvNet


def test_convnet_has_lizardists_parameters_in_its_order(device):
    model = ConvNet(device=device)
    assert model.parameter_count() == 206_922
    names = [f"{layer}.{part}" for layer in ("conv1", "conv2", "fc1", "fc2") for part in ("weight", "bias")]
    assert [name for name, _ in model.named_parameters()] == names
    assert model.flat_space().layout.nbytes == 827_688


def test_mlp_has_its_parameters(device):
    assert MLP(device=device).parameter_count() == 784 * 128 + 128 + 128 * 128 + 128 + 128 * 10 + 10


def test_without_a_seed_the_engines_generator_counts(device):
    manual_seed(6)
    first = MLP((1, 4, 4), device=device).state_dict()
    second = MLP((1, 4, 4), device=device, seed=6).state_dict()
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)


@pytest.mark.parametrize("in_shape", [(28, 28), (1, 3, 28)])
def test_images_that_are_too_small(in_shape):
    with pytest.raises(ArgumentError, match="in_shape: expected"):
        ConvNet(in_shape)
