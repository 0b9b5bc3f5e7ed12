"""Threads: each has its own modes, and an evaluation during training changes none of its bits."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest

from clcomm.engine import Generator, Linear, ReLU, Replay, Sequential, Tensor, no_grad
from clcomm.engine import functional as F
from clcomm.engine.modes import current_backward, is_recording
from clcomm.optim import SGD

STEPS = 12


@pytest.fixture(autouse=True)
def threads_take_turns_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(*functions: Callable[[], None]) -> None:
    """Run functions in separate threads that start together, and raise the first exception."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(functions))

    def run(function: Callable[[], None]) -> None:
        start.wait()
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_each_thread_records_as_its_own_blocks_say():
    def nest(rng: random.Random, depth: int) -> None:
        for _ in range(3):
            before = is_recording()
            if rng.random() < 0.5:
                with no_grad():
                    assert not is_recording()
                    if depth:
                        nest(rng, depth - 1)
                    assert not is_recording()
            elif depth:
                nest(rng, depth - 1)
            assert is_recording() is before

    def one(seed: int) -> Callable[[], None]:
        def run() -> None:
            assert is_recording()
            for _ in range(20):
                nest(random.Random(seed), 4)

        return run

    with no_grad():  # a new thread records, as in PyTorch
        together(*[one(seed) for seed in range(6)])
        assert not is_recording()
    assert is_recording()


def model_on(device) -> Sequential:
    rng = Generator(1)
    return Sequential(Linear(9, 33, device=device, rng=rng), ReLU(), Linear(33, 5, device=device, rng=rng))


def train(device, replay: bool) -> list[bytes]:
    """Return the parameters' bits after some steps."""
    model = model_on(device)
    optimizer = SGD(model, 0.05, momentum=0.9)

    def forward_backward(x: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), model(x).detach() * 0.5)
        loss.backward()
        return loss

    step = Replay(forward_backward) if replay else forward_backward
    for number in range(STEPS):
        step(Tensor(np.random.default_rng(number).standard_normal((5, 9)), device))
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.numpy().tobytes() for parameter in model.parameters()]


@pytest.mark.parametrize("replay", [False, True], ids=["plain", "replayed"])
def test_an_evaluation_beside_training_changes_no_bit(device, replay):
    expected, got, done, evaluations = train(device, replay), [], threading.Event(), []
    other = model_on(device)
    x = Tensor(np.random.default_rng(99).standard_normal((7, 9)), device)
    scores = other(x).numpy().tobytes()

    def evaluate() -> None:
        while not done.is_set():
            with no_grad():
                result = other(x)
                evaluations.append(not result.requires_grad and result.numpy().tobytes() == scores)

    def train_beside() -> None:
        try:
            got.extend(train(device, replay))
        finally:
            done.set()

    together(train_beside, evaluate)
    assert got == expected
    assert evaluations and all(evaluations)


def test_two_threads_train_at_once(device):
    expected, results = train(device, True), {}
    together(*[lambda n=n: results.update({n: train(device, n % 2 == 0)}) for n in range(3)])
    assert list(results.values()) == [expected] * 3


def test_hooks_see_the_backward_of_their_own_thread(device):
    def run() -> None:
        leaf = Tensor([1.0, 2.0], device, requires_grad=True)
        other = Tensor([3.0, 4.0], device, requires_grad=True)
        seen: list[int] = []
        for tensor in (leaf, other):
            tensor.register_post_accumulate_grad_hook(lambda _: seen.append(current_backward()))
        for _ in range(STEPS):
            (leaf * other).sum().backward()
        assert seen[::2] == seen[1::2] and len(set(seen)) == STEPS
        assert current_backward() == 0

    together(*[run] * 3)
