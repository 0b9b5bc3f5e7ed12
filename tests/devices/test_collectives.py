"""Collectives over tensors on several devices: the values of NumPy in the devices' order, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.base.errors import ArgumentError
from clcomm.engine import Tensor
from clcomm.parallel.devices import (
    all_reduce,
    all_reduce_p2p,
    broadcast,
    broadcast_params,
    gather,
    replicate_params,
    scatter,
    sync_grads,
)
from tests.devices.several import Network, bits, queues
from tests.helpers import one_line

FOLDS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}
SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)


def expected_of(values, op):
    total = values[0]
    for each in values[1:]:
        total = FOLDS[op](total, each)
    return total / np.float32(len(values)) if op == "mean" else total


def drawn(count, shape, seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(shape) * 9).astype(dtype) for _ in range(count)]


@given(
    count=st.integers(1, 4), shape=SHAPES, seed=st.integers(0, 99), kind=st.sampled_from(["cpu", "gpu", "mixed"]),
    op=st.sampled_from(sorted(FOLDS)), is_integer=st.booleans(),
    way=st.sampled_from(["plain", "overlap", "p2p", "one"]),
)  # fmt: skip
def test_all_reduce(count, shape, seed, kind, op, is_integer, way):
    if is_integer and op == "mean":
        op = "sum"
    values = drawn(count, shape, seed, np.int32 if is_integer else np.float32)
    devices = queues(1, "cpu") * count if way == "one" else queues(count, kind)
    tensors = [Tensor(value, device) for value, device in zip(values, devices, strict=True)]
    if way in ("p2p", "one"):
        returned = all_reduce_p2p(tensors, op)
    else:
        returned = all_reduce(tensors, op, overlap=way == "overlap")
    assert all(a is b for a, b in zip(returned, tensors, strict=True))
    expected = expected_of(values, op)
    for tensor in tensors:
        assert tensor.dtype == expected.dtype and tensor.numpy().tobytes() == expected.tobytes()


@given(count=st.integers(1, 4), shape=SHAPES, root=st.integers(0, 3), kind=st.sampled_from(["cpu", "mixed"]))
def test_broadcast(count, shape, root, kind):
    root %= count
    values = drawn(count, shape, 1)
    tensors = [Tensor(value, device) for value, device in zip(values, queues(count, kind), strict=True)]
    broadcast(tensors, root)
    assert all((tensor.numpy() == values[root]).all() for tensor in tensors)


@given(count=st.integers(1, 4), extra=st.integers(0, 5), columns=st.integers(1, 3))
def test_scatter_and_gather(count, extra, columns):
    (values,) = drawn(1, (count + extra, columns), 2)
    source = Tensor(values, queues(1)[0])
    arrays, tensors = scatter(source, count), scatter(source, queues(count))
    for array, tensor, expected in zip(arrays, tensors, np.array_split(values, count), strict=True):
        assert (array == expected).all() and (tensor.numpy() == expected).all()
    assert (gather(tensors) == values).all()


@pytest.mark.parametrize("samples", [None, [2, 0, 5]])
@pytest.mark.parametrize("missing", [set(), {0}, {0, 1, 2}])
def test_gradients_are_averaged_and_missing_on_all_devices_stay_so(samples, missing):
    devices = queues(3, "mixed")
    replicas = replicate_params(Network(devices[0]), devices)
    shapes = [parameter.shape for parameter in replicas[0]]
    values = [[each.astype(np.float64) for each in drawn(len(shapes), shapes[0], seed)] for seed in range(3)]
    for number, params in enumerate(replicas):
        for index, parameter in enumerate(params):
            values[number][index] = np.resize(values[number][index], parameter.shape)
            if index == 2 and number in missing:
                values[number][index] *= 0
            else:
                parameter.grad = Tensor(values[number][index], devices[number])
    sync_grads(replicas, samples)
    weights = np.ones(3) / 3 if samples is None else np.array(samples) / sum(samples)
    for index, parameter in enumerate(replicas[0]):
        if index == 2 and len(missing) == 3:
            assert all(params[index].grad is None for params in replicas)
            continue
        expected = sum(weight * own[index] for weight, own in zip(weights, values, strict=True))
        np.testing.assert_allclose(parameter.grad.numpy(), expected, rtol=1e-6, atol=1e-6)
        assert len({params[index].grad.numpy().tobytes() for params in replicas}) == 1


def test_parameters_are_broadcast_to_groups():
    devices = queues(3)
    groups = replicate_params(Network(devices[0]), devices)
    groups[1][2].copy_from(np.full(groups[1][2].shape, 7.0))
    broadcast_params(None, groups, root=1)
    assert all(bits(group) == bits(groups[1]) for group in groups)
    source = list(Network(devices[0], seed=4).parameters())
    broadcast_params(source, groups)
    assert all(bits(group) == bits(source) for group in groups)


def test_errors_are_one_line():
    one, two = queues(2)
    tensors = [Tensor(np.zeros((2, 3)), one), Tensor(np.zeros((3, 2)), two)]
    integers = [Tensor(np.zeros(2, int), one), Tensor(np.zeros(2), two)]
    other_shape = "expected float32 of shape (2, 3) as tensors[0], got float32 of shape (3, 2)"
    other_dtype = "expected int32 of shape (2,) as tensors[0], got float32 of shape (2,)"
    cases = [
        (all_reduce, (tensors,), f"tensors[1]: {other_shape}"),
        (all_reduce_p2p, (integers,), f"tensors[1]: {other_dtype}"),
        (all_reduce, (tensors[:1], "median"), "op: expected one of sum, mean, min, max, prod, got 'median'"),
        (all_reduce, (integers[:1], "mean"), "op: expected one of sum, min, max, prod for int32 tensors, got 'mean'"),
        (all_reduce, (tensors[0],), "tensors: expected a list of Tensors, got Tensor"),
        (all_reduce, ([np.zeros(2)],), "tensors: expected a list of Tensors, got ['ndarray']"),
        (broadcast, (tensors[:1], 1), "root: expected 0 to 0, the index of a tensor, got 1"),
        (scatter, (tensors[0], 3), "chunks: expected 1 to 2, the first dimension of (2, 3), got 3"),
        (gather, (tensors,), "tensors[1]: expected float32 of shape [n, 3] as tensors[0], got float32 of shape (3, 2)"),
        (gather, ([],), "tensors: expected at least one, of one dimension or more"),
    ]  # fmt: skip
    for function, arguments, message in cases:
        with pytest.raises(ArgumentError) as caught:
            function(*arguments)
        assert one_line(caught) == message
    groups = replicate_params(Network(one), [one, two])
    with pytest.raises(ArgumentError) as caught:
        broadcast_params(groups[0][:2], groups)
    assert one_line(caught) == "dst_param_groups[0]: expected 2 parameters as the source has, got 6"
    assert all_reduce([]) == []
