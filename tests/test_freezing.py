"""Parameters that are frozen and unfrozen between steps: PyTorch's results, and a valid state."""

from __future__ import annotations

import os

import numpy as np
import pytest

from clcomm import Synchronizer
from clcomm.base.errors import ArgumentError
from clcomm.engine import Linear, Module, Parameter, Replay, Sequential, Tensor
from clcomm.jobs.checkpoint import Checkpoint, load, save
from clcomm.optim import SGD
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from tests.helpers import cpu_device
from tests.test_optim import CASES

SHAPES = {"a": (3, 5), "b": (7,), "c": (130,), "d": (1,), "e": (2, 2)}
STEPS = 9
#: How many courses are drawn for each optimizer; CLCOMM_FREEZING for more.
COURSES = int(os.environ.get("CLCOMM_FREEZING", "2"))


class Net(Module):
    """Parameters, nested, and the sum of each times a gradient as its result."""

    def __init__(self, values: dict[str, np.ndarray], device):
        self.inner = Module()
        for index, (name, value) in enumerate(values.items()):
            setattr(self.inner if index % 2 else self, name, Parameter(value, device))

    def trainable(self) -> dict[str, Parameter]:
        return {name.removeprefix("inner."): p for name, p in self.named_parameters()}

    def forward(self, *gradients: Tensor) -> Tensor:
        total = None
        for parameter, gradient in zip(self.parameters(), gradients, strict=True):
            if parameter.requires_grad:
                part = (parameter * gradient).sum()
                total = part if total is None else total + part
        assert total is not None
        return total


def drawn_course(seed: int) -> tuple[list[dict[str, bool]], list[dict[str, np.ndarray]]]:
    """Return which parameters are trained in each step, at least one of them, and all gradients."""
    rng = np.random.default_rng(seed)
    course: list[dict[str, bool]] = []
    now = dict.fromkeys(SHAPES, True)
    for step in range(STEPS):
        if step == 0 or rng.random() < 0.6:
            now = {name: bool(rng.random() < 0.6) for name in SHAPES}
            if not any(now.values()):
                now["c"] = True
        course.append(dict(now))
    gradients = [{n: rng.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()} for _ in range(STEPS)]
    return course, gradients


class Ours:
    """A model, an optimizer made from it or from its parameters, and a step that may be replayed."""

    def __init__(self, kind, options, values, device, trained, *, by_parameters=False, replayed=False, whole=False):
        self.model, self.device = Net(values, device), device
        self.freeze(trained)
        self.optimizer = kind(self.model.parameters() if by_parameters else self.model, **options)
        self.step_function = Replay(self._forward_backward) if replayed else self._forward_backward
        if whole:
            self.step_function = Replay(self._whole_step)
        self._is_whole = whole

    def freeze(self, trained: dict[str, bool]) -> None:
        for name, parameter in self.model.trainable().items():
            parameter.requires_grad = trained[name]

    def _forward_backward(self, *gradients: Tensor) -> None:
        self.model(*gradients).backward()

    def _whole_step(self, *gradients: Tensor) -> None:
        self._forward_backward(*gradients)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, trained: dict[str, bool], gradients: dict[str, np.ndarray]) -> None:
        self.freeze(trained)
        self.step_function(*[Tensor(gradients[name], self.device) for name in self.model.trainable()])
        if not self._is_whole:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def values(self) -> dict[str, np.ndarray]:
        trainable = self.model.trainable()
        return {name: trainable[name].numpy() for name in SHAPES}


def start_values(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


WAYS = [{}, {"by_parameters": True}, {"replayed": True}, {"whole": True}, {"by_parameters": True, "whole": True}]


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize(("ours", "theirs", "options"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_as_pytorch_over_drawn_courses(ours, theirs, options, kind):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed; pip install -e '.[torch]'")
    for seed in range(COURSES):
        course, gradients = drawn_course(seed)
        way = WAYS[(seed + CASES.index((ours, theirs, options)) + (kind == "gpu")) % len(WAYS)]
        case = Ours(ours, options, start_values(), cpu_device(kind), course[0], **way)
        tensors = {name: torch.tensor(value, requires_grad=True) for name, value in start_values().items()}
        order = list(case.model.trainable())
        reference = getattr(torch.optim, theirs)([tensors[name] for name in order], **{"lr": 1e-2, **options})
        case.optimizer.lr = reference.param_groups[0]["lr"]
        for step, (trained, given) in enumerate(zip(course, gradients, strict=True)):
            before = case.values()
            case.step(trained, given)
            for name, tensor in tensors.items():
                tensor.requires_grad_(trained[name])
                tensor.grad = torch.tensor(given[name]) if trained[name] else None
            reference.step()
            for name, value in case.values().items():
                if not trained[name]:
                    assert value.tobytes() == before[name].tobytes(), (name, step, way)
                expected = tensors[name].detach().numpy()
                np.testing.assert_allclose(value, expected, rtol=5e-5, atol=5e-6, err_msg=f"{name} {step} {way} {seed}")


@pytest.mark.parametrize(("ours", "theirs", "options"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_a_saved_state_goes_on_to_the_same_bits(ours, theirs, options, tmp_path):
    course, gradients = drawn_course(7)
    course = [dict.fromkeys(SHAPES, True), *course]  # both have a place for all parameters
    gradients = [gradients[0], *gradients]
    device, half = cpu_device("cpu"), STEPS // 2
    case = Ours(ours, options, start_values(), device, course[0])
    for trained, given in zip(course[:half], gradients[:half], strict=True):
        case.step(trained, given)
    checkpoint = Checkpoint()
    checkpoint.add_group("optimizer", case.optimizer.state_dict())
    save(tmp_path / "state.npz", checkpoint)
    resumed = Ours(ours, options, case.values(), device, course[0])
    resumed.optimizer.load_state_dict(load(tmp_path / "state.npz").group("optimizer"))
    for trained, given in zip(course[half:], gradients[half:], strict=True):
        case.step(trained, given), resumed.step(trained, given)
    assert {n: v.tobytes() for n, v in case.values().items()} == {n: v.tobytes() for n, v in resumed.values().items()}
    ends = [{n: v.tobytes() for n, v in each.optimizer.state_dict().items()} for each in (case, resumed)]
    assert ends[0] == ends[1]


def test_a_state_grows_where_more_is_trained():
    device, options = cpu_device("cpu"), {"lr": 0.1, "momentum": 0.9}
    frozen = {**dict.fromkeys(SHAPES, True), "b": False}
    case = Ours(SGD, options, start_values(), device, frozen)
    gradients = drawn_course(1)[1]
    case.step(frozen, gradients[0])
    case.step(dict.fromkeys(SHAPES, True), gradients[1])
    state = case.optimizer.state_dict()
    assert state["missed"].tolist() == [int(p is case.model.inner.b) for p in case.optimizer.space.parameters]
    resumed = Ours(SGD, options, case.values(), device, frozen)
    resumed.freeze(dict.fromkeys(SHAPES, True))  # as it was when the state was saved
    resumed.optimizer.load_state_dict(state)
    case.step(frozen, gradients[2]), resumed.step(frozen, gradients[2])
    assert {n: v.tobytes() for n, v in case.values().items()} == {n: v.tobytes() for n, v in resumed.values().items()}


@pytest.mark.parametrize(("missed", "message"), [
    ([0], r"state_dict\['missed'\]: expected 2 numbers of steps"),
    ([-1, 0], r"state_dict\['missed'\]: expected 2 numbers of steps"),
    ([0.5, 0], r"state_dict\['missed'\]: expected 2 numbers of steps"),
    ([9, 0], r"state_dict\['missed'\]: expected at most 0 steps, got 9"),
])  # fmt: skip
def test_a_state_of_nonsense_is_refused(device, missed, message):
    optimizer = SGD(Linear(2, 2, device=device), 0.1)
    with pytest.raises(ArgumentError, match=message):
        optimizer.load_state_dict({**optimizer.state_dict(), "missed": np.array(missed)})


def test_a_part_of_a_model_is_trained_while_the_rest_is_frozen(device):
    model = Sequential(Linear(3, 4, device=device), Linear(4, 2, device=device))
    whole = SGD(model, 0.1, momentum=0.9)
    x = Tensor(np.ones((2, 3)), device)
    model(x).sum().backward()
    whole.step(), whole.zero_grad()
    for parameter in model[0].parameters():
        parameter.requires_grad = False
    before = model.state_dict()
    for optimizer in (SGD(model[1], 0.1), SGD([p for p in model.parameters() if p.requires_grad], 0.1)):
        model(x).sum().backward()
        optimizer.step(), optimizer.zero_grad()
    after = model.state_dict()
    assert [bool((before[n] == after[n]).all()) for n in before] == [True, True, False, False]
    for parameter in model[0].parameters():
        parameter.requires_grad = True
    model(x).sum().backward()
    before = model.state_dict()
    optimizer.step()  # leaves the others, which are trained again, to another optimizer
    after = model.state_dict()
    assert [bool((before[n] == after[n]).all()) for n in before] == [True, True, False, False]


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("freeze", [True, False])
@pytest.mark.parametrize("sharded", [False, True])
def test_under_a_synchronizer_it_is_an_error_that_says_so(comm, freeze, sharded):
    model = Sequential(Linear(3, 4), Linear(4, 2))
    model[0].bias.requires_grad = freeze
    sync = Synchronizer(comm)
    optimizer = SGD(model, 0.1, momentum=0.9)
    if sharded:
        optimizer = DistributedOptimizer(optimizer, sync)
    sync.broadcast_parameters(model)

    def step() -> None:
        model(Tensor(np.ones((2, 3)))).sum().backward()
        sync.sync_gradients(model)
        optimizer.step(), optimizer.zero_grad()

    step()
    model[0].bias.requires_grad = not freeze
    with pytest.raises(ArgumentError, match=r"^parameter '0\.bias': expected requires_grad to stay as it was"):
        step()
