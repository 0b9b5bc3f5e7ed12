"""Recurrent layers of every kind of cell, number of rows and states, lengths and direction."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from clcomm.engine import Tensor
from clcomm.engine.device import Device
from clcomm.engine.ops.recurrent import CELLS, RecurrentOp
from tests.families.family import Family, assert_near, drawn, leaf

_SLOPE_STEP = 1e-6


class Case(NamedTuple):
    """A layer, and the length of each row."""

    cell: str
    lengths: tuple[int, ...]
    states: int
    is_packed: bool
    reverse: bool
    seed: int


def draw(rng: np.random.Generator, longest: int, number: int) -> Case:
    """Draw up to 5 steps."""
    lengths = tuple(int(n) for n in rng.integers(1, 6, rng.integers(1, longest // 3 + 2)))
    cell, reverse = ("lstm", "gru", "tanh", "relu")[number % 4], bool(rng.integers(2))
    return Case(cell, lengths, int(rng.integers(1, longest)), number % 3 == 0, reverse, int(rng.integers(1 << 30)))


def _logistic(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _expected(case: Case, steps: int, arrays: list[np.ndarray]) -> np.ndarray:
    """Return the results and last states of float64 arrays: gates, W_hh, b_hh, h and c."""
    gates, weight, bias, h, c = arrays
    results = np.zeros((steps, *h.shape))
    for t in range(steps)[:: -1 if case.reverse else 1]:
        own, hidden = np.split(gates[t], len(bias) // case.states, 1), h @ weight.T + bias
        recurrent = np.split(hidden, len(bias) // case.states, 1)
        summed = [x + y for x, y in zip(own, recurrent, strict=True)]
        cell = c
        if case.cell == "lstm":
            cell = _logistic(summed[1]) * c + _logistic(summed[0]) * np.tanh(summed[2])
            new = _logistic(summed[3]) * np.tanh(cell)
        elif case.cell == "gru":
            candidate, update = np.tanh(own[2] + _logistic(summed[0]) * recurrent[2]), _logistic(summed[1])
            new = (1 - update) * candidate + update * h
        else:
            new = np.tanh(summed[0]) if case.cell == "tanh" else np.maximum(summed[0], 0)
        has = (t < np.array(case.lengths) if case.is_packed else np.ones(len(h), bool))[:, None]
        h, c, results[t] = np.where(has, new, h), np.where(has, cell, c), has * new
    return np.concatenate([results, h[None], c[None]][: 2 + (case.cell == "lstm")])


def check(device: Device, case: Case) -> None:
    """Compare results with float64's, and gradients with its differences along random directions."""
    rng, cell = np.random.default_rng(case.seed), CELLS[case.cell]
    rows, steps, columns = len(case.lengths), max(case.lengths), cell.gates * case.states
    shapes = (steps, rows, columns), (columns, case.states), (columns,), (rows, case.states), (rows, case.states)
    hosts = [rng.uniform(-1, 1, shape).astype(np.float32) for shape in shapes]
    inputs = [leaf(device, host) for host in hosts[: 3 + cell.states]]
    lengths = Tensor(np.array(case.lengths, np.int32), device) if case.is_packed else None
    given = (*inputs, None)[:5]
    result = RecurrentOp.apply(*given, lengths, cell=cell, reverse=case.reverse)
    exact = [host.astype(np.float64) for host in hosts]
    expected = _expected(case, steps, exact)
    assert_near(result, expected, case.cell)
    grad = rng.uniform(-1, 1, expected.shape).astype(np.float32)
    result.backward(leaf(device, grad, False))
    for index, x in enumerate(inputs):
        direction = rng.uniform(-1, 1, x.shape)
        sides = []
        for sign in (1, -1):
            moved = [*exact[:index], exact[index] + sign * _SLOPE_STEP * direction, *exact[index + 1 :]]
            sides.append((_expected(case, steps, moved) * grad).sum())
        slope = (sides[0] - sides[1]) / (2 * _SLOPE_STEP)
        gradient = x.grad.numpy().astype(np.float64)
        size = 1 + np.abs(gradient * direction).sum()
        assert abs((gradient * direction).sum() - slope) <= 1e-5 * size, f"{case.cell}: gradient of input {index}"


RECURRENCES = Family("recurrent layers", drawn(draw), check)
