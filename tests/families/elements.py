"""Elementwise kernels: arithmetic with broadcasting, transposes, activations and optimizers, of every size."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from clcomm import optim
from clcomm.engine import Parameter, RandomStream
from clcomm.engine import functional as F
from clcomm.engine.device import Device
from tests.families.family import Family, assert_equal, assert_near, drawn, leaf, whole_numbers
from tests.random_words import halves, random_words

#: Operations, and their slopes for both operands.
_ARITHMETIC: tuple[tuple[Any, Any, Any], ...] = (
    (F.add, np.add, lambda a, b: (1, 1)),
    (F.sub, np.subtract, lambda a, b: (1, -1)),
    (F.mul, np.multiply, lambda a, b: (b, a)),
    (F.div, np.divide, lambda a, b: (1 / b, -a / b**2)),
)


class Pair(NamedTuple):
    """Two shapes that broadcast to each other."""

    a: tuple[int, ...]
    b: tuple[int, ...]
    seed: int


def draw_pair(rng: np.random.Generator, longest: int, number: int) -> Pair:
    """Draw up to 5 dimensions, each of both, of one alone or of one."""
    dims = int(rng.integers(1, 6))
    whole = rng.integers(1, max(3, 2 * longest // dims), dims)
    if rng.integers(8) == 0 and longest > 20:
        whole = np.minimum(whole, 3)
        whole[rng.integers(dims)] = rng.integers(8000, 20_000) // np.prod(whole)
    shapes = []
    for _ in "ab":
        missing = int(rng.integers(0, dims)) * int(rng.integers(2))
        shapes.append(tuple(int(n) for n in np.where(rng.random(dims) < 0.3, 1, whole)[missing:]))
    return Pair(*shapes, int(rng.integers(1 << 30)))


def check_arithmetic(device: Device, case: Pair) -> None:
    """Compare add, sub, mul and div with their gradients; divisors are powers of two, so that all is exact."""
    hosts = whole_numbers(case.seed, *case.a), whole_numbers(case.seed + 1, *case.b)
    powers = 2.0 ** np.random.default_rng(case.seed).integers(-1, 2, case.b).astype(np.float32)
    for op, reference, slopes in _ARITHMETIC:
        a_host, b_host = hosts[0].astype(np.float64), (powers if op is F.div else hosts[1]).astype(np.float64)
        a, b = leaf(device, a_host), leaf(device, b_host)
        y = op(a, b)
        assert_equal(y, reference(a_host, b_host), op.__name__)
        grad = whole_numbers(case.seed + 2, *y.shape)
        y.backward(leaf(device, grad, False))
        for x, slope in zip((a, b), slopes(a_host, b_host), strict=True):
            assert_equal(x.grad, folded(grad * slope * np.ones(y.shape), x.shape), f"{op.__name__}: gradient")


def folded(grad: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return a gradient added up over the dimensions along which a shape was broadcast."""
    grad = grad.sum(tuple(range(grad.ndim - len(shape))))
    return grad.sum(tuple(axis for axis, n in enumerate(shape) if n == 1), keepdims=True).reshape(shape)


class Shaped(NamedTuple):
    """A shape and an order of its dimensions."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    seed: int


def draw_shaped(rng: np.random.Generator, longest: int, number: int) -> Shaped:
    """Draw up to 5 dimensions."""
    dims = int(rng.integers(1, 6))
    shape = tuple(int(n) for n in rng.integers(1, max(3, 3 * longest // dims**2 + 2), dims))
    return Shaped(shape, tuple(int(axis) for axis in rng.permutation(dims)), int(rng.integers(1 << 30)))


def check_transpose(device: Device, case: Shaped) -> None:
    """Compare a transpose and its gradient."""
    host = whole_numbers(case.seed, *case.shape)
    x = leaf(device, host)
    y = F.transpose(x, case.order)
    assert_equal(y, host.transpose(case.order), "transpose")
    grad = whole_numbers(case.seed + 1, *y.shape)
    y.backward(leaf(device, grad, False))
    assert_equal(x.grad, grad.transpose(np.argsort(case.order)), "transpose: gradient")
    if host.ndim < 2:
        return
    diagonal = case.seed % 7 - 3
    for function, keep in ((F.tril, np.tril(np.ones(case.shape[-2:]), diagonal)),
                           (F.triu, np.triu(np.ones(case.shape[-2:]), diagonal))):  # fmt: skip
        y, x.grad = function(x, diagonal), None
        assert_equal(y, host * keep, "triangle")
        y.backward(leaf(device, whole := whole_numbers(case.seed + 2, *host.shape), False))
        assert_equal(x.grad, whole * keep, "triangle: gradient")


def check_blocks(device: Device, case: Shaped) -> None:
    """Compare a part with any steps, a concatenation of parts and a padding, with their gradients."""
    rng = np.random.default_rng(case.seed)
    host, axis = whole_numbers(case.seed, *case.shape), int(rng.integers(len(case.shape)))
    index: list[Any] = []
    for n in case.shape:
        step, begin = int(rng.choice([-3, -2, -1, 1, 1, 2])), int(rng.integers(n))
        index.append(begin if rng.integers(4) == 0 else slice(begin, None, step))
    widths = [(int(before), int(after)) for before, after in rng.integers(0, 3, (len(case.shape), 2))]
    cut = int(rng.integers(1, case.shape[axis] + 1))
    sizes = [cut, case.shape[axis] - cut] if cut < case.shape[axis] else [cut]
    inside = tuple(slice(before, before + n) for n, (before, _) in zip(case.shape, widths, strict=True))
    turned = np.concatenate(np.split(host, [cut], axis)[::-1], axis)
    x = leaf(device, host)
    part, joined = x[tuple(index)], F.concat(F.split(x, sizes, axis)[::-1], axis)
    padded = F.pad(x, widths, 5.0)
    for y, expected in (
        (part, host[tuple(index)]),
        (joined, turned),
        (padded, np.pad(host, widths, constant_values=5)),
    ):
        assert_equal(y, expected, "part, concatenation and padding")
    grads = [whole_numbers(case.seed + number, *y.shape) for number, y in enumerate((part, joined, padded), 1)]
    for y, grad in zip((part, joined, padded), grads, strict=True):
        y.backward(leaf(device, grad, False))
    expected = grads[2][inside] + np.concatenate(np.split(grads[1], [case.shape[axis] - cut], axis)[::-1], axis)
    expected[tuple(index)] += grads[0]
    assert_equal(x.grad, expected, "parts: gradient")


def check_activations(device: Device, case: Shaped) -> None:
    """Compare activations, and arithmetic with a number, with their gradients."""
    rng = np.random.default_rng(case.seed)
    host = (rng.uniform(0.25, 4, case.shape) * rng.choice([-1, 1], case.shape)).astype(np.float32)
    grad, x = rng.uniform(-1, 1, case.shape).astype(np.float32), host.astype(np.float64)
    sigmoid = 1 / (1 + np.exp(-x))
    cases: list[tuple[Any, np.ndarray, np.ndarray]] = [
        (F.relu, np.maximum(x, 0), (x > 0) * 1.0),
        (F.sigmoid, sigmoid, sigmoid * (1 - sigmoid)),
        (F.tanh, np.tanh(x), 1 - np.tanh(x) ** 2),
        *_gated(x),
        (lambda t: 3 * t - 0.5, 3 * x - 0.5, np.full(x.shape, 3)),
        (lambda t: 2 / t, 2 / x, -2 / x**2),
        (lambda t: t * t + t, x * x + x, 2 * x + 1),  # gradients add up
    ]
    check_slopes(device, host, grad, cases)


def check_slopes(
    device: Device, host: np.ndarray, grad: np.ndarray, cases: list[tuple[Any, np.ndarray, np.ndarray]]
) -> None:
    """Compare functions of the elements, each with its values and slopes, and their gradients from `grad`."""
    for number, (op, expected, slope) in enumerate(cases):
        t = leaf(device, host)
        y = op(t)
        assert_near(y, expected, f"function {number}")
        y.backward(leaf(device, grad, False))
        assert_near(t.grad, slope * grad, f"function {number}: gradient")


def _gated(x: np.ndarray) -> list[tuple[Any, np.ndarray, np.ndarray]]:
    """Return GELU, SiLU and leaky ReLU with their values and slopes at x."""
    cumulative = 0.5 * np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2))
    density = np.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)
    root = math.sqrt(2 / math.pi)
    gate = 0.5 * (1 + np.tanh(root * (x + 0.044715 * x**3)))
    gate_slope = 2 * gate * (1 - gate) * root * (1 + 3 * 0.044715 * x**2)
    logistic = 1 / (1 + np.exp(-x))
    return [
        (F.gelu, x * cumulative, cumulative + x * density),
        (lambda t: F.gelu(t, "tanh"), x * gate, gate + x * gate_slope),
        (F.silu, x * logistic, logistic * (1 + x * (1 - logistic))),
        (lambda t: F.leaky_relu(t, 0.25), np.where(x > 0, x, 0.25 * x), np.where(x > 0, 1.0, 0.25)),
    ]


def check_dropout(device: Device, case: Shaped) -> None:
    """Compare dropout and its gradient with the words of a reference, for a draw far into a rank's stream."""
    rng = np.random.default_rng(case.seed)
    seed, draws, rank = int(rng.integers(1 << 62)), int(rng.integers(1 << 40)), int(rng.integers(1 << 32))
    p = float(rng.choice([0.25, 0.5, 0.875, rng.uniform()]))
    stream = RandomStream.of(device)
    stream.load(np.array([*halves(seed), rank, *halves(draws)], np.uint32))
    hosts = [whole_numbers(case.seed + number, *case.shape) for number in range(2)]
    factor = np.where(random_words(seed, rank, draws, hosts[0].size) >= round(p * 2**32), np.float32(1 / (1 - p)), 0)
    x = leaf(device, hosts[0])
    y = F.dropout(x, p)
    F.dropout(x, p)  # a later draw does not change the mask of backward
    assert_equal(y, hosts[0] * factor.astype(np.float32).reshape(case.shape), "dropout")
    y.backward(leaf(device, hosts[1], False))
    assert_equal(x.grad, hosts[1] * factor.astype(np.float32).reshape(case.shape), "dropout: gradient")
    assert_equal(stream.state(), np.array([*halves(seed), rank, *halves(draws + 2)], np.uint32), "state")


_DAMPENING = 0.25


class Updated(NamedTuple):
    """Parameters and an optimizer over them."""

    sizes: tuple[int, ...]
    kind: str
    weight_decay: float
    momentum: float
    flag: bool
    ascend: bool
    seed: int


def draw_updated(rng: np.random.Generator, longest: int, number: int) -> Updated:
    """Draw an optimizer with all its hyper-parameters; `flag` is nesterov, amsgrad or centered."""
    sizes = tuple(int(n) for n in rng.integers(1, 3 * longest, rng.integers(1, 4)))
    kinds = (
        *(("sgd", 0.0), ("sgd", 0.9), ("adam", 0.0), ("rmsprop", 0.9), ("rmsprop", 0.0), ("adamw", 0.0)),
        *(("adadelta", 0.0), ("adagrad", 0.0)),
    )
    kind, momentum = kinds[number % len(kinds)]
    decay, flag = float(rng.choice([0.0, 0.1])), bool(rng.integers(2))
    return Updated(sizes, kind, decay, momentum, flag, bool(rng.integers(2)), int(rng.integers(1 << 30)))


def check_update(device: Device, case: Updated) -> None:
    """Compare parameters after three steps with the formulas in float64."""
    rng = np.random.default_rng(case.seed)
    hosts = [rng.standard_normal(size).astype(np.float32) for size in case.sizes]
    parameters = [Parameter(host, device) for host in hosts]
    optimizer = _optimizer(case, parameters)
    expected = [_Formula(case, host.astype(np.float64)) for host in hosts]
    for step in range(3):
        optimizer.zero_grad()
        for number, (parameter, formula) in enumerate(zip(parameters, expected, strict=True)):
            gradient = rng.standard_normal(parameter.shape).astype(np.float32)
            if not step == number == 1:  # a parameter without a gradient is left alone, its number of steps too
                parameter.grad = leaf(device, gradient, False)
                formula.step(gradient.astype(np.float64))
        optimizer.step()
    for parameter, formula in zip(parameters, expected, strict=True):
        assert_near(parameter, formula.p, case.kind, 1e-4)


def _optimizer(case: Updated, parameters: list[Parameter]) -> optim.Optimizer:
    options: dict[str, Any] = {"weight_decay": case.weight_decay, "maximize": case.ascend}
    if case.kind == "sgd":
        nesterov = case.flag and case.momentum > 0
        dampening = 0.0 if nesterov else _DAMPENING
        return optim.SGD(parameters, 0.1, case.momentum, dampening, nesterov=nesterov, **options)
    if case.kind == "rmsprop":
        return optim.RMSProp(parameters, 0.01, momentum=case.momentum, centered=case.flag, **options)
    kinds = {"adam": optim.Adam, "adamw": optim.AdamW, "adadelta": optim.Adadelta, "adagrad": optim.Adagrad}
    options |= {"amsgrad": case.flag} if "adam" in case.kind else {}
    return kinds[case.kind](parameters, 0.01, **options)


class _Formula:
    """PyTorch's optimizers with their defaults, in float64."""

    def __init__(self, case: Updated, p: np.ndarray):
        self.case, self.p, self.steps = case, p, 0
        self.mean, self.square, self.velocity, self.largest = (np.zeros(p.shape) for _ in range(4))

    def step(self, grad: np.ndarray) -> None:
        case = self.case
        self.steps += 1
        grad = -grad if case.ascend else grad
        if case.kind == "adamw":
            self.p = self.p * (1 - 0.01 * case.weight_decay)
        else:
            grad = grad + case.weight_decay * self.p
        if case.kind == "sgd":
            share = 1 if self.steps == 1 or case.flag or not case.momentum else 1 - _DAMPENING
            self.velocity = case.momentum * self.velocity + share * grad
            self.p = self.p - 0.1 * (grad + case.momentum * self.velocity if case.flag else self.velocity)
        elif case.kind == "adadelta":
            self.square = 0.9 * self.square + 0.1 * grad**2
            by = np.sqrt(self.mean + 1e-6) / np.sqrt(self.square + 1e-6) * grad
            self.mean = 0.9 * self.mean + 0.1 * by**2
            self.p = self.p - 0.01 * by
        elif case.kind == "adagrad":
            self.square = self.square + grad**2
            self.p = self.p - 0.01 * grad / (np.sqrt(self.square) + 1e-10)
        elif case.kind == "rmsprop":
            self.square = 0.99 * self.square + 0.01 * grad**2
            self.mean = 0.99 * self.mean + 0.01 * grad
            variance = self.square - self.mean**2 * case.flag
            self.velocity = case.momentum * self.velocity + grad / (np.sqrt(variance) + 1e-8)
            self.p = self.p - 0.01 * self.velocity
        else:
            self.mean = 0.9 * self.mean + 0.1 * grad
            self.square = 0.999 * self.square + 0.001 * grad**2
            self.largest = np.maximum(self.largest, self.square)
            divided = self.largest if case.flag else self.square
            mean, square = self.mean / (1 - 0.9**self.steps), divided / (1 - 0.999**self.steps)
            self.p = self.p - 0.01 * mean / (np.sqrt(square) + 1e-8)


ARITHMETIC = Family("arithmetic", drawn(draw_pair), check_arithmetic)
TRANSPOSE = Family("transpose", drawn(draw_shaped), check_transpose)
BLOCKS = Family("blocks", drawn(draw_shaped), check_blocks)
DROPOUT = Family("dropout", drawn(draw_shaped), check_dropout)
ACTIVATIONS = Family("activations", drawn(draw_shaped), check_activations)
OPTIMIZERS = Family("optimizers", drawn(draw_updated), check_update)
