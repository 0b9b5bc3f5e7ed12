"""Calls of PyTorch's top module: its values, or an error."""

from __future__ import annotations

import numpy as np
import pytest

import clcomm.as_torch as ours
from clcomm.base.errors import ClcommError


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="PyTorch is not installed")


#: Calls of the top module, with x, y [3, 4], b [2, 3, 4], v [4] of floats, c [3] of classes and m [3, 4] of booleans.
CALLS = (
    "torch.transpose(x, 0, 1)", "torch.flip(x, dims=(0, ))", "torch.flip(x, [1])", "torch.add(x, y, alpha=2)",
    "x.add(y, alpha=0.5)", "torch.sub(x, y, alpha=2)",
    "torch.div(x, 2, rounding_mode='trunc')", "x.div(0.3, rounding_mode='floor')", "torch.round(x, decimals=1)",
    "x.round(decimals=2)", "torch.sum(input=x, dim=1)", "torch.mean(x, dim=[0, 1])",
    "torch.sum(x, dim=[1], keepdim=True)", "torch.topk(x, 2, dim=1, largest=False)[0]",
    "torch.topk(x, 2, sorted=True)[0]", "torch.sort(x, dim=1, stable=True)[0]", "torch.sort(x, stable=True, dim=0)[1]",
    "torch.cumsum(x, dim=0)", "torch.where(m)[0]", "torch.where(m, x, 0.)", "torch.where(m, 1., 0.)",
    "torch.where(x>0, x, torch.zeros_like(x))", "torch.full((2, ), 3.)", "torch.full((2, 2), 7)",
    "torch.arange(5).float()", "torch.arange(0, 1, 0.25)", "torch.arange(1, 6, 2)", "torch.linspace(0, 1, 5)",
    "torch.zeros(2, 3)", "torch.zeros((2, 3))", "torch.ones([2])", "torch.eye(3)", "torch.tensor([1, 2, 3])",
    "torch.tensor([1., 2.]).dtype==torch.float32", "torch.tensor(3.5)", "torch.cat([x, y], dim=-1)",
    "torch.unsqueeze(x, 0)", "torch.squeeze(x.unsqueeze(0))", "torch.reshape(x, (2, -1))", "torch.flatten(b, 1)",
    "torch.flatten(b, start_dim=1)", "torch.clamp(x, min=0)", "torch.clamp(x, max=0.)", "torch.clamp(x, -1, 1)",
    "torch.max(x)", "torch.max(x, 1)[0]", "torch.max(x, dim=1)[1]", "torch.max(x, y)",
    "torch.min(x, dim=0, keepdim=True)[0]", "torch.argmax(x, dim=1)", "torch.argmax(x, -1)", "torch.norm(x)",
    "torch.norm(x, dim=1)", "torch.norm(x, p=2, dim=1, keepdim=True)", "torch.exp(-x)", "torch.log(x.abs()+1)",
    "torch.sqrt(x.abs())", "torch.pow(x, 2)", "torch.abs(x)", "torch.sign(x)", "torch.matmul(x, y.T)",
    "torch.mm(x, y.t())", "torch.dot(v, v)", "torch.einsum('ij, kj->ik', x, y)", "torch.tril(torch.ones(3, 3))",
    "torch.triu(torch.ones(3, 3), diagonal=1)", "torch.gather(x, 1, c.view(-1, 1))", "torch.index_select(x, 0, c)",
    "torch.split(x, 2, dim=1)[0]", "torch.chunk(x, 2, dim=1)[1]", "torch.std(x)", "torch.var(x, dim=1)",
    "torch.std(x, dim=1, unbiased=False)", "torch.isnan(x)", "torch.all(x>-99)", "torch.any(x>0)",
    "torch.roll(x, 1, 0)", "torch.roll(x, shifts=1, dims=1)", "torch.repeat_interleave(x, 2, dim=0)", "torch.numel(x)",
    "torch.is_tensor(x)", "torch.unique(c)", "torch.logical_and(m, m)", "torch.logical_not(m)", "torch.eq(x, x)",
    "torch.gt(x, 0)", "torch.ne(c, 1)", "torch.cumprod(x.abs(), dim=0)", "torch.prod(x, 1)", "torch.trace(x@x.T)",
    "torch.floor(x)", "torch.ceil(x)", "torch.erf(x)", "torch.masked_select(x, m)",
    "torch.take_along_dim(x, c.view(-1, 1), dim=1)", "torch.nn.functional.one_hot(c, 3)", "torch.zeros_like(x)",
    "torch.ones_like(x, dtype=torch.float32)", "torch.empty(2, 3).shape", "torch.rand(2).shape",
    "torch.tensor(np.float64(2.5))", "torch.tensor(np.arange(3))", "torch.tensor([[True, False]])",
    "torch.as_tensor([1., 2.])", "torch.from_numpy(np.ones(3, 'f'))", "x.mean(dim=(0, 1))", "x.sum(axis=1)",
    "x.max(axis=1)[0]", "x.T.shape", "x.reshape(-1).shape", "x.view(-1, 2).shape", "x.size(1)",
    "x.norm(p=2, dim=1)", "x.std(dim=0)", "x.var(unbiased=False)", "x.argmax(dim=-1)", "x.topk(k=2, dim=1)[0]",
    "x.sort(descending=True)[0]", "x.unbind(dim=0)[0]", "x.expand(2, -1, -1)", "x.repeat(1, 2)",
    "x.masked_fill(m, -1e9)", "x.masked_fill(m==0, float('-inf'))", "x.int()", "x.to(torch.float32)", "x.to('cpu')",
    "x.to(device='cpu', dtype=torch.float32)", "x.cpu().numpy()", "x.detach().cpu().numpy()", "x[..., -1]",
    "x[:, None]", "x[x>0]", "x[[0, 1]]", "x[c, c]", "x[:, c]", "(x>0).sum().item()", "(x.argmax(1)==c).float().mean()",
    "torch.nn.functional.pad(x, (1, 1), 'constant', 0)", "torch.nn.functional.cross_entropy(x, c, reduction='none')",
    "torch.nn.functional.normalize(x, p=2, dim=-1)", "torch.nn.functional.softplus(x)",
    "torch.nn.functional.mse_loss(x, y)",
    "torch.nn.functional.kl_div(x.log_softmax(-1), y.softmax(-1), reduction='sum')",
    "torch.nn.functional.interpolate(b[None], scale_factor=2.0, mode='nearest')",
    "torch.nn.functional.avg_pool2d(b[None], kernel_size=2)",
    "torch.nn.functional.max_pool2d(b[None], kernel_size=2, stride=1)",
    "torch.nn.functional.layer_norm(x, x.shape[1:])", "torch.nn.functional.embedding(c, x)",
    "torch.nn.functional.linear(x, y)", "torch.nn.functional.dropout(x, 0.5, training=False)",
    "torch.nn.functional.conv1d(b, b[:, :, :2])", "torch.nn.functional.unfold(b[None], kernel_size=2)",
    "torch.logspace(0, 2, 3)", "torch.randint_like(c, 3).shape", "torch.scatter(x, 1, c.view(-1, 1), 1.0)",
    "torch.t(x)", "torch.swapaxes(x, 0, 1)", "torch.Tensor([1, 2, 3])", "torch.zeros(3).fill_(2)",
    "torch.addmm(v[:3], x, y.T)", "torch.multinomial(x.abs(), 1).shape", "torch.bernoulli(x.sigmoid()).shape",
    "torch.normal(0., 1., size=(2, )).shape", "torch.randperm(4).shape", "torch.nn.Parameter(torch.zeros(2)).shape",
    "torch.nn.init.xavier_uniform_(torch.empty(3, 4)).shape", "torch.argsort(x, dim=1, descending=True)",
    "torch.nonzero(m, as_tuple=True)[0]", "m.nonzero(as_tuple=True)[1]", "m.nonzero().squeeze()",
    "torch.count_nonzero(m)", "torch.diff(x)", "torch.square(x)", "torch.rsqrt(x.abs())", "torch.log2(x.abs())",
    "torch.log1p(x.abs())", "torch.expm1(x)", "torch.remainder(x, 0.3)", "torch.fmod(x, 0.3)",
    "torch.true_divide(x, y)", "torch.floor_divide(c, 2)", "torch.squeeze(x[:, :1], 1)",
    "torch.squeeze(x[:, :1], dim=1)", "torch.mean(x, 1, keepdim=True)", "torch.median(x)", "torch.logsumexp(x, dim=1)",
    "torch.nn.utils.clip_grad_norm_([torch.nn.Parameter(torch.zeros(2))], 1.)", "torch.autograd.grad(x2.sum(), x1)[0]",
    "torch.concat([x, y])", "torch.select(x, 1, 0)", "torch.narrow(x, 1, 0, 2)", "torch.index_fill(x, 0, c[:1], 1.)",
    "torch.argmin(x, dim=0)", "torch.isfinite(x).all()", "torch.isinf(x).any()", "torch.is_grad_enabled()",
    "torch.broadcast_to(v, (3, 4))", "torch.triu_indices(3, 3)", "torch.tril_indices(3, 3, -1)", "torch.fmod(x, -0.3)",
    "torch.nn.functional.relu_(x.clone())", "c.div(2, rounding_mode='trunc')", "(c - 2).div(2, rounding_mode='trunc')",
    "(c - 2).div(2, rounding_mode='floor')", "torch.finfo(torch.float32).eps", "torch.iinfo(torch.int32).max",
)  # fmt: skip


def outcome(library, text):
    rng = np.random.default_rng(5)
    names = {name: library.tensor(rng.standard_normal(shape).astype(np.float32))
             for name, shape in (("x", (3, 4)), ("y", (3, 4)), ("b", (2, 3, 4)), ("v", (4,)))}  # fmt: skip
    names.update(c=library.tensor([2, 0, 1]), m=names["x"] > 0.1, x1=library.ones(3, requires_grad=True))
    found = eval(text, {"torch": library, "np": np, **names, "x2": names["x1"] * 2})
    return np.asarray(found.detach().numpy() if hasattr(found, "detach") else found)


@pytest.mark.filterwarnings("ignore")
def test_calls_of_the_top_module_are_pytorchs(torch):
    wrong = []
    for text in CALLS:
        own, theirs = outcome(ours, text), outcome(torch, text)
        if own.shape != theirs.shape or not np.allclose(own, theirs, rtol=1e-4, atol=1e-5, equal_nan=True):
            wrong.append(text)
    assert len(CALLS) > 150 and wrong == []


def test_what_divisions_leave_is_pytorchs_at_multiples_too(torch):
    steps = np.arange(-40, 41)
    for number in (0.3, -0.3, 0.1, 7.0, -2.5):
        host = (steps * np.float32(number)).astype(np.float32)
        own, theirs = ours.tensor(host), torch.tensor(host)
        for text in ("x.fmod(n)", "x % n", "x // n", "x.div(n, rounding_mode='trunc')", "x.frac()"):
            found = eval(text, {"x": own, "n": number}).numpy(), eval(text, {"x": theirs, "n": number}).numpy()
            assert np.array_equal(*found), (text, number)


def test_norms_of_matrices_are_frobenius_or_refused(torch):
    host = np.arange(12, dtype=np.float32).reshape(3, 4) - 5
    for named in ({}, {"ord": "fro"}, {"dim": 1}, {"ord": 1, "dim": 0}, {"ord": float("inf"), "dim": 1}):
        found = ours.linalg.norm(ours.tensor(host), **named)
        assert found.numpy() == pytest.approx(torch.linalg.norm(torch.tensor(host), **named).numpy())
    for named in ({"ord": 2}, {"ord": "nuc"}, {"ord": 1, "dim": (0, 1)}):
        with pytest.raises(ClcommError, match="norm: ord: expected None or 'fro' of a matrix"):
            ours.linalg.norm(ours.tensor(host), **named)
    assert ours.numel(ours.tensor(host)) == 12 and not ours.isnan(ours.tensor(host)).any().item()
