"""What families of cases have in common: whole numbers, of which every float32 sum is exact, and how they are compared.

A family draws its cases in such an order that a short sample takes in every kind, and checks one on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from clcomm.engine import Tensor
from clcomm.engine.device import Device


class Family(NamedTuple):
    """A family of cases.

    cases: (generator, how many, longest side) -> cases.
    check: raises AssertionError.
    kinds: of device that it is for.
    in_caller: whether it is for kernels that run in the calling thread alone.
    """

    name: str
    cases: Callable[[np.random.Generator, int, int], Iterator[Any]]
    check: Callable[[Device, Any], None]
    kinds: tuple[str, ...] = ("cpu", "gpu")
    in_caller: bool = False

    def suits(self, device: Device) -> bool:
        """Return whether it is for this device."""
        return device.kind in self.kinds and (device.runs_in_caller or not self.in_caller)


def drawn(draw: Callable[[np.random.Generator, int, int], Any]) -> Callable[..., Iterator[Any]]:
    """Return the `cases` of a family that draws each by draw(generator, longest side, its number)."""
    return lambda rng, count, side: (draw(rng, side, number) for number in range(count))


def whole_numbers(seed: int, *shape: int, least: int = -3, most: int = 3) -> np.ndarray:
    """Return float32 whole numbers: products and sums of so small ones are exact in any order."""
    return np.random.default_rng(seed).integers(least, most, shape, endpoint=True).astype(np.float32)


def leaf(device: Device, values: np.ndarray, needs: bool = True) -> Tensor:
    """Return the values as a leaf of the tape."""
    return Tensor(values, device, requires_grad=needs)


def assert_equal(actual: Tensor | np.ndarray, expected: np.ndarray, what: str) -> None:
    """Compare values that float32 holds exactly."""
    values = actual.numpy() if isinstance(actual, Tensor) else actual
    np.testing.assert_array_equal(values, expected, what)


def assert_near(actual: Tensor | np.ndarray, expected: np.ndarray, what: str, tolerance: float = 1e-5) -> None:
    """Compare within the rounding of float32, as a share of the largest value."""
    values = actual.numpy() if isinstance(actual, Tensor) else actual
    assert values.shape == np.shape(expected), what
    scale = 1.0 + np.abs(expected).max()
    np.testing.assert_allclose(values, expected, rtol=tolerance, atol=tolerance * scale, err_msg=what)
