"""Modules: names, state, initial values as PyTorch's, layers as functions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.base.errors import ArgumentError
from clcomm.engine import (
    Conv2d,
    Flatten,
    Generator,
    Linear,
    MaxPool2d,
    Module,
    Parameter,
    ReLU,
    Sequential,
    Tensor,
    manual_seed,
)


class Net(Module):
    def __init__(self, device):
        self.scale = Parameter([1.0], device)
        self.inner = Sequential(Linear(3, 2, device=device), Sequential(Linear(2, 2, bias=False, device=device)))
        self.twin = self.inner[0]
        self.factor = 2.0

    def forward(self, x):
        return self.inner(x) * self.scale


def test_names_follow_the_attributes_and_shared_modules_count_once(device):
    net = Net(device)
    names = ["scale", "inner.0.weight", "inner.0.bias", "inner.1.0.weight"]
    assert [name for name, _ in net.named_parameters()] == names
    assert [name for name, _ in net.named_modules()] == ["", "inner", "inner.0", "inner.1", "inner.1.0"]
    assert net.parameter_count() == 1 + 6 + 2 + 4
    del net.scale
    net.inner = None
    assert [name for name, _ in net.named_parameters()] == ["twin.weight", "twin.bias"]


def test_training_flag(device):
    net = Net(device)
    assert net.training and not net.eval().inner[0].training and net.train().inner[0].training


def test_state_round_trip(device):
    first, second = Net(device), Net(device)
    second.load_state_dict(first.state_dict())
    for name, value in first.state_dict().items():
        assert second.state_dict()[name].tobytes() == value.tobytes()


def test_state_of_another_model_changes_nothing(device):
    net = Net(device)
    state = net.state_dict()
    with pytest.raises(ArgumentError, match=r"missing \['scale'\], unknown \['scales'\]"):
        net.load_state_dict({("scales" if n == "scale" else n): np.zeros_like(v) for n, v in state.items()})
    wrong = {name: np.zeros_like(value) for name, value in state.items()}
    wrong["inner.0.weight"] = np.zeros((3, 2))
    with pytest.raises(ArgumentError, match=r"state_dict\['inner.0.weight'\]: expected \(2, 3\), got \(3, 2\)"):
        net.load_state_dict(wrong)
    wrong = {name: np.zeros_like(value) for name, value in state.items()}
    for name, value in state.items():
        for values in (value.astype(str), value.astype(complex), np.full(value.shape, None)):
            with pytest.raises(ArgumentError, match=rf"state_dict\['{name}'\]: expected numbers, got {values.dtype}"):
                net.load_state_dict({**wrong, name: values})
    assert all(np.array_equal(value, state[name]) for name, value in net.state_dict().items())


def test_a_new_parameter_joins_the_flat_space(device):
    net = Net(device)
    before = net.flat_space()
    net.late = Parameter([1.0], device)
    space = net.flat_space()
    assert space is not before and {p.name for p in space.layout.ranges} == {n for n, _ in net.named_parameters()}
    assert net.flat_space() is space and net.late.slot in space.slots


def test_bad_layers(device):
    with pytest.raises(ArgumentError, match="in_features: expected a whole number of at least 1, got 0"):
        Linear(0, 3)
    with pytest.raises(ArgumentError, match="kernel_size: expected a whole number of at least 1, got 0"):
        Conv2d(1, 1, (3, 0))
    with pytest.raises(ArgumentError, match="Sequential: expected modules, got int at position 1"):
        Sequential(ReLU(), 3)
    with pytest.raises(TypeError, match=r"Module defines no forward\(\)"):
        Module()(Tensor([1.0], device))


@given(seed=st.integers(0, 2**64 - 1), fan_in=st.integers(1, 70), fan_out=st.integers(1, 40), bias=st.booleans())
def test_linear_starts_as_pytorchs(device, seed, fan_in, fan_out, bias):
    torch = pytest.importorskip("torch")
    torch.manual_seed(seed)
    theirs = torch.nn.Linear(fan_in, fan_out, bias=bias)
    manual_seed(seed)
    ours = Linear(fan_in, fan_out, bias=bias, device=device)
    assert ours.weight.numpy().tobytes() == theirs.weight.detach().numpy().tobytes()
    assert (ours.bias is None) == (not bias)
    if bias:
        assert ours.bias.numpy().tobytes() == theirs.bias.detach().numpy().tobytes()


@given(channels=st.integers(1, 9), out=st.integers(1, 17), height=st.integers(1, 5), width=st.integers(1, 5))
def test_conv2d_starts_as_pytorchs(device, channels, out, height, width):
    torch = pytest.importorskip("torch")
    torch.manual_seed(11)
    theirs = [torch.nn.Conv2d(channels, out, (height, width)) for _ in range(2)]
    rng = Generator(11)
    ours = [Conv2d(channels, out, (height, width), device=device, rng=rng) for _ in range(2)]
    for a, b in zip(ours, theirs, strict=True):
        assert a.weight.numpy().tobytes() == b.weight.detach().numpy().tobytes()
        assert a.bias.numpy().tobytes() == b.bias.detach().numpy().tobytes()


def test_uniform_needs_no_pytorch_to_stay_as_it_is():
    drawn = Generator(0).uniform((4,), 0.0, 1.0)  # torch.manual_seed(0); torch.empty(4).uniform_()
    assert (drawn * 2**24).astype(int).tolist() == [8325804, 12888623, 1484405, 2215104]


def test_seeds():
    assert Generator(5).uniform((3,), -1, 1).tolist() == Generator(5 + 2**32).uniform((3,), -1, 1).tolist()
    for seed in (1.5, "3", True):
        with pytest.raises(ArgumentError, match="seed: expected a whole number"):
            Generator(seed)


class Apart(Module):
    """Modules one after another, without fusing."""

    def __init__(self, *modules):
        for index, module in enumerate(modules):
            setattr(self, str(index), module)

    def forward(self, x):
        for module in self._modules.values():
            x = module(x)
        return x


def drawn_layers(device, kinds):
    """Return the same layers each time it is called."""
    rng = Generator(3)
    linear = {"linear": lambda: Linear(48, 5, device=device, rng=rng), "relu": ReLU, "flatten": Flatten}
    convolution = {"conv": lambda: Conv2d(2, 3, 3, padding=1, device=device, rng=rng), "pool": lambda: MaxPool2d(2)}
    return [{**linear, **convolution}[kind]() for kind in kinds]


def outcome(device, model, x_values):
    x = Tensor(x_values, device, requires_grad=True)
    y = model(x)
    y.backward(Tensor(np.random.default_rng(2).standard_normal(y.shape).astype(np.float32), device))
    grads = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    return y.numpy(), {"x": x.grad.numpy(), **grads}


@pytest.mark.parametrize("size", [8, 9])
def test_layers_run_together_give_the_bits_of_layers_run_apart(device, size):
    x = np.random.default_rng(1).standard_normal((11, 2, size, size)).astype(np.float32)
    x[0, 0, 0, 0], x[1, 1, 3, 3] = np.nan, -0.0
    kinds = ["conv", "relu", "pool", "flatten", "linear", "relu"]
    y, grads = outcome(device, Sequential(*drawn_layers(device, kinds)), x)
    y_apart, grads_apart = outcome(device, Apart(*drawn_layers(device, kinds)), x)
    assert y.tobytes() == y_apart.tobytes() and np.isnan(y).any() and (y == 0).any()
    for name, grad in grads.items():
        if name == "0.bias":  # its sum runs over the pixels in another order
            np.testing.assert_allclose(grad, grads_apart[name], rtol=1e-5, atol=1e-5)
        else:
            assert grad.tobytes() == grads_apart[name].tobytes(), name


def test_what_runs_together(device, monkeypatch):
    launched = []
    launch = device.launch
    monkeypatch.setattr(device, "launch", lambda k, *rest: (launched.append(k.function_name), launch(k, *rest)))

    def kernels(*kinds, change=None):
        layers = drawn_layers(device, kinds)
        if change:
            change(layers)
        image = kinds[0] == "conv"
        x = Tensor(np.ones((8, 2, 8, 8) if image else (8, 48), np.float32), device)
        launched.clear()
        Sequential(*layers)(x)
        return [name for name in launched if name not in ("pack_lanes", "gemm_dots")]

    apart = ["convolve", "each_relu", "max_pool"]
    together = ["convolve_relu_pool"] if device.is_cpu else apart
    assert kernels("conv", "relu", "pool") == together
    assert kernels("conv", "relu", "pool", "relu") == [*together, "each_relu"]
    assert kernels("conv", "relu") == apart[:2]
    assert kernels("conv", "pool") == [apart[0], apart[2]]
    assert "each_relu" not in kernels("linear", "relu")
    assert "each_relu" in kernels("linear", "flatten", "relu")

    class Louder(ReLU):
        pass

    def stride(layers):
        layers[0].stride = 2

    def window(layers):
        layers[2].kernel_size = 3

    def subclass(layers):
        layers[1] = Louder()

    def forward(layers):
        layers[1].forward = lambda x: x

    assert kernels("conv", "relu", "pool", change=stride) == apart
    assert kernels("conv", "relu", "pool", change=window) == apart
    assert kernels("conv", "relu", "pool", change=subclass) == apart
    assert kernels("conv", "relu", "pool", change=forward) == [apart[0], apart[2]]
    assert kernels("linear", "relu", change=subclass)[-1] == "each_relu"
