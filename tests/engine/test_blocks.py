"""Indexing, concat, stack, split and pad against NumPy, with their gradients."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, basic_indices

from clcomm.base.errors import ArgumentError
from clcomm.engine import Tensor
from clcomm.engine import functional as F

SHAPES = array_shapes(min_dims=1, max_dims=5, max_side=7)


def values(shape, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_same_bits(result: Tensor, expected: np.ndarray) -> None:
    assert result.shape == expected.shape and np.array_equal(result.numpy(), expected)


@given(data=st.data(), shape=SHAPES)
def test_a_part_and_its_gradient_as_numpy(device, data, shape):
    index = data.draw(basic_indices(shape, allow_newaxis=True, allow_ellipsis=True))
    host, expected = values(shape), values(shape)[index]
    x = Tensor(host, device, requires_grad=True)
    part = x[index]
    assert_same_bits(part, np.asarray(expected))
    upstream, gradient = values(part.shape, 1), np.zeros_like(host)
    part.backward(Tensor(upstream, device))
    gradient[index] = upstream
    assert_same_bits(x.grad, gradient)


@given(data=st.data(), shape=array_shapes(min_dims=0, max_dims=3, max_side=5), count=st.integers(1, 4))
def test_stack_as_numpy(device, data, shape, count):
    axis = data.draw(st.integers(-len(shape) - 1, len(shape)))
    hosts = [values(shape, number) for number in range(count)]
    inputs = [Tensor(host, device, requires_grad=True) for host in hosts]
    stacked = F.stack(inputs, axis)
    assert_same_bits(stacked, np.stack(hosts, axis))
    upstream = values(stacked.shape, 9)
    stacked.backward(Tensor(upstream, device))
    for number, x in enumerate(inputs):
        assert_same_bits(x.grad, np.asarray(upstream.take(number, axis)))


def test_uneven_parts_of_one_size(device):
    x = Tensor(values((7, 2)), device)
    assert [part.shape for part in F.split(x, 3)] == [(3, 2), (3, 2), (1, 2)]


def test_iterating_yields_rows(device):
    host = values((3, 2))
    assert [row.numpy().tolist() for row in Tensor(host, device)] == host.tolist()


def test_one_input_twice(device):
    x = Tensor(values((2, 3)), device, requires_grad=True)
    F.concat([x, x, x]).sum().backward()
    assert (x.grad.numpy() == 3).all()


REFUSALS = {
    "index: expected -2 to 1 in dimension 0, got 2": lambda x: x[2],
    "index: expected at most 2 for a tensor of shape (2, 3), got 3": lambda x: x[0, 0, 0],
    "index: expected at most one ..., got several": lambda x: x[..., 0, ...],
    "index: expected a whole number, a slice, ... or None, got float": lambda x: x[0.5],
    "index: expected a whole number, a slice, ... or None, got bool": lambda x: x[True],
    "index: dimension 0: slice step cannot be zero": lambda x: x[::0],
    "concat: expected at least one tensor, got none": lambda x: F.concat([]),
    "concat: axis 2 does not fit a tensor of shape (2, 3)": lambda x: F.concat([x], 2),
    "concat: shapes (2, 3) and (3, 2) do not fit along axis 0": lambda x: F.concat([x, x.T]),
    "stack: expected one shape, got [(2, 3), (3, 2)]": lambda x: F.stack([x, x.T]),
    "stack: axis 3 does not fit a tensor of shape (2, 3, 1)": lambda x: F.stack([x], 3),
    "split: expected sizes from 0 up whose sum is 2, got [1]": lambda x: F.split(x, [1]),
    "split: expected sizes from 0 up whose sum is 2, got [3, -1]": lambda x: F.split(x, [3, -1]),
    "split: expected a size of at least 1, got 0": lambda x: F.split(x, 0),
    "split: axis 2 does not fit a tensor of shape (2, 3)": lambda x: F.split(x, 1, 2),
    "pad: expected 2 pairs (before, after) from 0 up, got [(1, -1), (0, 0)]": lambda x: F.pad(x, [(1, -1), (0, 0)]),
    "pad: expected 2 pairs (before, after) from 0 up, got [(1, 1)]": lambda x: F.pad(x, [(1, 1)]),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_refusals(device, message):
    with pytest.raises(ArgumentError) as error:
        REFUSALS[message](Tensor(values((2, 3)), device))
    assert str(error.value) == message
