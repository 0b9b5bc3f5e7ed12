"""`grad`: gradients as results, and gradients of gradients, against PyTorch's and known functions."""

from __future__ import annotations

import re

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer
from clcomm.base.errors import ArgumentError
from clcomm.engine import Linear, ReLU, Sequential, Tensor, nn, no_grad
from clcomm.engine import functional as F
from clcomm.engine.gradients import grad
from clcomm.engine.nn.init import Generator
from clcomm.engine.nn.utils import rnn
from clcomm.engine.recomputation import checkpoint
from clcomm.optim import SGD
from tests.engine.test_recurrent import made
from tests.sharded_jobs import cpu

SHAPES = {"x": (3, 4), "y": (3, 4), "v": (4,), "w": (5, 4), "b": (5,), "s": (2, 4, 5), "t": (2, 3, 4),
          "i": (2, 4, 6, 7), "k": (6, 2, 3, 3), "q": (4, 3, 3, 3)}  # fmt: skip
#: Expressions in both libraries' words, each with another rule.
EXPRESSIONS = (
    "x * y", "x * v", "x / (y * y + 1)", "x - v", "2.0 / (x * x + 1)", "(x * 3 + 1) ** 2", "F.linear(x, w, b)",
    "F.matmul(x, w.transpose(0, 1))", "F.matmul(t, s)", "F.matmul(x, s)", "F.relu(x) * y", "F.leaky_relu(x, 0.2) * y",
    "F.sigmoid(x)", "F.tanh(x)", "F.silu(x)", "F.gelu(x)", "F.gelu(x, approximate='tanh')", "F.exp(x)",
    "F.log(x * x + 1)", "F.sqrt(x * x + 1)", "F.rsqrt(x * x + 1)", "F.abs(x) * y", "F.sin(x)", "F.cos(x)", "F.erf(x)",
    "F.pow(x, 3)", "F.pow(x * x + 1, 1.5)", "F.logsigmoid(x)", "F.clamp(x, -0.5, 0.5) * y", "F.hardtanh(x) * y",
    "F.maximum(x, y) * v", "F.minimum(x, y) * v", "F.softmax(x, -1)", "F.log_softmax(x, -1)", "F.softmax(x, 0)",
    "F.logsumexp(x, -1)", "x.norm(2, 1)", "x.norm()", "x[1:, ::2] * y[1:, ::2]", "x[0] * v", "x.reshape(4, 3) ** 2",
    "F.stack([x, y * y]) * v", "x.mean(1) ** 2", "x.sum() ** 2", "x.var(1)", "F.where(x > 0, x * x, y * x)",
    "x.masked_fill(x > 0, 0.0) * y", "F.layer_norm(x, (4,), v, v)", "F.mse_loss(x, y)",
    "F.mse_loss(x, y, reduction='none')", "F.pad(x, (1, 2)) ** 2", "F.tril(x) * y", "x.roll(1, 1) * y",
    "F.expm1(x)", "F.atan(x)", "F.asin(x * 0.2)", "F.acos(x * 0.2)", "(x * x + 1) ** y", "F.atan2(x, y + 3.0)",
    "F.cumsum(x, 1) ** 2",
    "F.cumprod(x, 1)", "F.diag(v) * y[:1]", "F.pairwise_distance(x, y)", "F.tensordot(x, w, ([1], [1])) ** 2",
    "F.conv2d(i, k, None, 2, 1, 1, 2)", "F.conv2d(i, q.transpose(0, 1), None, 1, 1, 2)",
    "F.conv_transpose2d(i, q, None, 2, 1, 1)", "F.avg_pool2d(i, 2) ** 2", "F.adaptive_avg_pool2d(i, (2, 3)) ** 2",
    "F.batch_norm(i, None, None, v, v, True)", "F.batch_norm(i, m, m * m + 1, v, v, False)", "F.normalize(x)",
    "F.group_norm(i, 2, v, v)", "x.gather(1, c.view(-1, 1)) * v",
    "F.pad(i, (1, 2, 2, 1), mode='reflect') ** 2", "x.index_select(0, c - 1) * y",
    "x.scatter_add(0, (c - 1).view(1, -1), y[:1, :3]) ** 2",
    "F.max_pool2d(i, 2) ** 2", "F.max_pool2d(i, 3, 2, 1, 1, True) ** 2", "F.max_pool1d(s, 2) ** 2",
    "F.max_pool3d(i.unsqueeze(0), 2) ** 2", "F.adaptive_max_pool2d(i, (2, 3)) ** 2", "F.adaptive_max_pool1d(s, 2) ** 2",
    "F.embedding(c - 1, x) ** 2", "F.embedding((c - 1).view(1, -1), x, padding_idx=1) ** 2",
    "F.binary_cross_entropy(F.sigmoid(x), p)", "F.binary_cross_entropy_with_logits(x, p)",
    "F.binary_cross_entropy_with_logits(x, p, reduction='none', weight=m, pos_weight=p[0])",
    "F.smooth_l1_loss(x, y, beta=0.5)", "F.huber_loss(x, y, reduction='none', delta=0.7)", "F.l1_loss(x, y) * v",
    "F.elu(x, 0.7)", "F.selu(x)", "F.celu(x, 0.7)", "F.softplus(x)", "F.softplus(x, 2.0, 1.0)", "F.mish(x)",
    "F.hardswish(x * 3)", "F.hardshrink(x) * y", "F.softshrink(x) * y",
    "F.threshold(x, 0.1, 0.2) * y", "F.relu6(x) * y", "F.log1p(x * x)", "F.remainder(x, 0.7) * y", "F.hypot(x, y)",
    "F.remainder(x, v) * y", "F.xlogy(y, x * x + 1)",
    "F.cosine_similarity(x, y)", "F.cross_entropy(x, c)", "F.cross_entropy(x, c, reduction='none')",
)  # fmt: skip


class _Functions:
    """PyTorch's functions of both of its modules."""

    def __init__(self, torch):
        self._torch = torch

    def __getattr__(self, name):
        found = getattr(self._torch.nn.functional, name, None)
        return getattr(self._torch, name) if found is None else found


def both_gradients(text, functions, make, gradients_of):
    """Return the gradients of an expression, and those of the sum of their weighted squares."""
    rng = np.random.default_rng(7)
    tensors = {name: make(rng.standard_normal(shape).astype(np.float32)) for name, shape in SHAPES.items()}
    for each in tensors.values():
        each.requires_grad = True
    names = [name for name in tensors if re.search(rf"\b{name}\b", text)]
    constants = {"m": make(np.linspace(-1, 1, 4, dtype=np.float32)), "c": make(np.array([2, 1, 3])),
                 "p": make(np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4))}  # fmt: skip
    result = eval(text, {"F": functions, **constants, **tensors})
    seed = make(rng.standard_normal(tuple(result.shape)).astype(np.float32))
    seed.requires_grad = True
    first = gradients_of(result, [tensors[name] for name in names], seed, create_graph=True)
    total = sum((each * each * make(rng.standard_normal(tuple(each.shape)).astype(np.float32))).sum() for each in first)
    total.backward()
    second = [tensors[name].grad for name in names] + [seed.grad]
    return [None if each is None else each.detach().numpy() for each in (*first, *second)]


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_gradients_of_gradients_are_pytorchs(text):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    ours = both_gradients(text, F, Tensor, grad)
    theirs = both_gradients(text, _Functions(torch), torch.tensor, torch.autograd.grad)
    for own, expected in zip(ours, theirs, strict=True):
        expected = np.zeros(1) if expected is None else expected
        scale = max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose((np.zeros(1) if own is None else own) / scale, expected / scale, atol=2e-4)


@pytest.mark.parametrize("lengths", [None, [3, 5, 1]], ids=["all steps", "packed"])
@pytest.mark.parametrize("kind", ["RNN", "RNN relu", "LSTM", "GRU"])
def test_recurrent_layers_have_gradients_of_gradients(device, kind, lengths):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    rng = np.random.default_rng(3)
    ours, theirs = made(torch, device, kind, 3, 4, num_layers=2, bidirectional=True)
    values = [rng.standard_normal(shape).astype(np.float32) for shape in ((5, 3, 3), (4, 3, 4), (4, 3, 4))]
    found = []
    for layer, make, gradients_of, utils in (
        (ours, lambda v: Tensor(v, device, requires_grad=True), grad, rnn),
        (theirs, lambda v: torch.tensor(v, requires_grad=True), torch.autograd.grad, torch.nn.utils.rnn),
    ):
        x, *states = (make(v) for v in values[: 3 if kind == "LSTM" else 2])
        given = x if lengths is None else utils.pack_padded_sequence(x, lengths, enforce_sorted=False)
        y, last = layer(given, tuple(states) if kind == "LSTM" else states[0])
        y = y if lengths is None else utils.pad_packed_sequence(y)[0]
        loss = (y * y).sum() + sum((each * each).sum() for each in (last if kind == "LSTM" else (last,)))
        weights = [p for _, p in sorted(layer.named_parameters())]
        first = gradients_of(loss, [x, *states, *weights], create_graph=True)
        sum((each * each).sum() for each in first).backward()
        found.append([each.detach().numpy() for each in (*first, *(v.grad for v in (x, *states, *weights)))])
    for own, expected in zip(*found, strict=True):
        scale = max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(own / scale, expected / scale, atol=1e-4)


def test_fused_pooling_has_gradients_of_gradients(device):
    rng = np.random.default_rng(5)
    values = [rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3, 8, 16), (4, 3, 3, 3), (4,))]
    found = []
    for fused in (True, False):
        x, k, b = (Tensor(v, device, requires_grad=True) for v in values)
        y = F.conv_relu_pool(x, k, b, 1) if fused else F.max_pool2d(F.relu(F.conv2d(x, k, b, 1, 1)), 2)
        (slope,) = grad((y * y).sum(), x, create_graph=True)
        (slope * slope).sum().backward()
        found.append([each.numpy() for each in (slope, x.grad, k.grad, b.grad)])
    for own, expected in zip(*found, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_inputs_that_were_overwritten_are_refused_or_not_read(device):
    """Where the operation's own gradient has its result, or a copy of the input, it stays right."""
    x, y = (Tensor([0.5, -2.0], device, requires_grad=True) for _ in range(2))
    h = F.leaky_relu(F.relu(x * 3.0 + 1.0, inplace=True), 0.1) * y
    (first,) = grad(h.sum(), x, create_graph=True)
    (second,) = grad(first.sum(), y)
    assert first.numpy().tolist() == [1.5, 0.0] and second.numpy().tolist() == [3.0, 0.0]
    product = x * 1.0
    product *= y
    (plain,) = grad(product.sum(), y, retain_graph=True)
    assert plain.numpy().tolist() == [0.5, -2.0]
    with pytest.raises(ArgumentError, match="Mul had an input of shape"):
        grad(product.sum(), y, create_graph=True)
    bent = F.tanh(x)
    with no_grad():
        x.mul_(2.0)
    with pytest.raises(ArgumentError, match="Tanh had an input of shape"):
        grad(bent.sum(), x, create_graph=True)


def test_dropout_keeps_its_draw(device):
    x = Tensor(np.ones(200, np.float32), device, requires_grad=True)
    y = F.dropout(x * x, 0.5)
    (first,) = grad(y.sum(), x, create_graph=True)
    (second,) = grad(first.sum(), x)
    np.testing.assert_array_equal(first.numpy(), 2 * y.numpy())
    np.testing.assert_array_equal(second.numpy(), 2 * y.numpy())
    assert 0 < np.count_nonzero(y.numpy()) < 200


def test_third_derivatives(device):
    x = Tensor([0.5, -2.0], device, requires_grad=True)
    (first,) = grad((x * x * x * x).sum(), x, create_graph=True)
    (second,) = grad(first.sum(), x, create_graph=True)
    (third,) = grad(second.sum(), x)
    np.testing.assert_allclose(second.numpy(), 12 * np.array([0.25, 4.0]), rtol=1e-6)
    np.testing.assert_allclose(third.numpy(), 24 * np.array([0.5, -2.0]), rtol=1e-6)
    assert x.grad is None and not third.requires_grad


@pytest.mark.parametrize("name", [
    "tanh", "sigmoid", "gelu", "silu", "mish", "softplus", "elu", "exp", "log", "rsqrt", "sin", "erf", "atan",
    "asin", "expm1", "log1p", "logsigmoid", "celu", "hardswish",
])  # fmt: skip
def test_derivatives_of_functions_are_pytorchs_up_to_the_fourth(torch, name):
    values, found = np.linspace(0.1, 0.9, 9, dtype=np.float32), []
    for functions, make, gradients_of in ((F, Tensor, grad), (_Functions(torch), torch.tensor, torch.autograd.grad)):
        x = make(values)
        x.requires_grad = True
        y = getattr(functions, name)(x * 1.0)
        for _ in range(4):
            (y,) = gradients_of((y * y).sum(), x, create_graph=True)
            y = y * 0.1
        found.append(y.detach().numpy())
    np.testing.assert_allclose(*found, rtol=2e-3, atol=2e-4 * np.abs(found[1]).max())


def test_gradients_without_a_graph_are_those_of_backward(device):
    first, last = Linear(4, 6, device=device), Linear(6, 2, device=device)
    model = Sequential(first, ReLU(), nn.BatchNorm1d(6, device=device), last)
    model.flat_space()
    x = Tensor(np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32), device, requires_grad=True)
    parameters = list(model.parameters())
    hidden = model[1](model[0](x))
    loss = (model[3](model[2](hidden)) ** 2).mean()
    of_hidden, *found = grad(loss, [hidden, x, *parameters], retain_graph=True)
    assert all(each.grad is None for each in (x, *parameters)) and of_hidden.shape == hidden.shape
    with no_grad():
        (alone,) = grad(loss, hidden, retain_graph=True)
    loss.backward()
    for own, each in zip(found, (x, *parameters), strict=True):
        np.testing.assert_array_equal(own.numpy(), each.grad.numpy())
    np.testing.assert_array_equal(alone.numpy(), of_hidden.numpy())
    with pytest.raises(ArgumentError, match="released its tensors"):
        grad(loss, x)


def test_unused_inputs_hooks_and_mistakes(device):
    x, unused = Tensor([1.0, 2.0], device, requires_grad=True), Tensor([1.0], device, requires_grad=True)
    y = x * 3.0
    y.register_hook(lambda g: g * 2.0)
    x.register_hook(lambda g: g * 5.0)
    assert grad(y.sum(), [x, unused], retain_graph=True, allow_unused=True)[1] is None
    doubled, zeros = grad(y.sum(), [x, unused], retain_graph=True, materialize_grads=True)
    assert doubled.numpy().tolist() == [30.0, 30.0] and zeros.numpy().tolist() == [0.0]
    both = grad([y, y.sum()], x, [Tensor([1.0, 2.0], device), None], retain_graph=True)
    assert both[0].numpy().tolist() == [60.0, 90.0]
    for given, message in (
        (lambda: grad(y.sum(), unused), r"inputs\[0\]: no output depends on it"),
        (lambda: grad(y, x), "needs gradient=; only one element does not"),
        (lambda: grad(y, x, Tensor([1.0], device)), "expected a gradient of shape"),
        (lambda: grad(y.sum(), x, [None, None]), "grad_outputs: expected 1"),
        (lambda: grad(y.sum(), []), "inputs: expected a Tensor or several"),
        (lambda: grad(y.sum().detach(), x), r"outputs\[0\]: expected a tensor that needs a gradient"),
        (lambda: grad(y.sum(), x.detach()), r"inputs\[0\]: expected a tensor that needs a gradient"),
        (lambda: grad(F.prod(y), x, create_graph=True), "whose gradients have gradients, got Product"),
        (lambda: grad(checkpoint(lambda a: a * 2.0, y).sum(), x), r"expected a result without checkpoint\(\)"),
    ):
        with pytest.raises(ArgumentError, match=message):
            given()


def penalised(model, optimizer, sync, batches, parts):
    """Take steps of a critic whose gradient's length is to be 1 (Gulrajani et al., 2017); return its parameters."""
    for batch in batches:
        optimizer.zero_grad()
        for part in batch:
            x = Tensor(part, cpu(), requires_grad=True)
            (slope,) = grad(model(x).sum(), x, create_graph=True)
            loss = model(x).mean() + 10.0 * ((slope.norm(2, dim=1) - 1.0) ** 2).mean()
            loss.backward(1.0 / parts)
        if sync is not None:
            sync.sync_gradients(model)
        optimizer.step()
    return [each.numpy() for each in model.parameters()]


@pytest.mark.mpi(min_size=1)
def test_ranks_train_with_a_gradient_penalty_as_one():
    with Communicator() as comm:
        batches = np.random.default_rng(2).standard_normal((5, comm.size, 4, 3)).astype(np.float32)
        results = []
        for alone in (True, False):
            rng = Generator(4)
            model = Sequential(Linear(3, 8, device=cpu(), rng=rng), nn.Tanh(), Linear(8, 1, device=cpu(), rng=rng))
            sync = None if alone else Synchronizer(comm)
            if sync is not None:
                sync.broadcast_parameters(model)
            own = batches if alone else batches[:, comm.rank : comm.rank + 1]
            results.append(penalised(model, SGD(model, 0.05), sync, own, comm.size if alone else 1))
        for alone, together in zip(*results, strict=True):
            np.testing.assert_allclose(together, alone, rtol=2e-5, atol=2e-6)
