"""netcl's optimizers under clcomm's adapter: PyTorch's formulas, and states that are restored or refused."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("netcl", reason="netcl is not installed")

from clcomm.base.errors import ArgumentError, CheckpointError
from clcomm.sync.adapters.netcl import cross_entropy
from clcomm.sync.adapters.netcl_optim import NetclOptimizer
from tests.adapters.netcl_models import batch, make_model, reference

STEP_OF = {
    # One step of each optimizer from zero state, PyTorch's formulas: (lr, value, gradient) -> value.
    "sgd": lambda lr, p, g: p - lr * g,
    "adam": lambda lr, p, g: p - lr * g / (np.abs(g) + 1e-8),
    "adamw": lambda lr, p, g: p * (1 - 0.01 * lr) - lr * g / (np.abs(g) + 1e-8),
    "rmsprop": lambda lr, p, g: p - lr * g / (np.sqrt(0.01) * np.abs(g) + 1e-8),
}


@pytest.mark.parametrize("name", STEP_OF)
def test_a_first_step_follows_pytorchs_formula(name):
    model, (x, y) = make_model(), batch()
    values = [parameter.numpy().astype(np.float64) for parameter in model.parameters()]
    gradients = reference(model, x, y).gradients
    optimizer = NetclOptimizer(model, name, lr=0.1)
    optimizer.lr = 0.05
    cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    for parameter, value, gradient in zip(model.parameters(), values, gradients, strict=True):
        moved = np.abs(gradient) > 1e-5  # below that Adam's quotient is a matter of rounding
        expected = STEP_OF[name](0.05, value, gradient)
        np.testing.assert_allclose(parameter.numpy()[moved], expected[moved], rtol=1e-4, atol=1e-5)
        assert parameter.grad is None


SETTINGS = [
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    ("adam", {}),
    ("adamw", {"weight_decay": 0.1}),
    ("rmsprop", {"momentum": 0.9}),
]


@pytest.mark.parametrize("name, settings", SETTINGS)
def test_a_restored_optimizer_continues_bit_for_bit(name, settings):
    def train(model, optimizer, steps):
        for seed in steps:
            x, y = batch(seed=seed)
            cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    model, resumed = make_model(), make_model(seed=1)
    optimizer = NetclOptimizer(model, name, 0.01, **settings)
    train(model, optimizer, range(3))
    again = NetclOptimizer(resumed, name, 0.01, **settings)
    resumed.load_state_dict(model.state_dict())
    again.load_state_dict(optimizer.state_dict())
    assert all(state.tobytes() == again.state_dict()[key].tobytes() for key, state in optimizer.state_dict().items())
    train(model, optimizer, range(3, 5))
    train(resumed, again, range(3, 5))
    for key, value in model.state_dict().items():
        assert value.tobytes() == resumed.state_dict()[key].tobytes(), key


def test_an_optimizers_state_fits_only_its_kind():
    model = make_model()
    state = NetclOptimizer(model, "adam", 0.01).state_dict()
    with pytest.raises(CheckpointError, match="of SGD, got that of Adam"):
        NetclOptimizer(model, "sgd", 0.01).load_state_dict(state)
    del state["exp_avg/layers.0.bias"]
    with pytest.raises(CheckpointError, match=r"layers\.0\.bias"):
        NetclOptimizer(model, "adam", 0.01).load_state_dict(state)


@pytest.mark.parametrize("name, settings", SETTINGS)
def test_an_optimizers_state_of_nonsense_changes_nothing(name, settings):
    model = make_model()
    optimizer = NetclOptimizer(model, name, 0.01, **settings)
    x, y = batch()
    cross_entropy(model(x), y).backward()
    optimizer.step()
    before = optimizer.state_dict()
    valid = {key: value + 1 if value.dtype.kind == "f" else value for key, value in before.items()}
    last = [*valid][-1]
    for key, value in (("step", -1), ("step", 0.5), ("step", "2"), (last, np.full(valid[last].shape, "x"))):
        with pytest.raises(CheckpointError, match=f"expected '{key}' to"):
            optimizer.load_state_dict({**valid, key: np.array(value)})
        assert all(state.tobytes() == before[kept].tobytes() for kept, state in optimizer.state_dict().items())


@pytest.mark.parametrize("name, settings", [("lbfgs", {}), ("adam", {"nesterov": True})])
def test_unknown_optimizers_are_refused(name, settings):
    with pytest.raises(ArgumentError, match=r"optimizer|nesterov"):
        NetclOptimizer(make_model(), name, 0.01, **settings)
