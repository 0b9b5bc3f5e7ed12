"""Operations on tensors without elements: results and gradients as PyTorch's, or one line that refuses."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Linear, Tensor
from clcomm.engine import functional as F
from tests.engine.test_gradients_of_gradients import _Functions

SHAPES = {"w": (5, 4), "b": (5,), "z": (5, 0), "k": (3, 2, 3, 3), "c": (3,), "r": (3, 2, 3), "t": (2, 3, 3, 3),
          "v": (4,), "m": (4,)}  # fmt: skip
#: Expressions in both libraries' words, with the shape of x.
EXPRESSIONS = (
    ("F.sort(x, 0)[0]", (0, 3)), ("F.sort(x, 1)[0]", (3, 0)), ("F.argsort(x, -1)", (0, 3)),
    ("F.softmax(x, -1)", (0, 3)),
    ("F.softmax(x, 0)", (0, 3)), ("F.softmax(x, -1)", (3, 0)), ("F.log_softmax(x, -1)", (0, 3)),
    ("F.log_softmax(x, 1)", (3, 0)), ("F.logsumexp(x, -1)", (0, 3)), ("F.linear(x, w, b)", (0, 4)),
    ("F.linear(x, w, b)", (2, 0, 4)), ("F.linear(x, w)", (0, 4)), ("F.linear(x, z)", (2, 0)),
    ("F.linear(x, z)", (2, 3, 0)), ("F.relu(F.linear(x, w, b))", (0, 4)), ("F.matmul(x, w.transpose(0, 1))", (0, 4)),
    ("F.matmul(x, z.transpose(0, 1))", (2, 0)), ("F.matmul(x, x.transpose(1, 2))", (0, 2, 4)),
    ("F.matmul(x, x.transpose(1, 2))", (2, 3, 0)), ("F.matmul(x, v)", (0, 4)), ("F.einsum('ij,kj->ik', x, w)", (0, 4)),
    ("F.conv2d(x, k, None, 1, 1)", (0, 2, 5, 5)), ("F.conv2d(x, k, c, 2)", (0, 2, 5, 5)),
    ("F.conv1d(x, r, c)", (0, 2, 5)), ("F.conv_transpose2d(x, t, c)", (0, 2, 5, 5)),
    ("F.layer_norm(x, (4,), v, v)", (0, 4)), ("F.batch_norm(x, m, m * m, v, v, False)", (0, 4, 3, 3)),
    ("F.group_norm(x, 2, v, v)", (0, 4, 3, 3)), ("F.max_pool2d(x, 2)", (0, 4, 4, 4)),
    ("F.avg_pool2d(x, 2)", (0, 4, 4, 4)), ("F.adaptive_avg_pool2d(x, 1)", (0, 4, 4, 4)), ("F.cumsum(x, 1)", (3, 0)),
    ("F.normalize(x)", (0, 3)), ("F.tril(x)", (0, 3)), ("F.gelu(x) * x", (0, 3)),
)  # fmt: skip
#: What has no clear result, or none yet.
REFUSED = (
    ("F.conv2d(x, k)", (1, 2, 0, 5)), ("x.max(0)", (0, 3)), ("F.linear(x, z, b)", (2, 0)),
    ("F.logsumexp(x, -1)", (3, 0)),
    ("F.mse_loss(x, x)", (0, 3)), ("F.cross_entropy(x, x.argmax(1))", (0, 3)),
    ("F.batch_norm(x, m, m * m, v, v, True)", (0, 4, 3, 3)), ("F.scaled_dot_product_attention(x, x, x)", (0, 2, 3, 4)),
)  # fmt: skip


def result_and_gradients(text, shape, functions, make):
    rng = np.random.default_rng(1)
    tensors = {name: make(rng.standard_normal(size).astype(np.float32)) for name, size in SHAPES.items()}
    tensors["x"] = make(np.zeros(shape, np.float32))
    for name, each in tensors.items():
        each.requires_grad = name != "m"
    y = eval(text, {"F": functions, **tensors})
    if y.requires_grad:
        y.sum().backward()
    return [y.detach().numpy(), *(None if t.grad is None else t.grad.numpy() for t in tensors.values())]


@pytest.mark.parametrize(("text", "shape"), EXPRESSIONS)
def test_results_and_gradients_are_pytorchs(text, shape):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    ours = result_and_gradients(text, shape, F, Tensor)
    theirs = result_and_gradients(text, shape, _Functions(torch), torch.tensor)
    for own, expected in zip(ours, theirs, strict=True):
        assert (own is None) == (expected is None)
        if own is not None:
            assert own.shape == expected.shape
            np.testing.assert_array_equal(own, expected)


@pytest.mark.parametrize(("text", "shape"), REFUSED)
def test_others_are_refused_in_one_line(text, shape):
    with pytest.raises(ArgumentError) as refused:
        result_and_gradients(text, shape, F, Tensor)
    assert "\n" not in str(refused.value)


def test_a_layer_s_flat_gradients_are_zeros(device):
    layer = Linear(4, 5, device=device)
    layer.flat_space()
    layer(Tensor(np.ones((2, 4), np.float32), device)).sum().backward()
    before = layer.weight.grad.numpy()
    layer(Tensor(np.zeros((0, 4), np.float32), device)).sum().backward()
    np.testing.assert_array_equal(layer.weight.grad.numpy(), before)
    layer.zero_grad()
    layer(Tensor(np.zeros((0, 4), np.float32), device)).sum().backward()
    assert not layer.weight.grad.numpy().any() and not layer.bias.grad.numpy().any()
