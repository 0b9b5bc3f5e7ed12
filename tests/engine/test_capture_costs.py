"""What a Replay takes: its memory, which does not grow, and its time, which is told."""

from __future__ import annotations

import gc
import linecache

import numpy as np
import pytest

from clcomm.engine import Linear, Replay, Tensor, capture, measure_overhead
from clcomm.engine import functional as F
from tests.engine.twin import Twin, repeats


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
    assert repeats(step) == 10_008


@pytest.mark.parametrize("model", ["mlp", "convnet"])
@pytest.mark.parametrize("change", ["hook", "requires_grad", "memory"])
def test_recording_anew_makes_no_kernel_anew(device, model, change):
    twin = Twin(device, model)
    parameter, batch = next(iter(twin.models[1].parameters())), twin.batch(4)

    def run(times: int) -> tuple[int, int]:
        for _ in range(times):
            if change == "hook":
                parameter.register_post_accumulate_grad_hook(lambda _: None)()
            elif change == "requires_grad":
                parameter.requires_grad = False
                parameter.requires_grad = True
            else:
                device.revision += 1
            for _ in range(4):
                twin.steps[1](*batch)
                twin.models[1].zero_grad()
        gc.collect()
        return len(linecache.cache), len(gc.get_objects())

    files, objects = run(4)  # PyOpenCL compiles Python code for each kernel object, and keeps the text
    assert run(12)[0] == files and run(12)[1] < objects + 50
    assert twin.replay.replayed > 20
    for _ in range(3):
        twin.step()
        twin.update()
    twin.assert_same_parameters()


def test_a_recorded_step_takes_no_more_memory_than_the_pool_did(device, monkeypatch):
    monkeypatch.setattr(capture, "_LARGE_ARENA", 0)
    gc.collect()
    twin = Twin(device, "convnet")
    x, y = twin.batch(64)
    device.memory.release_unused()
    held = device.memory.held_bytes
    twin.steps[0](x, y)
    plain_bytes = device.memory.held_bytes - held
    for _ in range(4):
        twin.steps[1](x, y)
        twin.models[1].zero_grad()
    assert twin.replay.checked == twin.replay.replayed == 1
    assert device.memory.held_bytes - held <= plain_bytes
    active, arena_bytes = device.active_bytes, twin.replay._arena.size
    assert 0 < arena_bytes <= plain_bytes
    del twin.replay, twin.steps
    assert active - device.active_bytes == arena_bytes


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
