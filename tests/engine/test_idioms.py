"""What programs for PyTorch write: its values and gradients, or an error; never other values."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from clcomm.engine import Tensor, nn
from clcomm.engine import functional as F
from clcomm.errors import ClcommError
from tests.engine.values import drawn

#: With x [3, 4] and y [3, 4] of floats, m [3, 4] of booleans, i [5] of indices, c [3] of classes, b [2, 3, 4], v [4].
IDIOMS = (
    "x + y", "x - 1", "2 * x", "1 / x", "x / y", "-x", "x ** 2", "x.pow(3)", "2 ** x", "x @ y.T", "x.T", "x.t()",
    "abs(x)", "x + v", "x * v", "x / v", "v + x", "b + v", "b * x", "b @ x.T", "b.matmul(x.t())", "x.mm(y.t())",
    "b.bmm(b.transpose(1, 2))", "x.exp()", "x.abs().log()", "x.abs().sqrt()", "x.sin()", "x.cos()", "x.tanh()",
    "x.sigmoid()", "x.relu()", "x.erf()", "x.square()", "x.abs().rsqrt()", "x.clamp(-0.5, 0.5)", "x.clamp(min=0)",
    "x.clamp(max=0.1)", "x.sum()", "x.sum(1)", "x.sum(dim=1)", "x.sum(dim=(0, 1))", "x.sum(-1, keepdim=True)",
    "x.mean()", "x.mean(0)", "x.mean(dim=-1, keepdim=True)", "x.std()", "x.std(1)", "x.var(0)",
    "x.var(dim=1, unbiased=False)", "x.var(1, keepdim=True)", "x.max()", "x.max(1)", "x.max(dim=1)[0]", "x.max(1)[1]",
    "x.min(0, keepdim=True)[0]", "x.argmax(1)", "x.argmax(dim=1, keepdim=True)", "x.argmin()", "x.prod()", "x.prod(1)",
    "x.norm()", "x.norm(dim=1)", "x.norm(1)", "x.cumsum(1)", "x.cumsum(dim=0)", "x.softmax(1)", "x.softmax(dim=-1)",
    "x.log_softmax(1)", "x.logsumexp(1)", "x.sort()", "x.sort(dim=1, descending=True)", "x.topk(2)",
    "x.topk(2, dim=1)[1]", "x.argsort(1)", "x.sort(0)[1]", "x > 0", "x >= y", "x == x", "x != y", "x.eq(x)",
    "(x > 0).sum()", "(x > 0).float().mean()", "(x > 0) & m", "~m", "m | (y < 0)", "m.sum(1)", "m.float()", "m.int()",
    "m.any()", "m.all(1)", "x.bool()", "(x.argmax(1) == c).sum()", "x.masked_fill(m, 0.0)",
    "x.masked_fill(m, float('-inf')).softmax(1)", "F.where(m, x, y)", "x * m", "x[m]", "x[m].sum()", "x[0]", "x[:, 1]",
    "x[:, -1:]", "x[1:, ::2]", "x[..., None]", "x[None]", "x[-1]", "b[:, 1, :]", "b[0, 1]", "x[[0, 2]]",
    "x[F.to_int(c)]", "x[c]", "x.index_select(0, c)", "x.gather(1, c.unsqueeze(1))",
    "x.gather(1, c.view(-1, 1)).squeeze(1)", "x.view(-1)", "x.view(2, 6)", "x.view(3, -1)", "x.reshape(4, 3)",
    "x.reshape((12,))", "x.flatten()", "b.flatten(1)", "b.flatten(start_dim=1)", "b.view(2, -1)", "b.permute(2, 0, 1)",
    "b.transpose(0, 2)", "b.transpose(-1, -2)", "x.unsqueeze(0)", "x.unsqueeze(-1)", "x.unsqueeze(1).squeeze(1)",
    "x[None].squeeze()", "x.unsqueeze(0).expand(5, 3, 4)", "v.expand(3, 4)", "v.expand(3, -1)",
    "x.contiguous().view(-1)", "x.view_as(y)", "v.expand_as(x)", "x.clone()", "x.detach()", "x.detach() * x",
    "x.chunk(2, 1)", "x.chunk(2, dim=1)[1]", "x.split(2, dim=1)", "x.split([1, 3], 1)[1]", "F.cat([x, y], 0)",
    "F.cat((x, y), dim=1)", "F.stack([x, y])", "F.stack([x, y], dim=1)", "x.tril()", "x.triu(1)", "F.one_hot(c, 5)",
    "F.einsum('ij,kj->ik', x, y)", "F.maximum(x, y)", "F.minimum(x, y)", "x.dim()", "x.numel()", "x.shape[0]",
    "len(x)", "x.ndim", "x.sum().item()", "float(x.sum())",
    "int(x[0, 0] * 100)", "f'{x.mean():.3f} {c[1]:03d}'", "[3, 4, 5][c[1]]", "list(range(c[0]))", "float(x[:1, 0])",
    "c.tolist()", "x.size(0)", "x.size()", "x.T.shape", "x.long()",
    "c.float() / 2", "c / 2", "c // 2", "c + 1", "c * 2", "i % 2", "x % 2", "x // 1", "x.round()", "x.floor()",
    "x.add(y)", "x.sub(1)", "x.mul(2)", "x.div(2)", "x.neg()", "x.repeat(2, 1)", "x.flip(0)", "x.roll(1, 0)",
    "x.median()", "x.isnan()", "x.isfinite()", "x.type()", "x.unbind(0)", "x.unfold(1, 2, 1)",
    "x.scatter(1, c.view(-1, 1), 1.0)", "x.nonzero()", "x.outer(x)", "v.dot(v)", "x.addmm(x, y)", "x.new_zeros(3)",
    "x.sum(dtype=None)", "x.cpu()", "x.data", "F.relu(x)", "F.relu(x, inplace=True)", "F.softmax(x, dim=1)",
    "F.log_softmax(x, dim=1)", "F.softmax(x, 1)", "F.gelu(x)", "F.gelu(x, approximate='tanh')", "F.elu(x)",
    "F.leaky_relu(x, 0.2)", "F.softplus(x)", "F.silu(x)", "F.mish(x)", "F.hardswish(x)", "F.relu6(x)", "F.hardtanh(x)",
    "F.normalize(x, dim=1)", "F.dropout(x, 0.5, False)", "F.dropout(x, training=False)", "F.dropout(x, p=0.0)",
    "F.layer_norm(x, (4,))", "F.layer_norm(x, [4], v, v)", "F.cross_entropy(x, c)",
    "F.cross_entropy(x, c, reduction='sum')", "F.cross_entropy(x, c, label_smoothing=0.1)",
    "F.cross_entropy(x, c, weight=v.abs())", "F.cross_entropy(x, y.softmax(1))",
    "F.nll_loss(F.log_softmax(x, dim=1), c)", "F.nll_loss(x, c, reduction='none')", "F.mse_loss(x, y)",
    "F.l1_loss(x, y)", "F.mse_loss(x, y, reduction='sum')", "F.smooth_l1_loss(x, y)", "F.huber_loss(x, y, delta=0.5)",
    "F.binary_cross_entropy(x.sigmoid(), y.sigmoid().detach())", "F.binary_cross_entropy_with_logits(x, m.float())",
    "F.kl_div(x.log_softmax(1), y.softmax(1).detach(), reduction='batchmean')", "F.pad(x, (1, 1))",
    "F.pad(x, (1, 2, 0, 1), value=3.0)", "F.pad(x, [(0, 0), (1, 1)])", "F.linear(x, y)", "F.linear(x, y, x[:, 0])",
    "F.embedding(i, x)", "F.embedding(c, x)", "F.avg_pool2d(b[None], 2)", "F.max_pool2d(b[None], 2)",
    "F.max_pool2d(b[None], (3, 2), stride=1, padding=1)", "F.interpolate(b[None], scale_factor=2)",
    "F.interpolate(b[None], size=(5, 7), mode='bilinear', align_corners=False)",
    "F.scaled_dot_product_attention(b, b, b)", "F.scaled_dot_product_attention(b, b, b, is_causal=True)",
    "F.cosine_similarity(x, y)", "F.scaled_dot_product_attention(b, b, b, attn_mask=m[:, :3])",
    "F.batch_norm(x, None, None, training=True)", "F.prelu(x, v[:1].abs())", "F.group_norm(b, 3)", "F.tanh(x)",
    "F.sigmoid(x)", "F.logsigmoid(x)", "F.threshold(x, 0.1, 20)", "F.glu(x)", "F.one_hot(c)",
    "F.adaptive_avg_pool2d(b[None], 1)", "F.adaptive_avg_pool2d(b[None], (1, 2))",
    "F.pixel_shuffle(b.view(1, 4, 2, 3)[:, :, :2, :2], 2)", "F.cross_entropy(b, c[None].expand(2, 3))",
    "F.cross_entropy(x.unsqueeze(2).expand(3, 4, 2), c.unsqueeze(1).expand(3, 2))", "nn.ReLU()(x)",
    "nn.ReLU(inplace=True)(x * 1)", "nn.Softmax(dim=1)(x)", "nn.LogSoftmax(dim=1)(x)", "nn.Flatten()(b)",
    "nn.Identity()(x)", "nn.CrossEntropyLoss()(x, c)", "nn.CrossEntropyLoss(ignore_index=1)(x, c)",
    "nn.CrossEntropyLoss(weight=v.abs())(x, c)", "nn.CrossEntropyLoss(reduction='none')(x, c)", "nn.MSELoss()(x, y)",
    "nn.MSELoss(reduction='sum')(x, y)", "nn.NLLLoss()(x, c)", "nn.L1Loss()(x, y)",
    "nn.BCELoss()(x.sigmoid(), m.float())", "nn.BCEWithLogitsLoss()(x, m.float())", "nn.SmoothL1Loss()(x, y)",
    "nn.HuberLoss()(x, y)", "nn.KLDivLoss(reduction='batchmean')(x.log_softmax(1), y.softmax(1).detach())",
    "nn.LayerNorm(4)(x)", "nn.BatchNorm1d(4)(x)", "nn.GroupNorm(3, 3)(b)", "nn.InstanceNorm1d(3)(b)",
    "nn.Dropout(0.0)(x)", "nn.Dropout(0.5).eval()(x)", "nn.AdaptiveAvgPool1d(2)(b)", "nn.MaxPool1d(2)(b)",
    "nn.AvgPool1d(2, 1)(b)", "nn.Upsample(scale_factor=2)(b)", "nn.PReLU()(x)", "nn.Unflatten(1, (2, 2))(x)",
    "nn.Softplus(beta=2)(x)", "nn.Hardtanh(-0.1, 0.2)(x)", "nn.CosineSimilarity()(x, y)", "nn.Threshold(0, 1)(x)",
    "c - 1", "1 - c", "c * c", "-c", "c + 0.5", "c + x[:, 0]", "5 // c.add(1)", "c % 2", "x // 2", "x % 0.3",
    "x % -0.3", "c.sum()", "c.max()", "c.min()", "m.expand(2, 3, 4)", "F.cat([c, c])", "F.stack([c, c], 1)",
    "c.repeat(2)", "c.view(-1, 1).expand(3, 2)", "c.split(2)", "c.chunk(2)", "b.size(-1)", "b.numel()", "x.size()[0]",
    "x.repeat(2, 3)", "v.repeat(2, 1)", "x.flip(0, 1)", "x.flip([1])", "x.roll(-1, 1)", "x.roll(5)",
    "x.roll((1, 2), (0, 1))", "b.unbind(1)[2]", "x.narrow(1, 1, 2)", "b.flatten(0, 1)", "b.flatten(1, 2)", "x.ceil()",
    "x.trunc()", "x.sign()", "x.abs().log1p()", "x.reciprocal()", "(x / 0).isinf()", "(x / 0).isnan()", "v.outer(v)",
    "v.unsqueeze(0).mm(x.t())", "x.maximum(y)", "x.type_as(y)", "x.to(y)", "c.type_as(x)", "x.new_ones(2, 3)",
    "x.new_full((2,), 7.0)", "x.var(1, unbiased=False)", "x.std(unbiased=False)", "x[:, [0, 2]]", "x[:, [-1]]",
    "x[1:, c]", "b[:, [0, 2], 1]", "F.normalize(x, p=1, dim=0)", "F.normalize(b, dim=-1)",
    "F.cosine_similarity(x, y, dim=0)", "F.glu(x, 1)", "F.threshold(x, 0.0, -1.0)",
    "F.pad(b[None], (1, 1, 2, 1), mode='reflect')", "F.meshgrid(v, v, indexing='ij')[1]",
    "F.pad(b[None], (2, 1, 0, 1), mode='replicate')", "F.pad(b, (2, 1), mode='circular')", "F.pad(c, (1, 1), value=7)",
    "nn.ReflectionPad2d(1)(b[None])", "nn.ReplicationPad2d((1, 0, 2, 1))(b[None])", "nn.ZeroPad2d(1)(b[None])",
    "nn.LogSigmoid()(x)", "nn.GLU()(x)", "nn.ReflectionPad1d(2)(b)", "nn.ConstantPad2d(1, 3.5)(b[None])",
    "nn.CosineSimilarity(dim=0)(x, y)", "x.clone().add_(1)", "x.clone().mul_(2).sub_(y)", "x.clone().fill_(2)",
    "x.clone().zero_()", "x.clone().clamp_(-0.2, 0.2)", "x.clone().masked_fill_(m, 1.0)", "x.clone().copy_(y)",
    "x.median(1)", "x.median(dim=0, keepdim=True)", "b.unfold(2, 3, 1)", "x.scatter_add(1, c.view(-1, 1), y)",
    "x.scatter(1, c.view(-1, 1), y)", "x.scatter(0, c.view(1, -1), 2)", "F.pad(c, (2, 1))", "x.mean(1, dtype=None)",
    "F.unfold(b[None], (2, 3), padding=1)", "nn.AdaptiveMaxPool1d(2)(b)", "nn.MaxPool3d(2)(b[None, None])",
    "(x * 1).div_(3)", "(x * 2).add_(y, alpha=0.5)",
)  # fmt: skip
#: Assignments: x, of which they are made, is no leaf.
ASSIGNED = (
    "x[0] = 1.0", "x[:, 1] = y[:, 0]", "x[m] = -1.0", "x[c] = 2.0", "x[1:, ::2] = y[1:, ::2]", "x[..., -1] *= 3",
    "x[:, [0, 2]] = 0.0", "x[0, 1] = y[2, 2]", "x[x < 0] = 0.0", "x[:2] += y[:2]", "x[[0, 2]] = y[[1, 1]]", "x[:] = v",
    "x[1] = v", "x += v", "x *= y", "x[None] = 5.0",
)  # fmt: skip


def values(given):
    if isinstance(given, (tuple, list)):
        return list(itertools.chain.from_iterable(map(values, given)))
    array = given.detach().numpy() if hasattr(given, "detach") else np.array(given)
    return [np.asarray(array)]


def outcome(text, library, functional, make):
    """Return the values of the text, and the gradients of x, or the error."""
    rng = np.random.default_rng(5)
    shapes = {"x": (3, 4), "y": (3, 4), "b": (2, 3, 4), "v": (4,)}
    names = {name: make(drawn(number, *shape)) for number, (name, shape) in enumerate(shapes.items())}
    names["x"].requires_grad = True
    names.update(m=make(rng.random((3, 4)) < 0.5), i=make(np.array([0, 2, 1, 1, 0])), c=make(np.array([2, 0, 1])))
    try:
        result = eval(text, {"nn": library, "F": functional, **names})
        found = values(result)
        if getattr(result, "requires_grad", False):
            (result * make(drawn(9, *result.shape))).sum().backward()
            found += values(names["x"].grad) if names["x"].grad is not None else []
    except Exception as error:
        return error, None
    return None, found


class _Functional:
    """PyTorch's functions of both of its modules."""

    def __init__(self, torch):
        self._torch = torch

    def __getattr__(self, name):
        if name == "to_int":
            return lambda t: t.long()
        found = getattr(self._torch.nn.functional, name, None)
        return getattr(self._torch, name) if found is None else found


@pytest.mark.filterwarnings("ignore")
def test_no_idiom_has_other_values_than_pytorchs(torch):
    assert len(IDIOMS) == len(set(IDIOMS)) > 370
    silent, refused = [], set()
    for text in IDIOMS:
        error, ours = outcome(text, nn, F, Tensor)
        failure, theirs = outcome(text, torch.nn, _Functional(torch), torch.tensor)
        if error is not None:
            if not isinstance(error, (ClcommError, TypeError, AttributeError)) or "\n" in str(error):
                silent.append((text, error))
            if failure is None:
                refused.add(text)
        elif failure is not None:
            continue  # NumPy's way, which PyTorch refuses
        elif len(ours) != len(theirs) or not all(map(_is_close, ours, theirs)):
            silent.append(text)
    assert silent == [] and refused == set()


def _is_close(ours, theirs):
    if ours.dtype.kind == "U":
        return ours == theirs
    return ours.shape == theirs.shape and np.allclose(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("text", ASSIGNED)
def test_assignments_have_pytorchs_values_and_gradients(torch, text):
    found = []
    for make in (Tensor, torch.tensor):
        names = {name: make(drawn(number, 3, 4)) for number, name in enumerate(("leaf", "y"))}
        for each in names.values():
            each.requires_grad = True
        names.update(v=make(drawn(5, 4)), c=make(np.array([2, 0, 1])), m=make(drawn(7, 3, 4) > 0))
        names["x"] = names["leaf"] * 1.5
        exec(text, names)
        (names["x"] * make(drawn(9, 3, 4))).sum().backward()
        found.append([names["x"].detach().numpy(), *[names[n].grad for n in ("leaf", "y")]])
    for ours, theirs in zip(*found, strict=True):
        ours, theirs = [None if each is None else np.asarray(each if isinstance(each, np.ndarray) else each.numpy())
                        for each in (ours, theirs)]  # fmt: skip
        assert (theirs is None) or np.allclose(0 if ours is None else ours, theirs, rtol=1e-5, atol=1e-6)


def test_assignments_to_integers_and_what_they_refuse():
    c = Tensor(np.arange(6).reshape(2, 3))
    c[0, 1] = 9
    c[:, 2] = Tensor([7, 8])
    assert c.tolist() == [[0, 9, 7], [3, 4, 8]]
    assert c.gather(1, Tensor([[2], [0]])).tolist() == [[7], [3]] and c.index_select(1, [1]).tolist() == [[9], [4]]
    x, leaf = Tensor(np.zeros((2, 3))), Tensor(np.zeros(3), requires_grad=True)
    for assign, said in (
        (lambda: x.__setitem__(0, np.ones(3)), "expected a number or a Tensor, got ndarray"),
        (lambda: x.__setitem__(0, Tensor(np.ones(2))), r"expected a value of shape \(3,\), got \(2,\)"),
        (lambda: x.__setitem__(2, 1.0), "index 2 is out of bounds"),
        (lambda: c * 2**30, "integers must fit int32"),
        (lambda: (c * 2**27).sum(), "integers must fit int32"),
        (lambda: c.gather(1, Tensor([[0], [3]])), "expected indices from 0 to 2, got 3"),
        (lambda: c.index_select(0, Tensor([2])), "expected indices from 0 to 1, got 2"),
        (lambda: leaf.__setitem__(0, 1.0), "got a leaf that needs a gradient"),
    ):
        with pytest.raises(ClcommError, match=said):
            assign()
