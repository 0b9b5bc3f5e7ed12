"""A replayed function does, bit for bit, what it does without a Replay; where it could not, it is not replayed."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from clcomm import optim
from clcomm.engine import CrossEntropyLoss, Linear, Module, Replay, Tensor, measure_overhead, no_grad
from clcomm.engine import functional as F
from clcomm.engine.device import Device
from clcomm.errors import ArgumentError
from models import MLP, ConvNet

SHAPE, CLASSES = (1, 10, 10), 7
MODELS: dict[str, Callable[[Device], Any]] = {
    "mlp": lambda device: MLP(SHAPE, CLASSES, 20, device=device, seed=3),
    "convnet": lambda device: ConvNet(SHAPE, CLASSES, device=device, seed=3),
}
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda model: optim.SGD(model, 0.1, momentum=0.9),
    "adam": lambda model: optim.Adam(model, 0.01),
    "rmsprop": lambda model: optim.RMSProp(model, 0.01),
}
LOSS = CrossEntropyLoss()


class Twin:
    """A model with its step as it is, and another with its step replayed; everything is done to both."""

    def __init__(self, device: Device, model: str = "mlp", optimizer: str = "sgd", limit: int = 16):
        self.device = device
        self.models = [MODELS[model](device) for _ in range(2)]
        self.optimizers = [OPTIMIZERS[optimizer](model) for model in self.models]
        self.steps: list[Any] = [self.make_step(model) for model in self.models]
        self.replay = self.steps[1] = Replay(self.steps[1], limit=limit)
        self.rng = np.random.default_rng(5)

    @staticmethod
    def make_step(model: Any) -> Callable[..., Tensor]:
        def step(x: Tensor, y: Tensor, weight: float = 1.0) -> Tensor:
            loss = LOSS(model(x), y)
            loss.backward(weight)
            return loss

        return step

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        images = self.rng.standard_normal((size, *SHAPE)).astype(np.float32)
        return Tensor(images, self.device), Tensor(self.rng.integers(0, CLASSES, size), self.device)

    def step(self, size: int = 8, *rest: Any) -> None:
        x, y = self.batch(size)
        losses = [step(x, y, *rest) for step in self.steps]
        assert losses[0].numpy().tobytes() == losses[1].numpy().tobytes()
        self.assert_same_gradients()

    def update(self, zero: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            if zero:
                optimizer.zero_grad()

    def assert_same_gradients(self) -> None:
        for p, q in zip(*(model.parameters() for model in self.models), strict=True):
            if p.grad is None:
                assert q.grad is None
            else:
                assert p.grad.numpy().tobytes() == q.grad.numpy().tobytes()

    def assert_same_parameters(self) -> None:
        first, second = (model.state_dict() for model in self.models)
        for name in first:
            assert first[name].tobytes() == second[name].tobytes(), name


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("model", list(MODELS))
def test_twenty_steps_with_a_short_last_batch(device, model, optimizer):
    twin = Twin(device, model, optimizer)
    for size in [8, 8, 8, 5] * 5:
        twin.step(size)
        twin.update()
    twin.assert_same_parameters()
    assert twin.replay.refusal is None
    assert twin.replay.recorded <= 4 and twin.replay.replayed >= 14


@pytest.mark.parametrize("model", list(MODELS))
def test_micro_batches_with_weights(device, model):
    twin = Twin(device, model)
    for number in range(8):
        for size in (8, 8, 4) if number % 4 else (8, 5):
            twin.step(size, size / 20)
        twin.update()
    twin.assert_same_parameters()
    assert twin.replay.replayed >= 10 and twin.replay.refusal is None


def test_gradients_that_are_never_forgotten(device):
    twin = Twin(device)
    for _ in range(20):
        twin.step()
        twin.update(zero=False)
    twin.assert_same_parameters()
    assert twin.replay.recorded == 1


def flat_arrays(space: Any) -> list[np.ndarray]:
    spans = [np.zeros(space.layout.span + 512, np.uint8) for _ in range(3)]
    return [array[-array.ctypes.data % 512 :][: space.layout.span] for array in spans]


def test_synchronised_gradients_and_a_move_to_other_memory(device):
    twin = Twin(device)
    for number in range(12):
        if number in (0, 6):
            bound = [flat_arrays(model.flat_space()) for model in twin.models]
            for model, arrays in zip(twin.models, bound, strict=True):
                model.flat_space().rebind(*arrays)
        twin.step()
        for model, (_, grads, reduced) in zip(twin.models, bound, strict=True):
            space = model.flat_space()
            space.pull_grads(0, space.layout.span)
            reduced[...] = (grads.view(np.float32) * 0.5).view(np.uint8)
            space.push_grads(0, space.layout.span)
        if number % 3 == 0:
            twin.step()  # onto the averaged ones
        twin.update()
    twin.assert_same_parameters()
    assert twin.replay.replayed >= 6


def test_parameters_and_learning_rate_may_change_between_steps(device):
    twin = Twin(device)
    start = twin.models[0].state_dict()
    for number in range(9):
        for optimizer in twin.optimizers:
            optimizer.lr = 0.1 / (1 + number)
        if number == 5:
            for model in twin.models:
                model.load_state_dict(start)
        twin.step()
        twin.update()
    twin.assert_same_parameters()
    assert twin.replay.recorded == 1


def test_results_are_not_overwritten_by_later_replays(device):
    twin = Twin(device)
    batches = [twin.batch(4) for _ in range(6)]
    model = twin.models[1]
    both = Replay(lambda x, y: (LOSS(model(x), y), model(x)))
    kept = [both(x, y) for x, y in batches]
    assert both.replayed == 4
    for (x, y), (loss, logits) in zip(batches, kept, strict=True):
        assert loss.item() == LOSS(model(x), y).item()
        assert logits.numpy().tobytes() == model(x).numpy().tobytes()


def test_hooks_fire_in_order_with_complete_gradients(device):
    twin = Twin(device)
    seen: list[list[Any]] = [[], []]
    for log, model in zip(seen, twin.models, strict=True):
        names = {id(p): name for name, p in model.named_parameters()}
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, log=log, names=names, model=model: log.append(
                    (names[id(p)], p.grad.numpy().tobytes(), [q.grad is None for q in model.parameters()])
                )
            )
    for _ in range(6):
        twin.step()
        twin.update()
    assert seen[0] == seen[1] and len(seen[1]) == 6 * 6
    assert twin.replay.recorded == 1 and twin.replay.replayed == 4


def test_a_planned_hook_is_asked_when_recorded_and_its_answer_is_replayed(device):
    twin = Twin(device)
    asked, done = [0, 0], [0, 0]
    for side, model in enumerate(twin.models):

        def answer(side=side):
            done[side] += 1

        def plan(parameter, side=side, answer=answer):
            asked[side] += 1
            return answer

        silent, followed, *_ = model.parameters()
        silent.register_post_accumulate_grad_hook(lambda parameter: None, planned=True)
        followed.register_post_accumulate_grad_hook(plan, planned=True)
    for _ in range(6):
        twin.step()
        twin.update()
    assert (asked, done) == ([6, 2], [6, 6])  # as it is, recorded, then four replays
    twin.assert_same_parameters()


def test_a_hook_may_change_the_gradient_and_come_and_go(device):
    twin = Twin(device)
    removals: list[Callable[[], None]] = []
    for number in range(12):
        if number == 4:
            for model in twin.models:
                weight = next(model.parameters())
                halve = lambda p: setattr(p, "grad", p.grad * 0.5)  # noqa: E731
                removals.append(weight.register_post_accumulate_grad_hook(halve))
        if number == 8:
            for remove in removals:
                remove()
        twin.step()
        twin.update()
    twin.assert_same_parameters()
    assert twin.replay.recorded == 3 and twin.replay.replayed == 8


def test_freezing_a_parameter_makes_a_new_recording(device):
    twin = Twin(device)
    for number in range(9):
        for model in twin.models:
            model.fc1.weight.requires_grad = not 3 <= number < 6
        twin.step()
        assert (twin.models[1].fc1.weight.grad is None) == (3 <= number < 6)
        twin.update()
    twin.assert_same_parameters()
    assert twin.replay.recorded == 3


def test_a_whole_step_with_optimizer_and_zero_grad_inside(device):
    twin = Twin(device, optimizer="adam")
    inner = [Twin.make_step(model) for model in twin.models]

    def whole(number: int) -> Callable[[Tensor, Tensor], Tensor]:
        def step(x: Tensor, y: Tensor) -> Tensor:
            twin.models[number].zero_grad()
            loss = inner[number](x, y)
            twin.optimizers[number].step()
            return loss

        return step

    twin.steps = [whole(0), Replay(whole(1))]
    for number in range(10):
        for optimizer in twin.optimizers:
            optimizer.lr = 0.01 * (1 + number)
        twin.step()
    twin.assert_same_parameters()
    assert [optimizer.steps for optimizer in twin.optimizers] == [10, 10]
    assert twin.steps[1].replayed >= 7


def test_two_models_on_one_device_take_turns(device):
    twins = [Twin(device, "mlp"), Twin(device, "convnet")]
    for _ in range(6):
        for twin in twins:
            twin.step()
        for twin in twins:
            twin.update()
    for twin in twins:
        twin.assert_same_parameters()
        assert twin.replay.replayed == 4


def test_an_exception_while_recording_leaves_nothing_behind(device):
    twin = Twin(device)
    step, fails = twin.replay.function, [False]

    def failing(x: Tensor, y: Tensor) -> Tensor:
        loss = step(x, y)
        if fails[0]:
            raise ValueError("on purpose")
        return loss

    twin.replay.function = failing
    twin.step()
    fails[0] = True
    for model in twin.models:
        model.zero_grad()
    with pytest.raises(ValueError, match="on purpose"):
        twin.replay(*twin.batch(8))
    assert device.recorder is None
    fails[0] = False
    for _ in range(4):
        for model in twin.models:
            model.zero_grad()
        twin.step()
    assert twin.replay.recorded == 1 and twin.replay.replayed == 3


class Remembering(Module):
    def __init__(self, device: Device):
        self.layer = Linear(4, 4, device=device)

    def forward(self, x: Tensor) -> Tensor:
        self.last = F.relu(self.layer(x))
        return self.last


def refused_functions(device: Device) -> dict[str, tuple[str, Callable[[Tensor], Any]]]:
    layer, loose, remembering = Linear(4, 4, device=device), Linear(4, 4, device=device), Remembering(device)
    layer.flat_space()
    remembering.flat_space()
    counter = itertools.count()
    return {
        "item": ("brings values to the host", lambda x: x * layer(x).sum().item()),
        "upload": ("brings values to the device", lambda x: x * Tensor(np.full(4, next(counter), np.float32), device)),
        "write": ("brings values to the device", lambda x: x.copy_from(np.full((3, 4), next(counter)))),
        "wait": ("waits for the device", lambda x: device.finish()),
        "result": ("it returns float", lambda x: 1.0),
        "loose": ("gradients outside a flat space", lambda x: loose(x).sum().backward()),
        "kept": ("leaves a tensor behind", lambda x: remembering(x).sum().backward()),
    }


@pytest.mark.parametrize("name", ["item", "upload", "write", "wait", "result", "loose", "kept"])
def test_what_could_not_be_replayed_runs_as_it_is(device, name):
    reason, function = refused_functions(device)[name]
    replay = Replay(function)
    for number in range(7):
        x = np.full((3, 4), number, np.float32)
        result = replay(Tensor(x, device))
        if name == "upload":
            assert np.array_equal(result.numpy(), x * number)
    assert replay.replayed == replay.recorded == 0
    assert replay.refusal is not None and reason in replay.refusal


def test_inputs_keep_apart_from_each_other_and_from_what_is_around(device):
    around = Tensor([1.0, 2.0], device)
    replay = Replay(lambda x, y: (x * 2.0 + y * around, x))
    for first, second in [(around, around)] * 3 + [(Tensor([3.0, 4.0], device), Tensor([5.0, 6.0], device))] * 2:
        total, same = replay(first, second)
        assert np.array_equal(total.numpy(), first.numpy() * 2 + second.numpy() * [1, 2])
        assert np.array_equal(same.numpy(), first.numpy())
    assert replay.replayed == 3


def test_a_replay_within_another_is_part_of_it(device):
    inner = Replay(lambda x: x * 3.0)
    outer = Replay(lambda x: inner(inner(x)) + 1.0)
    for number in range(6):
        assert outer(Tensor([float(number)], device)).item() == 9 * number + 1
    assert outer.replayed == 4


def test_a_hook_may_call_the_same_replay(device):
    model = MODELS["mlp"](device)
    model.flat_space()
    losses: list[float] = []
    step = Replay(Twin.make_step(model))
    x, y = Tensor(np.ones((2, *SHAPE)), device), Tensor([1, 2], device)

    def measure(_: Tensor) -> None:
        with no_grad():
            losses.append(LOSS(model(x), y).item())

    model.fc3.bias.register_post_accumulate_grad_hook(measure)
    results = []
    for _ in range(5):
        results.append(step(x, y).item())
        model.zero_grad()
    assert losses == results and step.replayed == 3


def test_forward_alone_under_no_grad_and_with_a_tape(device):
    model = MODELS["convnet"](device)
    predict = Replay(model)
    x = Tensor(np.random.default_rng(0).standard_normal((4, *SHAPE)), device)
    expected = model(x).numpy().tobytes()
    for _ in range(4):
        with no_grad():
            assert predict(x).numpy().tobytes() == expected
        result = predict(x)
        assert result.numpy().tobytes() == expected and not result.requires_grad
    assert predict.recorded == 2 and predict.replayed == 4


def test_only_so_many_shapes_are_remembered(device):
    twin = Twin(device, limit=2)
    for size in [3, 4, 5, 6] * 3:
        twin.step(size)
        twin.update()
    assert twin.replay.replayed == 0 and len(twin.replay._entries) == 2
    for size in [4, 3] * 3:
        twin.step(size)
        twin.update()
    assert twin.replay.replayed >= 2


def test_the_environment_turns_it_off(device, monkeypatch):
    monkeypatch.setenv("CLCOMM_REPLAY", "0")
    twin = Twin(device)
    for _ in range(4):
        twin.step()
        twin.update()
    assert twin.replay.recorded == twin.replay.replayed == 0


def test_arguments_it_cannot_take(device):
    replay = Replay(lambda *args: None)
    with pytest.raises(ArgumentError, match="at least one Tensor"):
        replay(1.0)
    with pytest.raises(ArgumentError, match=r"wrap arrays in Tensor"):
        replay(Tensor([1.0], device), np.ones(3))
    with pytest.raises(ArgumentError, match="limit"):
        Replay(lambda x: x, limit=0)


# -- memory


def test_memory_does_not_grow_over_ten_thousand_steps(device):
    layer = Linear(4, 4, device=device)
    space = layer.flat_space()

    def function(x: Tensor) -> Tensor:
        loss = F.relu(layer(x)).sum()
        loss.backward()
        return loss

    step, x = Replay(function), Tensor(np.ones((2, 4)), device)

    def run(steps: int) -> tuple[int, int, int]:
        for _ in range(steps):
            step(x)
            space.zero_grad()
        device.finish()
        return device.active_bytes, device.memory.held_bytes, device.peak_bytes

    gc.collect()  # earlier tests' models: parameters and flat space refer to each other
    before = run(10)
    assert run(10_000) == before
    assert step.replayed == 10_008


def test_a_recorded_step_takes_no_more_memory_than_the_pool_did(device):
    gc.collect()
    twin = Twin(device, "convnet")
    x, y = twin.batch(64)
    device.memory.release_unused()
    held = device.memory.held_bytes
    twin.steps[0](x, y)
    plain_bytes = device.memory.held_bytes - held
    for _ in range(3):
        twin.steps[1](x, y)
        twin.models[1].zero_grad()
    assert twin.replay.replayed == 1
    assert device.memory.held_bytes - held <= plain_bytes
    active, arena_bytes = device.active_bytes, twin.replay._arena.size
    assert 0 < arena_bytes <= plain_bytes
    del twin.replay, twin.steps
    assert active - device.active_bytes == arena_bytes


def test_peak_bytes_count_every_kind_of_buffer(device):
    gc.collect()
    device.memory.release_unused()
    before, peak = device.active_bytes, device.peak_bytes
    size = max(peak, 1 << 20) // 4 * 4
    kept = [Tensor(np.zeros(size // 4, np.float32), device), device.allocate(size)]
    assert device.active_bytes >= before + 2 * size
    assert device.peak_bytes >= peak + size
    kept.clear()
    device.finish()
    assert device.active_bytes <= before + 64


# -- time


def test_a_profile_lists_the_kernels_and_changes_no_result(device):
    twin = Twin(device)
    for _ in range(3):
        twin.step()
        twin.update()
    x, y = twin.batch(8)
    launches = []
    for step in twin.steps:
        with device.profile() as profile:
            loss = step(x, y)
        launches.append([(launch.name, launch.global_size) for launch in profile.launches])
        assert 0 < profile.kernel_s <= profile.seconds
        assert all(launch.seconds >= 0 for launch in profile.launches)
    assert launches[0] == launches[1] and loss.item() > 0
    twin.assert_same_gradients()
    twin.step()


def test_measured_overhead_is_a_share(device):
    twin = Twin(device)
    x, y = twin.batch(8)

    def step() -> None:
        twin.replay(x, y)
        twin.models[1].zero_grad()

    overhead = measure_overhead(device, step, repeats=5)
    assert 0 <= overhead.share < 1 and 0 < overhead.kernel_s < 10 and 0 < overhead.step_s < 10
