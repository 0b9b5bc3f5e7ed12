"""Optimizers against torch.optim over several steps, against float64 formulas, and their state."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Device, FlatSpace, Linear, Parameter, Sequential, Tensor
from clcomm.optim import SGD, Adadelta, Adagrad, Adam, AdamW, RAdam, RMSProp
from tests.helpers import cpu_device

CASES = [
    (SGD, "SGD", {"lr": 0.1}),
    (SGD, "SGD", {"lr": 0.1, "weight_decay": 0.05}),
    (SGD, "SGD", {"lr": 0.05, "momentum": 0.9}),
    (SGD, "SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (SGD, "SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    (SGD, "SGD", {"lr": 0.05, "momentum": 0.9, "maximize": True, "weight_decay": 0.01}),
    (SGD, "SGD", {"lr": 0.05, "maximize": True, "weight_decay": 0.01}),
    (Adam, "Adam", {}),
    (Adam, "Adam", {"lr": 0.02, "amsgrad": True, "weight_decay": 0.1}),
    (AdamW, "AdamW", {"lr": 0.02, "betas": (0.5, 0.6), "amsgrad": True, "maximize": True}),
    (RAdam, "RAdam", {}),
    (RAdam, "RAdam", {"lr": 0.02, "betas": (0.9, 0.9), "weight_decay": 0.1, "maximize": True}),
    (RAdam, "RAdam", {"lr": 0.02, "betas": (0.9, 0.99), "weight_decay": 0.1, "decoupled_weight_decay": True}),
    (Adam, "Adam", {"lr": 0.02, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}),
    (AdamW, "AdamW", {}),
    (AdamW, "AdamW", {"lr": 0.02, "weight_decay": 0.3}),
    (RMSProp, "RMSprop", {}),
    (RMSProp, "RMSprop", {"lr": 0.02, "alpha": 0.9, "weight_decay": 0.1, "momentum": 0.5}),
    (RMSProp, "RMSprop", {"centered": True, "maximize": True}),
    (RMSProp, "RMSprop", {"lr": 0.005, "momentum": 0.9, "centered": True}),
    (Adadelta, "Adadelta", {}),
    (Adadelta, "Adadelta", {"lr": 0.5, "rho": 0.95, "eps": 1e-5, "weight_decay": 0.1}),
    (Adadelta, "Adadelta", {"maximize": True, "weight_decay": 0.1}),
    (Adagrad, "Adagrad", {}),
    (Adagrad, "Adagrad", {"lr": 0.05, "maximize": True, "weight_decay": 0.1}),
    (Adagrad, "Adagrad", {"lr": 0.05, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.2}),
]
SHAPES = [(7,), (3, 5), (130,), (1,)]


@pytest.fixture(scope="module", params=["cpu kernels", "gpu kernels"])
def device(request: pytest.FixtureRequest) -> Device:
    return cpu_device(request.param.split()[0])


def start_values() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]


def step_gradients(step: int) -> list[np.ndarray]:
    rng = np.random.default_rng(100 + step)
    return [(rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 2)).astype(np.float32) for shape in SHAPES]


def take_step(optimizer, parameters: list[Parameter], step: int) -> None:
    optimizer.zero_grad()
    for parameter, gradient in zip(parameters, step_gradients(step), strict=True):
        parameter.grad = Tensor(gradient, parameter.device)
    optimizer.step()


def take_alike_steps(ours, parameters, theirs, tensors, step: int) -> None:
    """Take a step, and one of PyTorch's optimizer of the same gradients, and compare what they lead to."""
    take_step(ours, parameters, step)
    for tensor, gradient in zip(tensors, step_gradients(step), strict=True):
        tensor.grad = tensor.new_tensor(gradient)
    theirs.step()
    for parameter, tensor in zip(parameters, tensors, strict=True):
        np.testing.assert_allclose(parameter.numpy(), tensor.detach().numpy(), rtol=3e-5, atol=3e-6)


def test_a_model_gets_its_flat_space_and_padding_stays_zero(device):
    model = Sequential(Linear(3, 5, device=device), Linear(5, 2, device=device))
    optimizer = Adam(model, lr=0.1)
    assert optimizer.space is model.flat_space()
    for _ in range(3):
        model(Tensor(np.ones((2, 3)), device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    space, flat = model.flat_space(), np.empty(model.flat_space().layout.span, np.uint8)
    device.read(space.params, flat)
    for place in space.layout.ranges:
        flat[place.start : place.stop] = 0
    assert not flat.any()


def test_parameters_of_a_module_share_its_flat_space(device):
    model = Sequential(Linear(3, 5, device=device))
    assert SGD(model.parameters(), 0.1).space is Adam(model).space is model.flat_space()


def test_a_parameter_without_a_gradient_is_left_alone_and_no_gradient_is_no_step(device):
    first, second = Parameter([1.0, 1.0], device), Parameter([2.0], device)
    optimizer = SGD([first, second], 0.5, momentum=0.9)
    optimizer.step()
    assert optimizer.steps == 0 and first.numpy().tolist() == [1, 1]
    second.grad = Tensor([4.0], device)
    optimizer.step()
    optimizer.zero_grad()
    first.grad = Tensor([1.0, 2.0], device)
    optimizer.step()
    assert first.numpy().tolist() == [0.5, 0.0]
    assert second.numpy().tolist() == [0.0]
    optimizer.zero_grad(set_to_none=False)
    assert first.grad.numpy().tolist() == [0.0, 0.0]
    optimizer.step()  # as gradients of zeros are there
    assert np.allclose(first.numpy(), [0.5 - 0.45, 0.0 - 0.9])


def test_nan_in_a_gradient_shows_in_its_parameter_alone(device):
    for make in (SGD, Adam, AdamW, RAdam, RMSProp, Adadelta, Adagrad):
        a, b = Parameter([1.0, 1.0], device), Parameter([1.0], device)
        optimizer = make([a, b], lr=0.1)
        a.grad, b.grad = Tensor([np.nan, 1.0], device), Tensor([1.0], device)
        optimizer.step()
        assert np.isnan(a.numpy()).tolist() == [True, False] and np.isfinite(b.item())


def test_state_of_another_optimizer_or_model(device):
    def fresh(make, size=3, **options):
        return make([Parameter(np.zeros(size), device)], lr=0.1, **options)

    with pytest.raises(ArgumentError, match="expected the state of AdamW, got Adam"):
        fresh(AdamW).load_state_dict(fresh(Adam).state_dict())
    with pytest.raises(ArgumentError, match=r"expected the entries \[.*'velocity'.*\], got"):
        fresh(SGD, momentum=0.9).load_state_dict(fresh(SGD).state_dict())
    with pytest.raises(ArgumentError, match="state_dict: expected 3 elements of parameter 0, got 200; give the"):
        fresh(Adam).load_state_dict(fresh(Adam, size=200).state_dict())


OPTIMIZERS = [
    (SGD, {}),
    (SGD, {"momentum": 0.9}),
    (SGD, {"momentum": 0.9, "nesterov": True}),
    (SGD, {"momentum": 0.9, "dampening": 0.5, "maximize": True}),
    (Adam, {}),
    (Adam, {"amsgrad": True}),
    (RAdam, {}),
    (AdamW, {}),
    (RMSProp, {}),
    (RMSProp, {"momentum": 0.9, "centered": True}),
]


def nonsense_of(state: dict[str, np.ndarray], buffers: tuple[str, ...]) -> list[tuple[str, object]]:
    """Return entries that no `state_dict()` has, as (name, value): each entry with each kind of nonsense."""
    numbers = state.keys() - {"kind", *buffers}
    not_numbers = ["fast", b"x", 1j, None, np.array([0.5, 0.5]), np.datetime64("2026-01-01"), np.timedelta64(1, "ns")]
    found = [(name, value) for name in sorted(numbers) for value in (-1, float("nan"), float("inf"), *not_numbers)]
    found += [("steps", 0.5), ("steps", 3.0), ("steps", True)]
    found += [(name, 1.0) for name in ("beta1", "beta2") if name in numbers]
    found += [(name, 0.5) for name in ("nesterov", "centered", "amsgrad", "maximize") if name in numbers]
    # Other buffers belong to these than the state has.
    found += [("momentum", 0.0 if state["momentum"] else 0.5)] if "momentum" in numbers else []
    found += [("centered", 1 - state["centered"])] if "centered" in numbers else []
    found += [("nesterov", 1.0)] if "nesterov" in numbers and not state["momentum"] else []
    for name in buffers:
        whole = state[name]
        found += [(name, whole[1:]), (name, whole.astype(str)), (name, whole.astype(complex)), (name, whole[None])]
    return found


def over_the_model(model):
    return model


def over_a_list_of_it(model):
    model.flat_space()
    return [*model.parameters()][::-1]


def over_a_list_that_came_first(model):
    parameters = [*model.parameters()][::-1]
    FlatSpace((str(index), each) for index, each in enumerate(parameters))
    model.flat_space()
    return parameters


def over_a_list_without_names(model):
    return [*model.parameters()]


def over_a_turned_list_without_names(model):
    return [*model.parameters()][::-1]


def in_two_groups_without_names(model):
    return [{"params": [*model.parameters()][::2], "lr": 0.02}, {"params": [*model.parameters()][1::2]}]


def in_two_groups(model):
    weights, biases = [*model.parameters()][::2], [*model.parameters()][1::2]
    FlatSpace((str(index), each) for index, each in enumerate([*biases, *weights]))
    model.flat_space()
    return [{"params": weights, "lr": 0.02}, {"params": biases}]


def in_two_groups_of_the_model(model):
    model.flat_space()
    return in_two_groups_without_names(model)


WAYS = [
    (over_the_model, over_a_list_of_it, over_a_list_that_came_first),
    (over_the_model, over_a_list_without_names),  # its parameters are found by their places
    (over_a_list_of_it, over_a_list_that_came_first, over_a_turned_list_without_names),
    (in_two_groups, in_two_groups_of_the_model, in_two_groups_without_names),
]
PAIRS = [pair for ways in WAYS for pair in permutations(ways, 2)]


@pytest.mark.parametrize(("make", "options"), OPTIMIZERS)
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_state_continues_in_a_flat_space_of_another_order(device, first, second, make, options):
    """All weights, and all biases, are of one shape, so that nothing else tells that their states are exchanged."""
    models = [Sequential(*[Linear(4, 4, device=device) for _ in range(3)]) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    given = first(models[0]), second(models[1])
    optimizers = [make(each, **{"lr": 0.1, **options}) for each in given]

    frozen = [*models[0].parameters()][3]

    def step(number, which):
        for index in which:
            rng = np.random.default_rng(number)
            for parameter in models[index].parameters():
                parameter.grad = Tensor(rng.standard_normal(parameter.shape), device)
            optimizers[index].step()

    for number in range(3):
        if number == 2:
            frozen.requires_grad = False
        step(number, [0])
    frozen.requires_grad = True
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    step(3, [0, 1])
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()


def test_a_state_of_other_parameters_is_refused(device):
    def optimizer_over(*shapes, name="weight"):
        named = {f"{name}{index}": Parameter(np.ones(shape), device) for index, shape in enumerate(shapes)}
        FlatSpace(named.items())
        return SGD([*named.values()], lr=0.1, momentum=0.9)

    state = optimizer_over((3, 5), (2, 4)).state_dict()
    for other, message in [
        (optimizer_over((2, 4), (3, 5)), "expected 15 elements of parameter weight1, got 8; give the optimizer"),
        (
            optimizer_over((3, 5), (2, 4), name="w"),
            r"names'\]: expected w0, w1, got weight0, weight1; give the optimizer",
        ),
    ]:
        before = other.state_dict()
        with pytest.raises(ArgumentError, match=message):
            other.load_state_dict(state)
        assert {n: v.tobytes() for n, v in other.state_dict().items()} == {n: v.tobytes() for n, v in before.items()}


@pytest.mark.parametrize(("make", "options"), OPTIMIZERS)
def test_a_state_of_nonsense_changes_nothing(device, make, options):
    def stepped(steps: int):
        parameters = [Parameter(value, device) for value in start_values()]
        optimizer = make(parameters, **{"lr": 0.1, **options})
        for step in range(steps):
            take_step(optimizer, parameters, step)
        return optimizer

    optimizer, other = stepped(2), stepped(5)
    other.lr = 0.5
    before, valid = optimizer.state_dict(), other.state_dict()
    for name, value in nonsense_of(valid, other.state_names):
        with pytest.raises(ArgumentError, match=r"state_dict|nesterov: expected a momentum above 0"):
            optimizer.load_state_dict({**valid, name: np.array(value)})
        after = optimizer.state_dict()
        assert {n: v.tobytes() for n, v in after.items()} == {n: v.tobytes() for n, v in before.items()}, (name, value)
    optimizer.load_state_dict(valid)
    assert {n: v.tobytes() for n, v in optimizer.state_dict().items()} == {n: v.tobytes() for n, v in valid.items()}


def test_no_parameters():
    with pytest.raises(ArgumentError, match="expected at least one trainable parameter"):
        SGD([], 0.1)
