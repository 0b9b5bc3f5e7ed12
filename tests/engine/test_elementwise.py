"""add, sub, mul, div: broadcasting, numbers, NaN and Inf, errors."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Device, Tensor
from clcomm.engine import functional as F

OPS = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}


def away_from_zero(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    values = rng.uniform(0.5, 2.0, shape) * rng.choice([-1.0, 1.0], shape)
    return values.astype(np.float32)


@pytest.mark.parametrize("name", sorted(OPS))
@pytest.mark.parametrize("number", [3, -0.25, np.float32(1.5)])
def test_numbers_on_either_side(check_op, name, number):
    x = away_from_zero(np.random.default_rng(3), (13, 5))
    op, reference, value = getattr(F, name), OPS[name], float(number)
    check_op(lambda t: op(t, number), lambda a: reference(a, value), x)
    check_op(lambda t: op(number, t), lambda a: reference(value, a), x)


def test_operators_are_the_functions(device):
    a = Tensor(np.float32([[1, 2], [3, 4]]), device)
    b = Tensor(np.float32([10, 20]), device)
    values = a.numpy()
    assert np.array_equal((a + b).numpy(), values + b.numpy())
    assert np.array_equal((b - a).numpy(), b.numpy() - values)
    assert np.array_equal((2 * a).numpy(), 2 * values)
    assert np.array_equal((a / 2).numpy(), values / 2)
    assert np.array_equal((1 - a).numpy(), 1 - values)
    assert np.array_equal((12 / a).numpy(), np.float32(12) / values)
    assert np.array_equal((-a).numpy(), -values)
    assert np.array_equal((a @ a).numpy(), values @ values)


def test_nan_and_inf_propagate_as_in_numpy(device):
    values = np.float32([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0])
    a, b = (x.ravel() for x in np.meshgrid(values, values))
    with np.errstate(all="ignore"):
        for name, reference in OPS.items():
            result = getattr(F, name)(Tensor(a, device), Tensor(b, device)).numpy()
            assert np.array_equal(result, reference(a, b), equal_nan=True), name
        assert np.array_equal((Tensor(a, device) / 0.0).numpy(), a / np.float32(0), equal_nan=True)
        assert np.array_equal(np.signbit((Tensor(values, device) * 1.0).numpy()[4]), True)


def test_errors_name_the_shapes_and_types(device):
    a, b = Tensor(np.zeros((2, 3)), device), Tensor(np.zeros((2, 4)), device)
    with pytest.raises(ArgumentError, match=r"add: shapes \(2, 3\) and \(2, 4\) do not broadcast"):
        F.add(a, b)
    with pytest.raises(ArgumentError, match="mul: expected a Tensor, got ndarray"):
        F.mul(a, np.zeros(3))
    with pytest.raises(ArgumentError, match="sub: expected a float32 tensor, got bool"):
        F.sub(Tensor([True, False], device), Tensor([False, True], device))
    with pytest.raises(ArgumentError, match="expected tensors of one device"):
        F.add(a, Tensor(np.zeros(3), Device(device.cl_device)))


def test_divisions_are_those_of_ieee_754(device):
    rng = np.random.default_rng(3)
    a, b = (np.exp(rng.uniform(-20, 20, 5000)).astype(np.float32) for _ in range(2))
    assert (Tensor(a, device) / Tensor(b, device)).numpy().tobytes() == (a / b).tobytes()
