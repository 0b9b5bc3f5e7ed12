"""Recomputed activations: the bits of the plain step, with dropout, batch norm and replays, and less memory."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Replay, Tensor, nn, no_grad
from clcomm.engine import functional as F
from clcomm.engine.recomputation import checkpoint
from tests.engine.values import drawn


def plain(function, *args):
    return function(*args)


def trained(call, device, is_replayed: bool = False):
    """Return losses, gradients and buffers of a residual network whose blocks, which share weights, are called so."""
    nn.manual_seed(5)
    block = nn.Sequential(
        nn.Linear(6, 8, device=device), nn.BatchNorm1d(8, device=device), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(8, 6, device=device), nn.ReLU(),
    )  # fmt: skip
    model = nn.ModuleList([block, nn.Linear(6, 2, device=device)])
    space = model.flat_space()

    def step(x):
        space.zero_grad()
        h = x
        for _ in range(2):
            h = h + call(block, h)
        loss = F.dropout(model[1](h), 0.3).square().sum()
        loss.backward()
        return loss

    run = Replay(step) if is_replayed else step
    losses = [run(Tensor(drawn(k, 5, 6), device)).item() for k in range(4)]
    assert not is_replayed or run.replayed > 0, run.refusal
    tensors = [*(p.grad for p in model.parameters()), *model.buffers()]
    return losses, [each.numpy().tobytes() for each in tensors]


def test_recomputed_steps_have_the_bits_of_plain_ones(device):
    expected = trained(plain, device)
    assert trained(checkpoint, device) == expected
    assert trained(checkpoint, device, is_replayed=True) == expected


def test_random_numbers_are_others_without_their_state(device):
    found = trained(lambda *given: checkpoint(*given, preserve_rng_state=False), device)
    assert found[1] != trained(plain, device)[1]


def test_activations_are_not_kept(device):
    x, layers = Tensor(np.ones((64, 4096)), device, requires_grad=True), [nn.Tanh() for _ in range(8)]
    held = []
    for call in (plain, checkpoint):
        before = device.active_bytes
        result = call(nn.Sequential(*layers), x)
        held.append(device.active_bytes - before)
        del result
    assert held[1] < held[0] / 3


def test_gradients_of_captured_tensors_and_of_several_backwards(device):
    results = []
    for call in (plain, checkpoint):
        x, w = (Tensor(drawn(k, 3, 3), device, requires_grad=True) for k in (0, 1))
        between = w * 2  # no argument
        y = call(lambda a, between=between: (a @ between).tanh() @ between, x).sum()
        y.backward(retain_graph=True)
        y.backward()
        results.append([x.grad.numpy().tobytes(), w.grad.numpy().tobytes()])
    assert results[0] == results[1]
    with no_grad():
        assert not checkpoint(lambda a: a * 2, x).requires_grad


def test_what_cannot_be_recomputed_is_refused(device):
    x = Tensor(np.ones(3), device, requires_grad=True)
    for function, args, said in (
        (lambda: x * 2, (), "expected a Tensor among the arguments"),
        (lambda a: (a * 2, a), (x,), "expected a function that returns a Tensor, got tuple"),
        (lambda a: a.mul_(2), (x * 1,), "expected a function that leaves its arguments as they are"),
    ):
        with pytest.raises(ArgumentError, match=said):
            checkpoint(function, *args)
    w = Tensor(np.ones(3), device, requires_grad=True)
    y = checkpoint(lambda a: a * w, x).sum()
    w.copy_from(np.zeros(3))
    with pytest.raises(ArgumentError, match="Recomputed kept a tensor"):
        y.backward()
