"""A function compared with its recording: every kind of difference is found and named, and equal runs pass."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError, ReplayError
from clcomm.engine import Linear, Replay, Tensor
from clcomm.engine import functional as F
from clcomm.engine.device import Device
from tests.engine.twin import Twin

VARIABLE = "CLCOMM_TEST_BRANCH"


def other_branch() -> bool:
    """Return a function whose changes the guards cannot see."""
    return os.environ.get(VARIABLE) == "1"


def functions(device: Device) -> dict[str, tuple[str, Callable[[Tensor], Any]]]:
    """Return functions of a tensor with two branches each, and the message about the second."""
    layer, around = Linear(4, 4, device=device), [Tensor(np.full((3, 4), n), device) for n in (1.0, 2.0)]
    layer.flat_space()

    def host(number: int) -> Callable[[], None]:
        first, second = (lambda: None), (lambda: device.finish())
        first.__qualname__, second.__qualname__ = "first", "second"
        return (first, second)[number]

    def on_host(x: Tensor) -> Tensor:
        device.on_host(host(other_branch()))
        return x * 2.0

    def backward(x: Tensor) -> Tensor:
        loss = layer(x).sum()
        if not other_branch():
            loss.backward()
        return loss

    return {
        "kernel": ("launch 1 was each_relu", lambda x: F.sigmoid(x) if other_branch() else F.relu(x)),
        "number": (r"number \d was 0.5 and is 0.25 now", lambda x: x * (0.25 if other_branch() else 0.5)),
        "minus zero": (r"was 0.0 and is -0.0 now", lambda x: x + (-0.0 if other_branch() else 0.0)),
        "buffer": ("is another buffer now", lambda x: x + around[other_branch()]),
        "role": ("is another buffer now", lambda x: _sum(x * 2.0, x * 3.0, other_branch())),
        "more": (r"launch 2 .* is new", lambda x: (x * 2.0).relu() if other_branch() else x * 2.0),
        "fewer": (r"launch 2 .* is gone", lambda x: x * 2.0 if other_branch() else (x * 2.0).relu()),
        "shape": ("result 0 is another tensor", lambda x: (x * 2.0).reshape((4, 3) if other_branch() else (3, 4))),
        "results": ("returned 1 tensors, and returns 2", lambda x: (x, x) if other_branch() else (x,)),
        "host": ("another function runs on the host", on_host),
        "values": ("brings values to the host", lambda x: x * (x.sum().item() if other_branch() else 2.0)),
        "backward": (r"launch \d+ .* is gone|other gradients are there", backward),
    }


def _sum(a: Tensor, b: Tensor, swapped: bool) -> Tensor:
    return (b - a) if swapped else (a - b)


KINDS = [
    "kernel", "number", "minus zero", "buffer", "role", "more", "fewer", "shape", "results", "host", "values",
    "backward",
]  # fmt: skip


@pytest.fixture
def x(device, monkeypatch):
    monkeypatch.setenv(VARIABLE, "0")
    return Tensor(np.arange(12.0).reshape(3, 4), device)


@pytest.mark.parametrize("kind", KINDS)
def test_a_difference_after_replays_is_an_error_that_names_it(device, x, monkeypatch, kind):
    said, function = functions(device)[kind]
    replay = Replay(function, check_every=3)
    for _ in range(5):
        replay(x)
    assert (replay.recorded, replay.checked, replay.replayed) == (1, 1, 2)
    monkeypatch.setenv(VARIABLE, "1")
    replay(x)
    with pytest.raises(ReplayError, match=said) as caught:
        replay(x)
    assert "some of its last 3 results may be wrong" in str(caught.value) and "\n" not in str(caught.value)
    assert device.recorder is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_difference_before_the_first_replay_is_a_refusal_and_costs_no_result(device, x, monkeypatch, kind):
    _, function = functions(device)[kind]
    replay = Replay(function)
    for number in range(12):
        monkeypatch.setenv(VARIABLE, str(number % 2))
        expected, found = function(x), replay(x)
        pairs = zip(*(each if isinstance(each, tuple) else (each,) for each in (expected, found)), strict=True)
        assert all(one.numpy().tobytes() == other.numpy().tobytes() for one, other in pairs)
    assert replay.replayed == 0 and replay.refusal


@pytest.mark.parametrize("large_bytes", [0, 1 << 30])
@pytest.mark.parametrize("model", ["mlp", "convnet"])
def test_comparing_often_changes_no_bit(device, monkeypatch, model, large_bytes):
    monkeypatch.setattr("clcomm.engine.replay._LARGE_ARENA", large_bytes)
    twin = Twin(device, model)
    twin.replay.check_every = 1
    for number in range(16):
        twin.step(8 if number % 4 else 5)
        twin.update()
    twin.assert_same_parameters()
    assert twin.replay.checked >= 6 and twin.replay.replayed >= 4 and twin.replay.refusal is None


def test_comparing_takes_no_more_memory_than_the_function_where_that_is_much(device, monkeypatch):
    monkeypatch.setattr("clcomm.engine.replay._LARGE_ARENA", 0)
    twin = Twin(device, "convnet")
    x, y = twin.batch(64)
    memory = device.memory
    memory.release_unused()

    def peak_bytes(calls: int) -> int:
        memory.release_unused()
        memory.peak_bytes = 0
        for _ in range(calls):
            twin.replay(x, y)
            twin.models[1].zero_grad()
        return memory.peak_bytes

    alone, recorded = peak_bytes(1), peak_bytes(1)
    assert peak_bytes(20) <= max(alone, recorded) and twin.replay.checked == 2


def test_when_it_is_compared(device, x):
    replay, checked = Replay(lambda x: x * 2.0, check_every=1000), []
    for number in range(2200):
        before = replay.checked
        replay(x)
        if replay.checked > before:
            checked.append(number - 2 - before)  # replays until then
    assert checked == [0, 10, 100, 1000, 2000]


def test_constants_that_the_device_has_forgotten_are_no_difference(device):
    layer = Linear(4, 4, device=device)
    layer.flat_space()

    def step(x: Tensor) -> Tensor:
        loss = (layer(x) + Tensor.sum(x)).sum()
        loss.backward(0.125)
        return loss

    replay, x = Replay(step, check_every=2), Tensor(np.ones((2, 4)), device)
    for _ in range(12):
        device.kept.clear()
        replay(x)
        layer.zero_grad()
    assert replay.refusal is None and replay.replayed >= 5 and replay.checked >= 3


def test_how_often_has_to_be_a_number(device):
    with pytest.raises(ArgumentError, match="check_every: expected a number of replays from 1 up, got 0"):
        Replay(lambda x: x, check_every=0)
