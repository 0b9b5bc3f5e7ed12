"""Gradients against central differences of the operation itself, element by element: for sums of products."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from clcomm.engine.device import Device
from clcomm.engine.tensor import Tensor

_STEP = 1e-2  # as the operation is linear in each of its arguments, no smaller one is needed


def assert_gradients_are_slopes(
    op: Callable[..., Tensor], hosts: list[np.ndarray], device: Device, tolerance: float
) -> None:
    """Compare the gradients of a weighted sum of `op(*hosts)` with its slopes, by `tolerance`."""
    leaves = [Tensor(host, device, requires_grad=True) for host in hosts]
    y = op(*leaves)
    weights = np.random.default_rng(9).standard_normal(y.shape).astype(np.float32)
    y.backward(Tensor(weights, device))

    def loss(values: list[np.ndarray]) -> float:
        result = op(*(Tensor(value, device) for value in values)).numpy().astype(np.float64)
        return (result * weights).sum()

    for index, host in enumerate(hosts):
        for place in np.ndindex(host.shape):
            sides = []
            for sign in (1, -1):
                moved = [h.copy() for h in hosts]
                moved[index][place] += sign * _STEP
                sides.append(loss(moved))
            slope = (sides[0] - sides[1]) / (2 * _STEP)
            assert leaves[index].grad.numpy()[place] == pytest.approx(slope, rel=1e-3, abs=tolerance)
