"""A replayed function has the same results, bit for bit, as without a Replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from clcomm.engine import Replay, Tensor, no_grad, replay
from tests.engine.twin import LOSS, MODELS, OPTIMIZERS, SHAPE, Twin, repeats


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("model", list(MODELS))
def test_twenty_steps_with_a_short_last_batch(device, model, optimizer):
    twin = Twin(device, model, optimizer)
    for size in [8, 8, 8, 5] * 5:
        twin.step(size)
        twin.update()
    twin.assert_same_parameters()
    assert twin.replay.refusal is None
    assert twin.replay.recorded <= 4 and repeats(twin.replay) >= 14


@pytest.mark.parametrize("model", list(MODELS))
def test_micro_batches_with_weights(device, model):
    twin = Twin(device, model)
    for number in range(8):
        for size in (8, 8, 4) if number % 4 else (8, 5):
            twin.step(size, size / 20)
        twin.update()
    twin.assert_same_parameters()
    assert repeats(twin.replay) >= 10 and twin.replay.refusal is None


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
            space.moves.pull(0, space.layout.span)
            reduced[...] = (grads.view(np.float32) * 0.5).view(np.uint8)
            space.moves.push(0, space.layout.span)
        if number % 3 == 0:
            twin.step()  # onto the averaged ones
        twin.update()
    twin.assert_same_parameters()
    assert repeats(twin.replay) >= 6


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
    assert repeats(both) == 4
    for (x, y), (loss, logits) in zip(batches, kept, strict=True):
        assert loss.item() == LOSS(model(x), y).item()
        assert logits.numpy().tobytes() == model(x).numpy().tobytes()


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
    assert repeats(twin.steps[1]) >= 7


def test_two_models_on_one_device_take_turns(device):
    twins = [Twin(device, "mlp"), Twin(device, "convnet")]
    for _ in range(6):
        for twin in twins:
            twin.step()
        for twin in twins:
            twin.update()
    for twin in twins:
        twin.assert_same_parameters()
        assert repeats(twin.replay) == 4


def test_inputs_keep_apart_from_each_other_and_from_what_is_around(device):
    around = Tensor([1.0, 2.0], device)
    replay = Replay(lambda x, y: (x * 2.0 + y * around, x))
    for first, second in [(around, around)] * 3 + [(Tensor([3.0, 4.0], device), Tensor([5.0, 6.0], device))] * 2:
        total, same = replay(first, second)
        assert np.array_equal(total.numpy(), first.numpy() * 2 + second.numpy() * [1, 2])
        assert np.array_equal(same.numpy(), first.numpy())
    assert repeats(replay) == 3


def test_a_replay_within_another_is_part_of_it(device):
    inner = Replay(lambda x: x * 3.0)
    outer = Replay(lambda x: inner(inner(x)) + 1.0)
    for number in range(6):
        assert outer(Tensor([float(number)], device)).item() == 9 * number + 1
    assert repeats(outer) == 4


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
    assert predict.recorded == 2 and repeats(predict) == 4


def test_only_so_many_shapes_are_recorded(device):
    """The first ones; others take their places when they are called twice as often, and are not recorded till then."""
    twin = Twin(device, limit=2)
    for size in [3, 4, 5, 6] * 5:
        twin.step(size)
        twin.update()
    assert twin.replay.recorded == 2 and repeats(twin.replay) == 6
    for size in [6, 5] * 9:
        twin.step(size)
        twin.update()
    assert twin.replay.recorded == 4 and repeats(twin.replay) > 6 + 4


def test_counts_of_calls_are_recent_ones(device, monkeypatch):
    """After a hundred steps of one size another takes its place within a few dozen calls."""
    monkeypatch.setattr(replay, "_COUNTED_CALLS", 8)
    twin = Twin(device, limit=1)
    for size in [3] * 100 + [4] * 40:
        twin.step(size)
        twin.update()
    assert twin.replay.recorded == 2
