"""Fixtures of the engine's tests: devices, and a comparison with a float64 reference.

By default that is the CPU device twice, with the CPU's kernels and with those for GPUs. CLCOMM_TEST_DEVICE names
another device than the first; CLCOMM_TEST_DEVICES=all adds every other OpenCL device present.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from clcomm.engine import selection
from clcomm.engine.device import Device
from clcomm.engine.tensor import Tensor


def _present() -> list[tuple[str, Any, str | None]]:
    """Return (test id, OpenCL device, kind to treat it as) of the devices to test on."""
    named = os.environ.get("CLCOMM_TEST_DEVICE")
    selection.prepare_environment(selection.core_share(1), named)
    found = selection.candidates()
    chosen = found if os.environ.get("CLCOMM_TEST_DEVICES") == "all" else [selection.choose(named, 0)]
    devices = [(candidate.label, candidate.cl_device, None) for candidate in chosen]
    grouped = [(f"{c.label}-as-gpu", c.cl_device, "gpu") for c in chosen if c.kind == "cpu"]
    return [*devices, *grouped]


_DEVICES = {label: (cl_device, kind) for label, cl_device, kind in _present()}


@pytest.fixture(scope="session", params=list(_DEVICES))
def device(request: pytest.FixtureRequest) -> Device:
    """An OpenCL device to test on."""
    cl_device, kind = _DEVICES[request.param]
    return Device(cl_device, kind=kind)


@pytest.fixture(scope="session")
def check_op(device: Device) -> Callable[..., None]:
    """Return a check of an op's result and gradients against a float64 reference of the same arguments.

    Gradients are compared, along random directions, with central differences of the reference.
    """

    def check(
        op: Callable[..., Tensor],
        reference: Callable[..., np.ndarray],
        *arrays: np.ndarray,
        tolerance: float = 2e-6,
        differentiable: bool = True,
    ) -> None:
        rng = np.random.default_rng(7)
        inputs = [Tensor(a, device, requires_grad=differentiable) for a in arrays]
        exact = [np.asarray(a, np.float64) for a in arrays]
        result, expected = op(*inputs), np.asarray(reference(*exact))
        assert result.shape == expected.shape
        scale = 1.0 + np.abs(expected).max()
        np.testing.assert_allclose(result.numpy(), expected, rtol=0, atol=tolerance * scale)
        if not differentiable:
            return
        cotangent = rng.standard_normal(expected.shape).astype(np.float32)
        result.backward(Tensor(cotangent, device))
        for index, x in enumerate(inputs):
            assert x.grad is not None and x.grad.shape == x.shape
            gradient = x.grad.numpy().astype(np.float64)
            for _ in range(4):
                direction, step = rng.standard_normal(x.shape), 1e-5
                sides = []
                for sign in (1, -1):
                    moved = [e + sign * step * direction if k == index else e for k, e in enumerate(exact)]
                    sides.append(np.sum(reference(*moved) * cotangent))
                slope = (sides[0] - sides[1]) / (2 * step)
                size = 1.0 + np.abs(gradient * direction).sum()
                assert abs(np.sum(gradient * direction) - slope) <= 10 * tolerance * size

    return check
