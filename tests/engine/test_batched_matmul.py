"""Batches of matrix products against float64 NumPy, PyTorch, and single products."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.base.errors import ClcommError
from clcomm.engine import Linear, Tensor
from clcomm.engine import functional as F
from clcomm.engine.device import Device
from clcomm.engine.ops import batched_matmul
from clcomm.engine.ops.matmul import multiply
from clcomm.engine.tensor import empty
from tests.engine.values import drawn


@given(shapes=st.sampled_from([((5,), (5,)), ((5,), (5, 3)), ((4, 5), (5,)), ((5,), (2, 5, 3)), ((2, 4, 5), (5,))]))
def test_vectors_agree_with_numpy(check_op, shapes):
    check_op(F.matmul, np.matmul, *(drawn(seed, *shape) for seed, shape in enumerate(shapes)))


@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
def test_each_product_has_the_bits_of_a_single_one_on_any_number_of_cores(
    device: Device, turned, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = drawn(1, 3, *((70, 21) if turned[0] else (21, 70))), drawn(2, 3, *((37, 70) if turned[1] else (70, 37)))
    kinds = {"transpose_a": turned[0], "transpose_b": turned[1]}
    for units in (device.compute_units, 1, 16):
        monkeypatch.setattr(device, "compute_units", units)
        whole = F.matmul(Tensor(a, device), Tensor(b, device), **kinds).numpy()
        for number in range(3):
            alone = empty(device, (21, 37))
            multiply(Tensor(a[number], device), Tensor(b[number], device), alone, **kinds)
            assert alone.numpy().tobytes() == whole[number].tobytes()


def test_one_matrix_for_a_whole_batch_is_one_product(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched_matmul, "multiply_batch", None)
    a, b = Tensor(drawn(1, 2, 3, 4, 5), device, requires_grad=True), Tensor(drawn(2, 5, 6), device, requires_grad=True)
    F.matmul(a, b).backward(1.0)
    assert a.grad.shape == a.shape and b.grad.shape == b.shape


@pytest.mark.parametrize("shape", [(7,), (2, 7), (2, 3, 7), (2, 1, 3, 7)])
def test_a_linear_layer_takes_any_dimensions_before_the_last(device: Device, shape) -> None:
    layer, host = Linear(7, 5, device=device), drawn(1, *shape)
    x = Tensor(host, device, requires_grad=True)
    y = layer(x)
    expected = host @ layer.weight.numpy().T + layer.bias.numpy()
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-5, atol=1e-5)
    y.backward(1.0)
    np.testing.assert_allclose(
        x.grad.numpy(), np.broadcast_to(layer.weight.numpy().sum(0), shape), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("name", ["mm", "bmm", "mv", "addmm", "addmv", "baddbmm"])
def test_drawn_shapes_are_taken_or_refused_as_by_pytorch(torch, name):
    rng, taken = np.random.default_rng(list(name.encode())), 0

    def result_of(function, factors):
        try:
            return function(*factors).numpy()
        except (RuntimeError, IndexError, ClcommError):
            return None

    for _ in range(200):
        # Without rows, PyTorch's addmv has the shape of what it adds to.
        batch, rows, depth, columns = rng.integers(name == "addmv", 4, 4)
        shapes = [(batch, rows, depth), (batch, depth, columns)]
        first, second = rng.choice([[2, 2], [3, 3], [2, 1], [3, 2], [1, 2]], p=[0.35, 0.35, 0.2, 0.05, 0.05])
        shapes = [shapes[0][3 - first :], shapes[1][3 - second :] if second > 1 else (depth,)]
        if rng.random() < 0.2:
            shapes[rng.integers(2)] = tuple(rng.integers(0, 4, rng.integers(1, 4)))
        if name.startswith(("add", "badd")):
            wide = rng.choice((1, 2), 3) * [batch, rows, columns]
            shapes.insert(0, tuple(rng.choice([[batch, rows, columns], [1, rows, 1], wide]))[rng.integers(4) :])
        hosts = [rng.integers(-3, 4, shape).astype(np.float32) for shape in shapes]
        ours, theirs = (
            result_of(getattr(F, name), map(Tensor, hosts)),
            result_of(getattr(torch, name), map(torch.tensor, hosts)),
        )
        assert (ours is None) == (theirs is None), shapes
        if ours is not None:
            taken += 1
            np.testing.assert_array_equal(ours, theirs, strict=True)
    assert 10 < taken < 190
