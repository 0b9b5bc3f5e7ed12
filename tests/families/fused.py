"""Fused functions: the bits of their operations one by one, for operands that broadcast in every way."""

from __future__ import annotations

from typing import Any

import numpy as np

from clcomm.engine import Tensor, fused
from clcomm.engine import functional as F
from clcomm.engine.device import Device
from tests.families.elements import Pair, draw_pair
from tests.families.family import Family, drawn, leaf


def arithmetic(x: Tensor, y: Tensor) -> Tensor:
    kept = F.maximum(x, y) - F.minimum(2.0 * x, y) / (F.square(y) + 1.0)
    flags = ((x > y) | (x == 0.0)) & ~(y >= 2.0) & (x != y)
    chosen = F.where(flags, kept, 3.0 / (F.abs(x + y) + 1.0))
    return F.masked_fill(chosen, (y <= -1.0) ^ (x < 0.0), 0.25) + flags.float()


def functions(x: Tensor, y: Tensor) -> Tensor:
    size = F.square(x * y) + 0.5
    waves = F.sin(x - y) + F.cos(4000.0 * (x + y)) * F.erf(x)
    powers = F.sqrt(size) * F.rsqrt(size) + size**1.5 + (x + y) ** 3 + F.log(size) + F.log1p(size)
    two = F.hypot(x, y) + F.xlogy(size, size) + F.remainder(x, size) + F.logaddexp(x, y) + x / 49.0 + F.atan2(x, y)
    return two + waves + powers + F.exp(-size) + F.clamp(x + y, -1.0, 2.0) + (x - y) % 0.75


def activations(x: Tensor, y: Tensor) -> Tensor:
    v = x + 0.3 * y
    gates = F.relu(v) + F.sigmoid(v) * F.tanh(v) + F.leaky_relu(v, 0.1) + F.gelu(v) + F.gelu(v, approximate="tanh")
    bent = F.silu(v) + F.elu(v, 0.7) + F.softplus(v) + F.mish(v) + F.logsigmoid(v) + F.hardswish(v) + F.hardtanh(v)
    return gates + bent + F.threshold(v, 0.2, 0.1) + F.floor(v) + F.ceil(v) + F.round(v) + F.trunc(v) + F.sign(v)


FUNCTIONS = tuple((each, fused(each)) for each in (arithmetic, functions, activations))


def check_fused(device: Device, case: Pair) -> None:
    """Compare results and gradients as bits; also of gradients added to earlier ones."""
    rng = np.random.default_rng(case.seed)
    hosts = [rng.integers(-12, 13, shape).astype(np.float32) / 4 for shape in (case.a, case.b)]
    for alone, together in FUNCTIONS[case.seed % 3 :][:1]:
        found: list[list[Any]] = []
        for function in (alone, together):
            x, y = (leaf(device, host) for host in hosts)
            result = function(x, y)
            above = leaf(device, np.random.default_rng(1).standard_normal(result.shape).astype(np.float32), False)
            result.backward(above)
            (function(x, y) * x).backward(above)
            assert x.grad is not None and y.grad is not None
            found.append([each.numpy().tobytes() for each in (result, x.grad, y.grad)])
        assert found[0] == found[1], alone.__name__


FUSED = Family("fused functions", drawn(draw_pair), check_fused)
