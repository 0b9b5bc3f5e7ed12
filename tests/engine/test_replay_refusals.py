"""A function that cannot be replayed runs as Python, with a reason, and leaves no state behind."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Linear, Module, Replay, Tensor
from clcomm.engine import functional as F
from clcomm.engine.device import Device
from tests.engine.twin import Twin, repeats


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
    assert twin.replay.recorded == 1 and repeats(twin.replay) == 3


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
    assert repeats(replay) == replay.recorded == 0
    assert replay.refusal is not None and reason in replay.refusal


def test_the_environment_turns_it_off(device, monkeypatch):
    monkeypatch.setenv("CLCOMM_REPLAY", "0")
    twin = Twin(device)
    for _ in range(4):
        twin.step()
        twin.update()
    assert twin.replay.recorded == repeats(twin.replay) == 0


def test_arguments_it_cannot_take(device):
    replay = Replay(lambda *args: None)
    with pytest.raises(ArgumentError, match="at least one Tensor"):
        replay(1.0)
    with pytest.raises(ArgumentError, match=r"wrap arrays in Tensor"):
        replay(Tensor([1.0], device), np.ones(3))
    with pytest.raises(ArgumentError, match="limit"):
        Replay(lambda x: x, limit=0)
