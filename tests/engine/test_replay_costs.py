"""The cost of a Replay: its memory, which does not grow, and its time."""

from __future__ import annotations

import gc
import linecache
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from clcomm.engine import Linear, ReLU, Replay, Sequential, Tensor, measure_overhead, timing
from clcomm.engine import functional as F
from tests.engine.twin import Twin, repeats
from tests.helpers import cpus_own


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


@pytest.mark.sampled(4)
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
    monkeypatch.setattr("clcomm.engine.replay._LARGE_ARENA", 0)
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


class ClockedDevice:
    """Stands for a device whose step takes 10 ms by a clock of its own, 2 and 4 of which are kernels'.

    Every fifth step is disturbed: it takes a second, and so does one of its kernels.
    """

    runs_in_caller = False

    def __init__(self):
        self.now, self.steps, self.finished = 0.0, 0, 0

    def step(self) -> None:
        self.steps += 1
        self.disturbance = 1.0 if self.steps % 5 == 0 else 0.0
        self.now += 0.010 + self.disturbance

    def finish(self) -> None:
        self.finished += 1

    @contextmanager
    def profile(self):
        seen = SimpleNamespace(launches=[])
        yield seen
        seen.launches += [SimpleNamespace(seconds=0.002 + self.disturbance), SimpleNamespace(seconds=0.004)]


def test_measured_overhead_is_what_medians_of_steps_and_kernels_leave(monkeypatch):
    fake = ClockedDevice()
    monkeypatch.setattr(timing, "profile", ClockedDevice.profile)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: fake.now)
    monkeypatch.setattr(timing.time, "thread_time", lambda: 0.0)  # the clock of kernels in the calling thread alone
    overhead = measure_overhead(fake, fake.step, repeats=20, warm_up=3)
    assert overhead.step_s == pytest.approx(0.010) and overhead.kernel_s == pytest.approx(0.006)
    assert overhead.share == pytest.approx(0.4)
    assert fake.steps == 2 * 23 and fake.finished >= 2 * 23


def test_a_real_step_has_kernels_and_is_left_as_it_was(device):
    twin = Twin(device)
    x, y = twin.batch(8)

    def step() -> None:
        twin.replay(x, y)
        twin.models[1].zero_grad()

    overhead = measure_overhead(device, step, repeats=5)
    assert overhead.kernel_s > 0 and overhead.step_s > 0
    twin.step()
    twin.assert_same_gradients()


def test_a_recorded_step_of_an_mlp_is_few_launches():
    device = cpus_own()
    model = Sequential(Linear(64, 128, device=device), ReLU(), Linear(128, 10, device=device))
    space = model.flat_space()
    x, y = Tensor(np.ones((32, 64)), device), Tensor(np.zeros(32, int), device)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    replay = Replay(step)
    for _ in range(4):
        with device.profile() as timed:
            replay(x, y)
        space.zero_grad()
    assert repeats(replay) == 2
    names = [launch.name for launch in timed.launches]
    assert names == ["gemm", "gemm_dots", "cross_entropy", "linear_gradients", "linear_gradients"]
