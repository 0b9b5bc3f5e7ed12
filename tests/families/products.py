"""Matrix products of every remainder of rows, columns and depth, operands lying either way round, batches of them, and
linear layers.

M N K: the result is M x N and the sums run over K. Values are whole numbers, so that results are exact.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from clcomm.engine import functional as F
from clcomm.engine.device import Device
from clcomm.engine.ops.matmul import multiply
from clcomm.engine.tensor import empty
from tests.families.family import Family, assert_equal, drawn, leaf, whole_numbers

#: Around a panel's depth and a slice's, and where sums lie along the lanes.
DEPTHS = (8, 15, 16, 17, 32, 33, 63, 64, 65, 72, 79, 511, 512, 513, 520, 1025)


class Case(NamedTuple):
    """A product of [M, K] and [K, N]; `transposed`: which of the two are stored transposed."""

    rows: int
    columns: int
    depth: int
    transposed: tuple[bool, bool]
    bias: bool
    relu: bool
    seed: int


def draw(rng: np.random.Generator, longest: int, number: int) -> Case:
    """Draw one of: any sizes, few columns and long sums, whole panels, sides past which operands are transposed, and
    rows that are divided into blocks.
    """
    rows, columns, depth = (int(n) for n in rng.integers(1, 2 * longest, 3))
    if rng.random() < 0.4:
        depth = int(rng.choice([each for each in DEPTHS if each < longest**3]))
    transposed, ending = (bool(rng.integers(2)), bool(rng.integers(2))), (number % 2 > 0, number // 2 % 2 > 0)
    if number % 5 == 0:
        columns, depth, transposed = int(rng.integers(1, 13)), int(rng.integers(56, 140)), (False, True)
    elif number % 5 == 1:
        rows, columns = 4 + rows % (4 if longest < 20 else 80), int(rng.choice([16, 32, 48, 64, 96]))
        transposed, ending = (number % 2 > 0, False), (False, False)
    elif number % 5 == 2 and longest > 20:
        rows, columns, depth = (int(n) for n in rng.integers(92, 240, 3))
    elif number % 5 == 3 and longest > 20:
        rows = int(rng.integers(769, 1600))
    return Case(rows, columns, depth, transposed, *ending, int(rng.integers(1 << 30)))


def check(device: Device, case: Case) -> None:
    """Compare one product."""
    a, b = whole_numbers(case.seed, case.rows, case.depth), whole_numbers(case.seed + 1, case.depth, case.columns)
    bias = whole_numbers(case.seed + 2, case.columns)
    left, right = (
        leaf(device, np.ascontiguousarray(host.T) if transposed else host, False)
        for host, transposed in zip((a, b), case.transposed, strict=True)
    )
    out = empty(device, (case.rows, case.columns))
    added = leaf(device, bias, False) if case.bias else None
    multiply(
        left, right, out, transpose_a=case.transposed[0], transpose_b=case.transposed[1], bias=added, relu=case.relu
    )
    expected = a.astype(np.float64) @ b + bias * case.bias
    assert_equal(out, np.maximum(expected, 0) if case.relu else expected, "product")


def check_plain(device: Device, case: Case) -> None:
    """Compare one product without bias and ReLU, which are separate builds."""
    check(device, case._replace(bias=False, relu=False))


def check_layer(device: Device, case: Case) -> None:
    """Compare `linear`, and its gradients, through the kernels of a training step."""
    hosts = (
        whole_numbers(case.seed, case.rows, case.depth),
        whole_numbers(case.seed + 1, case.columns, case.depth),
        whole_numbers(case.seed + 2, case.columns),
    )
    x, weight, bias = (leaf(device, host) for host in hosts)
    y = F.linear(x, weight, bias if case.bias else None, relu=case.relu)
    expected = hosts[0].astype(np.float64) @ hosts[1].T + hosts[2] * case.bias
    assert_equal(y, np.maximum(expected, 0) if case.relu else expected, "layer")
    grad = whole_numbers(case.seed + 3, *y.shape)
    y.backward(leaf(device, grad, False))
    passed = grad.astype(np.float64) * (expected > 0) if case.relu else grad.astype(np.float64)
    assert_equal(x.grad, passed @ hosts[1], "gradient of x")
    assert_equal(weight.grad, passed.T @ hosts[0], "gradient of the weight")
    if case.bias:
        assert_equal(bias.grad, passed.sum(0), "gradient of the bias")


class Chain(NamedTuple):
    """A layer with ReLU of `hidden` outputs, and what takes its result: up to two layers and a product with numbers."""

    rows: int
    inputs: int
    hidden: int
    outputs: tuple[int, ...]
    scaled: bool
    seed: int


def draw_chain(rng: np.random.Generator, longest: int, number: int) -> Chain:
    """Draw a chain; half of them have hidden layers of whole panels, whose gradient takes in ReLU's."""
    rows, inputs, hidden, *outputs = (int(n) for n in rng.integers(1, longest, 5))
    if number % 2:
        rows, hidden = rows + 3, int(rng.choice([16, 32, 64]))
    takers = number // 2 % 3
    return Chain(
        rows, inputs, hidden, tuple(outputs[:takers]), takers == 0 or number % 5 == 0, int(rng.integers(1 << 30))
    )


def check_chain(device: Device, case: Chain) -> None:
    """Compare the gradients of a layer with ReLU with those by its definition, whoever uses its result."""
    x, weight, factors = (
        whole_numbers(case.seed + number, *shape)
        for number, shape in enumerate([(case.rows, case.inputs), (case.hidden, case.inputs), (case.rows, case.hidden)])
    )
    above = [whole_numbers(case.seed + 9 + number, n, case.hidden) for number, n in enumerate(case.outputs)]
    leaves = leaf(device, x), leaf(device, weight)
    hidden = F.linear(*leaves, relu=True)
    results = [F.linear(hidden, leaf(device, each)) for each in above]
    results += [hidden * leaf(device, factors, False)] if case.scaled else []
    total, grad = results[0].sum(), np.zeros((case.rows, case.hidden))
    for each in results[1:]:
        total = total + each.sum()
    total.backward()
    for each in above:
        grad += each.sum(0)
    grad = (grad + factors * case.scaled) * (x @ weight.T > 0)
    assert_equal(leaves[0].grad, grad @ weight, "gradient of x")
    assert_equal(leaves[1].grad, grad.T @ x, "gradient of the weight")


class Batch(NamedTuple):
    """A batch of products: what lies before the matrices of each factor."""

    product: Case
    before: tuple[tuple[int, ...], tuple[int, ...]]


#: Equal, of one factor alone, and broadcast both ways.
_BEFORE = (((2, 3), (2, 3)), ((3,), ()), ((), (2,)), ((2, 1), (1, 3)), ((2, 3), (3,)), ((1,), (4,)))


def draw_batch(rng: np.random.Generator, longest: int, number: int) -> Batch:
    """Draw a batch of small products; each broadcasting in turn, and each factor lying either way round."""
    rows, columns, depth = (int(n) for n in rng.integers(1, longest, 3))
    turned = number % 2 > 0, number // 2 % 2 > 0
    return Batch(
        Case(rows, columns, depth, turned, False, False, int(rng.integers(1 << 30))), _BEFORE[number % len(_BEFORE)]
    )


def check_batch(device: Device, case: Batch) -> None:
    """Compare the products of a batch, and both gradients."""
    rows, columns, depth, turned, *_, seed = case.product
    shapes = (*case.before[0], rows, depth), (*case.before[1], depth, columns)
    hosts = [whole_numbers(seed + number, *shape) for number, shape in enumerate(shapes)]
    a, b = (
        leaf(device, np.ascontiguousarray(host.swapaxes(-1, -2)) if is_turned else host)
        for host, is_turned in zip(hosts, turned, strict=True)
    )
    product = F.matmul(a, b, transpose_a=turned[0], transpose_b=turned[1])
    left, right = (host.astype(np.float64) for host in hosts)
    assert_equal(product, left @ right, "products")
    grad = whole_numbers(seed + 2, *product.shape)
    product.backward(leaf(device, grad, False))
    wholes = grad @ right.swapaxes(-1, -2), left.swapaxes(-1, -2) @ grad
    for x, host, whole, is_turned in zip((a, b), hosts, wholes, turned, strict=True):
        lead = whole.ndim - host.ndim
        repeated = [d for d in range(whole.ndim - 2) if d < lead or host.shape[d - lead] < whole.shape[d]]
        expected = whole.sum(tuple(repeated)).reshape(host.shape)
        assert_equal(x.grad, expected.swapaxes(-1, -2) if is_turned else expected, "gradient")


BATCH = Family("batch of products", drawn(draw_batch), check_batch)
CHAIN = Family("layers after ReLU", drawn(draw_chain), check_chain)
PRODUCT = Family("product", drawn(draw), check)
PLAIN_PRODUCT = Family("plain product", drawn(draw), check_plain)
LINEAR = Family("linear layer", drawn(draw), check_layer)
