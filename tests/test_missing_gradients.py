"""A parameter without a gradient on any rank is not stepped: no decay, no momentum, no count, as in one process."""

from __future__ import annotations

import os
from functools import partial

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer
from clcomm.engine import Tensor, nn
from clcomm.engine.replay import Replay
from clcomm.optim import SGD, AdamW
from clcomm.sync.distributed_optimizer import DistributedOptimizer

STEPS = 7
#: Of these 515 fills several ranks' parts, and one element has a gradient that may be -0.0 alone.
SHAPES = {"trunk": (515,), "one": (1,), "wide": (40, 33), "exact": (128,)}
KINDS = {"sgd": (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2}), "adamw": (AdamW, {"weight_decay": 0.2})}
WAYS = {
    "plain": {},
    "per tensor": {"use_bucketing": False},
    "split": {"bucket_size": "1KiB", "split_tensors": True},
    "overlap": {"overlap": True, "bucket_size": "1KiB"},
    "bf16 on the way": {"compression": "bf16"},
    "zero 1": {"zero": 1},
    "zero 2": {"zero": 2},
    "zero 3": {"zero": 3, "bucket_size": "1KiB"},
}


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(np.full(shape, 2.0, np.float32)))


def drawn(seed: int, size: int) -> list[list[dict[str, np.ndarray]]]:
    """Return the gradients by step, rank and name: small whole numbers, or -0.0 alone."""
    rng = np.random.default_rng([seed, size])
    steps = []
    for step in range(STEPS):
        present = {name: rng.random(size) < rng.choice([0.0, 0.3, 1.0], p=[0.4, 0.4, 0.2]) for name in SHAPES}
        values = {name: rng.choice([-1.0, 1.0, 2.0, -0.0]) for name in SHAPES}
        steps.append(
            [
                {n: np.full(SHAPES[n], values[n] * (1 if values[n] == 0 else rank + 1), np.float32)
                 for n in SHAPES if present[n][rank] or (n == "trunk" and step == 0)}
                for rank in range(size)
            ]
        )  # fmt: skip
    return steps


def by_formula(kind: str, steps: list[list[dict[str, np.ndarray]]]) -> dict[str, np.ndarray]:
    """Train in float64; the mean counts a missing gradient as zero where another rank has one."""
    params = {name: np.full(shape, 2.0) for name, shape in SHAPES.items()}
    first, second, count = (dict.fromkeys(SHAPES, 0.0) for _ in range(3))
    for ranks in steps:
        for name in SHAPES:
            there = [own[name].astype(np.float64) for own in ranks if name in own]
            if not there:
                continue
            g, p = sum(there) / len(ranks), params[name]
            count[name] += 1
            if kind == "sgd":
                first[name] = 0.9 * first[name] + g + 0.2 * p
                params[name] = p - 0.1 * first[name]
            else:
                first[name] = 0.9 * first[name] + 0.1 * g
                second[name] = 0.999 * second[name] + 0.001 * g * g
                mean, square = first[name] / (1 - 0.9 ** count[name]), second[name] / (1 - 0.999 ** count[name])
                params[name] = p - 1e-3 * 0.2 * p - 1e-3 * mean / (np.sqrt(square) + 1e-8)
    return params


def backward(model: Heads, gradients: dict[str, np.ndarray]) -> None:
    losses = [(getattr(model, name) * Tensor(values)).sum() for name, values in gradients.items()]
    if losses:
        sum(losses[1:], losses[0]).backward()


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_that_no_rank_has_is_no_step_on_any(way, kind):
    comm = Communicator()
    for seed in range(int(os.environ.get("CLCOMM_MISSING_CASES", "2"))):
        model, steps, settings = Heads(), drawn(seed, comm.size), WAYS[way]
        make, options = KINDS[kind]
        sync, optimizer = Synchronizer(comm, **settings), make(model, **options)
        if "zero" in settings:
            optimizer = DistributedOptimizer(optimizer, sync)
        sync.broadcast_parameters(model)
        for ranks in steps:
            optimizer.zero_grad()
            own = ranks[comm.rank]
            backward(model, own)
            sync.sync_gradients(model)
            if "zero" not in settings:
                has = {name: getattr(model, name).grad is not None for name in SHAPES}
                assert has == {name: any(name in each for each in ranks) for name in SHAPES}
            optimizer.step()
        expected = by_formula(kind, steps)
        with sync.full_parameters(model):
            for name, values in expected.items():
                near = 1e-1 if way.startswith("bf16") else 2e-5
                np.testing.assert_allclose(
                    getattr(model, name).numpy(), values, rtol=near, atol=near / 10, err_msg=name
                )
        state = optimizer.state_dict()  # collective with zero
        missed = dict(zip(state["names"].tolist(), state.get("missed", np.zeros(len(SHAPES), int)), strict=True))
        taken = {name: sum(any(name in own for own in ranks) for ranks in steps) for name in SHAPES}
        assert {name: state["steps"] - missed[name] for name in SHAPES} == taken


@pytest.mark.mpi(min_size=2)
def test_ranks_without_samples_have_no_gradients():
    """With a weight of 0 a rank's gradient counts as missing, whatever it holds."""
    comm, model = Communicator(), Heads()
    sync, optimizer = Synchronizer(comm), SGD(model, 0.1, weight_decay=0.5)
    sync.broadcast_parameters(model)
    names = ("trunk", "one") if comm.rank else ("wide", "one")
    backward(model, {name: np.full(SHAPES[name], -1.0, np.float32) for name in names})
    sync.sync_gradients(model, samples=0 if comm.rank else 3)
    optimizer.step()
    expected = {"trunk": 2.0, "exact": 2.0, "one": 2 - 0.1 * (1 - 1), "wide": 2 - 0.1 * (1 - 1)}
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(model, name).numpy(), value, rtol=1e-6)
    assert model.trunk.grad is None


def test_heads_that_are_trained_in_turn_within_a_replay():
    model, expected = Heads(), Heads()
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2}
    optimizers = [SGD(each, **options) for each in (model, expected)]

    def step(x, model, optimizer, names):
        optimizer.zero_grad()
        sum((getattr(model, name) * x).sum() for name in names).backward()
        optimizer.step()

    turns = [("trunk", "one"), ("trunk", "wide")]
    replays = [Replay(partial(step, model=model, optimizer=optimizers[0], names=names)) for names in turns]
    for number in range(12):
        x = Tensor(np.full(1, number + 1.0, np.float32))
        replays[number % 2](x)
        step(x, expected, optimizers[1], turns[number % 2])
    for name in SHAPES:
        assert (getattr(model, name).numpy() == getattr(expected, name).numpy()).all(), name
    assert (model.exact.numpy() == 2).all() and optimizers[0].steps == 12
