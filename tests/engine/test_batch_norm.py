"""Batch norm and group norm against NumPy in float64 and PyTorch; running statistics, modes, and replayed steps."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import BatchNorm1d, BatchNorm2d, GroupNorm, Replay, Sequential, Tensor
from clcomm.engine import functional as F
from clcomm.engine.device import Device
from clcomm.engine.tuning import Tuning
from tests.helpers import cpu_device


def assert_alike(ours, theirs, x_shape, device, steps=3):
    """Compare results, gradients and state over steps of training and one of evaluation."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for step in range(steps + 1):
        for model in (ours, theirs):
            model.train(step < steps)
        values, upstream = rng.normal(2, 4, (2, *x_shape)).astype(np.float32)
        x, t = Tensor(values, device, requires_grad=True), torch.tensor(values, requires_grad=True)
        result, expected = ours(x), theirs(t)
        np.testing.assert_allclose(result.numpy(), expected.detach().numpy(), rtol=1e-4, atol=1e-5)
        result.backward(Tensor(upstream, device))
        expected.backward(torch.tensor(upstream))
        np.testing.assert_allclose(x.grad.numpy(), t.grad.numpy(), rtol=1e-3, atol=1e-4)
        for (_, own), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
            np.testing.assert_allclose(own.grad.numpy(), other.grad.numpy(), rtol=1e-3, atol=1e-3)
        for name, other in theirs.state_dict().items():
            np.testing.assert_allclose(ours.state_dict()[name], other.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("track", [False, True])
@pytest.mark.parametrize("momentum", [None, 0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    ("kind", "shape"), [("BatchNorm1d", (9, 6)), ("BatchNorm1d", (4, 6, 5)), ("BatchNorm2d", (3, 6, 4, 5))]
)
def test_the_layers_as_pytorch(device, kind, shape, momentum, track, affine):
    torch = pytest.importorskip("torch")
    settings = 6, 1e-4, momentum, affine, track
    ours = {"BatchNorm1d": BatchNorm1d, "BatchNorm2d": BatchNorm2d}[kind](*settings, device=device)
    assert_alike(ours, getattr(torch.nn, kind)(*settings), shape, device)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_norm_as_pytorch(device, groups, affine):
    torch = pytest.importorskip("torch")
    ours, theirs = GroupNorm(groups, 6, 1e-4, affine, device=device), torch.nn.GroupNorm(groups, 6, 1e-4, affine)
    assert_alike(ours, theirs, (3, 6, 4, 5), device)


def test_a_replayed_step_moves_the_statistics_as_a_plain_one(device):
    def make():
        model = Sequential(BatchNorm2d(3, device=device), BatchNorm2d(3, momentum=None, device=device))
        model.flat_space()

        def step(x):
            loss = F.mean(model(x) * model(x))  # two batches a step
            loss.backward()
            model.zero_grad()
            return loss

        return model, step

    (plain, step), (replayed, function) = make(), make()
    replay = Replay(function)
    rng = np.random.default_rng(5)
    for number in range(15):
        x = Tensor(rng.normal(number, 2, (4, 3, 5, 5)).astype(np.float32), device)
        assert step(x).numpy().tobytes() == replay(x).numpy().tobytes()
        if number == 12:  # another mode: another recording
            for model in (plain, replayed):
                model[1].eval()
    assert replay.replayed > 5
    state = replayed.state_dict()
    assert state["0.num_batches_tracked"] == 30 and state["1.num_batches_tracked"] == 26
    for name, value in plain.state_dict().items():
        assert value.tobytes() == state[name].tobytes(), name


def test_results_do_not_depend_on_the_number_of_cores_or_lanes(device):
    values = np.random.default_rng(6).normal(3, 2, (7, 40, 6, 11)).astype(np.float32)
    bits = set()
    for units, lanes in ((1, 8), (3, 16), (64, 8)):
        other = Device(cpu_device("cpu").cl_device, kind=device.kind, tuning=Tuning(loop_lanes=lanes))
        other.compute_units = units
        layer, x = BatchNorm2d(40, device=other), Tensor(values, other, requires_grad=True)
        y = layer(x)
        y.backward(Tensor(values[::-1].copy(), other))
        state = layer.state_dict()
        arrays = [y.numpy(), x.grad.numpy(), layer.weight.grad.numpy(), layer.bias.grad.numpy(), *state.values()]
        bits.add(b"".join(array.tobytes() for array in arrays))
    assert len(bits) == 1


def test_equal_values_have_no_spread(device):
    x = np.full((3, 2, 5, 7), 1e6, np.float32)
    assert not F.batch_norm(Tensor(x, device), training=True).numpy().any()


def test_nan_stays_in_its_channel(device):
    x = np.ones((2, 3, 4), np.float32)
    x[1, 1, 2] = np.nan
    layer = BatchNorm1d(3, device=device)
    result = layer(Tensor(x, device)).numpy()
    assert np.isnan(result[:, 1]).all() and np.isfinite(result[:, [0, 2]]).all()
    assert np.isnan(layer.state_dict()["running_mean"]).tolist() == [False, True, False]


def test_frozen_parameters_and_inputs_get_no_gradient(device):
    rng = np.random.default_rng(8)
    for frozen in ("weight", "bias", "x"):
        layer = BatchNorm1d(3, device=device)
        x = Tensor(rng.normal(0, 1, (4, 3)).astype(np.float32), device, requires_grad=frozen != "x")
        if frozen != "x":
            getattr(layer, frozen).requires_grad = False
        F.sum(layer(x) * Tensor(rng.normal(0, 1, (4, 3)).astype(np.float32), device)).backward()
        assert (x.grad is None) == (frozen == "x")
        assert (layer.weight.grad is None) == (frozen == "weight")
        assert (layer.bias.grad is None) == (frozen == "bias")


ONES = {"running_mean": (3,), "running_var": (3,)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": (3,), "training": True}, r"expected x of shape \[N, C, ...\], got shape \(3,\)"),
        ({"weight": (2,), "training": True}, r"expected weight of shape \(3,\), got \(2,\)"),
        ({"bias": (3,), "training": True}, "expected a weight with the bias, got none"),
        ({"eps": -1.0, "training": True}, "expected eps of at least 0, got -1.0"),
        ({"running_mean": (4,), "running_var": (3,)}, r"expected running_mean of shape \(3,\), got \(4,\)"),
        ({"running_mean": (3,)}, "expected running_mean and running_var both or neither, got one"),
        ({}, "expected running_mean and running_var where it does not train, got none"),
        ({"x": (1, 3), "training": True}, r"expected more than one element a channel in training, got shape \(1, 3\)"),
        ({**ONES, "momentum": None, "training": True}, "expected batches with momentum None, got none"),
        ({**ONES, "momentum": 1.5, "training": True}, "expected momentum from 0 to 1 or None, got 1.5"),
        ({**ONES, "batches": (1,)}, r"expected batches as int32 of shape \(\), got float32 \(1,\)"),
    ],
)
def test_wrong_arguments(device, arguments, message):
    tensors = {
        name: Tensor(np.ones(value, np.float32), device) if isinstance(value, tuple) else value
        for name, value in {"x": (2, 3), **arguments}.items()
    }
    with pytest.raises(ArgumentError, match="batch_norm: " + message):
        F.batch_norm(**tensors)


def test_wrong_layers(device):
    for kind, sizes, message in (
        (BatchNorm2d, (0,), "num_features: expected a whole number of at least 1, got 0"),
        (GroupNorm, (0, 4), "num_groups: expected a whole number of at least 1, got 0"),
        (GroupNorm, (3, 4), "num_groups: expected groups that divide 4 channels, got 3"),
    ):
        with pytest.raises(ArgumentError, match=message):
            kind(*sizes, device=device)
    for layer, shape in (
        (BatchNorm2d(3, device=device), (2, 3, 4)),
        (BatchNorm1d(3, device=device), (2, 3, 4, 5)),
        (BatchNorm1d(3, device=device), (3, 2)),
        (GroupNorm(1, 3, device=device), (3, 2)),
    ):
        with pytest.raises(ArgumentError, match=rf"{type(layer).__name__}: expected x .*3 channels, got shape \(\d"):
            layer(Tensor(np.ones(shape), device))
    with pytest.raises(ArgumentError, match="group_norm: expected num_groups that divide 3 channels, got 2"):
        F.group_norm(Tensor(np.ones((2, 3)), device), 2)
