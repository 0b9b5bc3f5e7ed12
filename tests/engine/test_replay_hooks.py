"""Hooks of a replayed backward: called, planned, added and removed as without a Replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from clcomm.engine import Replay, Tensor, no_grad
from tests.engine.twin import LOSS, MODELS, SHAPE, Twin, repeats


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
    assert twin.replay.recorded == 1 and repeats(twin.replay) == 4


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
    assert (asked, done) == ([6, 3], [6, 6])  # as it is, recorded, compared, then three replays
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
    assert twin.replay.recorded == 3 and repeats(twin.replay) == 8


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
    assert losses == results and repeats(step) == 3
