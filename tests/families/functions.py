"""Functions of elements, comparisons and what they choose, and the order of elements along a dimension."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from clcomm.engine import functional as F
from clcomm.engine.device import Device
from tests.families.elements import Pair, Shaped, check_slopes, draw_pair, draw_shaped, folded
from tests.families.family import Family, assert_equal, drawn, leaf, whole_numbers

_ERF = np.vectorize(math.erf, otypes=[np.float64])


def check_functions(device: Device, case: Shaped) -> None:
    """Compare functions of positive elements with their gradients; those of clamp at its limits are its own."""
    rng = np.random.default_rng(case.seed)
    host = rng.uniform(0.25, 4, case.shape).astype(np.float32)
    grad, x = rng.uniform(-1, 1, case.shape).astype(np.float32), host.astype(np.float64)
    other = 4.25 - x
    second = leaf(device, other, False)
    cases: list[tuple[Any, np.ndarray, np.ndarray]] = [
        (F.expm1, np.expm1(x), np.exp(x)),
        (F.atan, np.arctan(x), 1 / (1 + x * x)),
        (lambda t: F.asin(0.2 * t), np.arcsin(0.2 * x), 0.2 / np.sqrt(1 - 0.04 * x * x)),
        (lambda t: F.acos(0.2 * t), np.arccos(0.2 * x), -0.2 / np.sqrt(1 - 0.04 * x * x)),
        (lambda t: t**second, x**other, other * x ** (other - 1)),
        (lambda t: second**t, other**x, other**x * np.log(other)),
        (lambda t: F.atan2(t, second), np.arctan2(x, other), other / (x * x + other * other)),
        (lambda t: F.hypot(t, second), np.hypot(x, other), x / np.hypot(x, other)),
        (lambda t: F.xlogy(second, t), other * np.log(x), other / x),
        (lambda t: second % (0.3 * t), np.remainder(other, 0.3 * x), -0.3 * np.floor(other / (0.3 * x))),
        (
            lambda t: F.binary_cross_entropy(0.2 * t, 0.2 * second, reduction="none"),
            -0.2 * (other * np.log(0.2 * x) + (5 - other) * np.log(1 - 0.2 * x)),
            (x - other) / (x * (5 - x)),
        ),
        (lambda t: second // t, np.floor_divide(other, x), np.zeros(x.shape)),
        (F.exp, np.exp(x), np.exp(x)),
        (F.log, np.log(x), 1 / x),
        (F.sqrt, np.sqrt(x), 0.5 / np.sqrt(x)),
        (F.rsqrt, x**-0.5, -0.5 * x**-1.5),
        (F.sin, np.sin(x), np.cos(x)),
        (F.cos, np.cos(x), -np.sin(x)),
        (F.erf, _ERF(x), 2 / np.sqrt(np.pi) * np.exp(-(x**2))),
        (F.square, x * x, 2 * x),
        (F.softplus, np.log1p(np.exp(x)), 1 / (1 + np.exp(-x))),
        (F.log1p, np.log1p(x), 1 / (1 + x)),
        (lambda t: F.abs(-1.0 * t), x, np.ones(x.shape)),
        (lambda t: t**2.5, x**2.5, 2.5 * x**1.5),
        (lambda t: t**-3, x**-3.0, -3 * x**-4.0),
        (lambda t: t**5, x**5, 5 * x**4),
        (lambda t: F.clamp(t, 0.5, 2), np.clip(x, 0.5, 2), 1.0 * ((x >= 0.5) & (x <= 2))),
    ]
    check_slopes(device, host, grad, cases)
    both_signs, flat = (host - np.float32(2)).astype(np.float32), np.zeros(case.shape)
    apart = both_signs.astype(np.float64)
    inside, gate = (apart > -1.5) & (apart < 0.75), np.tanh(np.log1p(np.exp(apart)))
    sigmoid = 1 / (1 + np.exp(-apart))
    check_slopes(device, both_signs, grad, [
        (lambda t: F.elu(t, 0.5), np.where(apart > 0, apart, 0.5 * np.expm1(apart)),
         np.where(apart > 0, 1, 0.5 * np.exp(apart))),
        (lambda t: F.hardtanh(t, -1.5, 0.75), np.clip(apart, -1.5, 0.75), inside * 1.0),
        (lambda t: F.threshold(t, 0.75, -7.0), np.where(apart > 0.75, apart, -7), (apart > 0.75) * 1.0),
        (lambda t: F.hardswish(2 * t), 2 * apart * np.clip(2 * apart + 3, 0, 6) / 6,
         np.where(np.abs(2 * apart) < 3, 2 * (2 * apart / 3 + 0.5), 2.0 * (apart > 0))),
        (F.mish, apart * gate, gate + apart * (1 - gate**2) * sigmoid),
        (F.logsigmoid, np.log(sigmoid), 1 - sigmoid),
        (F.floor, np.floor(apart), flat), (F.ceil, np.ceil(apart), flat), (F.round, np.rint(apart), flat),
        (F.trunc, np.trunc(apart), flat), (F.sign, np.sign(apart), flat),
        (lambda t: t % 0.5, np.remainder(apart, 0.5), flat + 1), (lambda t: t % -3, np.remainder(apart, -3), flat + 1),
        (lambda t: t // 0.5, np.floor_divide(apart, 0.5), flat),
    ])  # fmt: skip


def check_comparisons(device: Device, case: Pair) -> None:
    """Compare comparisons of floats and of integers, and elements chosen by them with their gradients."""
    a_host, b_host = whole_numbers(case.seed, *case.a), whole_numbers(case.seed + 1, *case.b)
    a, b = leaf(device, a_host), leaf(device, b_host)
    for left, right in ((a, b), (a.int(), b.int())):
        for actual, expected in (
            (left == right, a_host == b_host), (left != right, a_host != b_host), (left < right, a_host < b_host),
            (left <= right, a_host <= b_host), (left > right, a_host > b_host), (left >= right, a_host >= b_host),
            ((left < 0) & (right < 0), (a_host < 0) & (b_host < 0)), (~(left > 0), ~(a_host > 0)),
            ((left > 0) | (right > 0), (a_host > 0) | (b_host > 0)),
            ((left > 0) ^ (right > 0), (a_host > 0) ^ (b_host > 0)),
        ):  # fmt: skip
            assert_equal(actual, expected, "comparison")
    flags = a_host < b_host
    grad = whole_numbers(case.seed + 2, *flags.shape)
    for y, expected, slopes in (
        (F.where(a < b, a, b), np.where(flags, a_host, b_host), (flags, ~flags)),
        (F.maximum(a, b), np.maximum(a_host, b_host), _shares(a_host > b_host, a_host == b_host)),
        (F.minimum(a, b), np.minimum(a_host, b_host), _shares(a_host < b_host, a_host == b_host)),
        ((a + b).masked_fill(a < b, 7.0), np.where(flags, 7, a_host + b_host), (~flags, ~flags)),
    ):
        assert_equal(y, expected, "choice")
        a.grad = b.grad = None
        y.backward(leaf(device, grad, False))
        for x, slope in zip((a, b), slopes, strict=True):
            assert_equal(x.grad, folded(grad * slope, x.shape), "choice: gradient")


def _shares(own: np.ndarray, equal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return own + 0.5 * equal, (~own & ~equal) + 0.5 * equal


def check_ordered(device: Device, case: Shaped) -> None:
    """Compare extremes, sorted elements, running sums and products along each dimension, with their gradients."""
    host = whole_numbers(case.seed, *case.shape, least=-2, most=2)
    axis = case.order[0]
    order = np.argsort(host, axis, kind="stable")
    downwards = np.argsort(-host, axis, kind="stable")
    x = leaf(device, host)
    k = (case.shape[axis] + 1) // 2
    first = tuple(slice(k if d == axis else None) for d in range(host.ndim))
    assert_equal(F.argmax(x, axis), host.argmax(axis), "argmax")
    assert_equal(F.argmin(x), host.argmin(), "argmin")
    assert_equal(x.sort(axis)[1], order, "sort: indices")
    values, indices = x.topk(k, axis)
    assert_equal(indices, downwards[first], "topk: indices")
    assert_equal(values, np.take_along_axis(host, downwards, axis)[first], "topk")
    assert_equal(F.max(x, axis, True).values, host.max(axis, keepdims=True), "max")
    grad = whole_numbers(case.seed + 1, *values.shape)
    values.backward(leaf(device, grad, False))
    expected = np.zeros(case.shape, np.float32)
    np.put_along_axis(expected, downwards[first], grad, axis)
    assert_equal(x.grad, expected, "topk: gradient")
    sums, whole = F.cumsum(x, axis), whole_numbers(case.seed + 2, *case.shape)
    assert_equal(sums, host.cumsum(axis), "running sums")
    x.grad = None
    sums.backward(leaf(device, whole, False))
    assert_equal(x.grad, np.flip(np.flip(whole, axis).cumsum(axis), axis), "running sums: gradient")
    x.grad = None
    product = F.prod(x, axis)
    assert_equal(product, host.prod(axis), "product")
    above = whole_numbers(case.seed + 3, *product.shape)
    product.backward(leaf(device, above, False))
    others = [np.delete(host, at, axis).prod(axis) * above for at in range(case.shape[axis])]
    assert_equal(x.grad, np.stack(others, axis), "product: gradient")
    signs = leaf(device, np.where(host < 0, -1, 1).astype(np.float32))  # none is 0
    F.prod(signs, axis).backward(leaf(device, above, False))
    whole_product = np.where(host < 0, -1, 1).prod(axis) * above
    assert_equal(signs.grad, np.expand_dims(whole_product, axis) * signs.numpy(), "product without zeros: gradient")


FUNCTIONS = Family("functions", drawn(draw_shaped), check_functions)
COMPARISONS = Family("comparisons", drawn(draw_pair), check_comparisons)
ORDERED = Family(
    "order along a dimension", drawn(lambda rng, side, number: draw_shaped(rng, side // 3, number)), check_ordered
)
