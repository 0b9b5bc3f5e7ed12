"""Functions at the edges of float32, values and gradients, as PyTorch's: 0, -0, infinity, NaN, huge, tiny, equal ones.

Each text is evaluated with both libraries. Gradients count where PyTorch's value and gradient are no NaN: ours may be
finite where PyTorch's overflows on the way. `tests.as_torch.on_purpose` lists what is meant to differ.
"""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import as_torch
from clcomm.engine import Tensor
from clcomm.engine import functional as F
from tests.as_torch.on_purpose import EDGES

INF, NAN = np.inf, np.nan
VALUES = np.array([
    0.0, -0.0, 1, -1, 0.5, -0.5, 2, -2, 3, INF, -INF, NAN, 3e38, -3e38, 1e20, -1e20, 1e-20, -1e-20, 1e-38, 3e30, 4e30,
    20.0, 25.0, 88.0, 100.0, -100.0, -20.0, 0.999999, 1e-7,
], np.float32)  # fmt: skip
ROWS = np.array([
    [0, 0, 0], [1, 1, 1], [-INF, -INF, -INF], [INF, 0, 1], [INF, INF, 0], [-INF, 0, 1], [NAN, 0, 1],
    [3e38, 3e38, 3e38], [3e30, 4e30, 0], [-0.0, 0, -0.0], [1e20, -1e20, 1], [5, 5, 1], [1e-20, 0, 0], [2, 3, 4],
    [3e38, 1, 0], [0, 1, 0], [0, 0, 1], [1e-25, 2e-25, 0],
], np.float32)  # fmt: skip
PROBABILITIES = np.array([0, 1, 1e-30, 0.5, 1 - 6e-8, 1e-10], np.float32)

_FUNCTIONS = (
    "abs acos asin atan ceil cos cosh erf erfc exp exp2 expm1 floor frac log log1p log2 log10 logit neg "
    "reciprocal round rsqrt sigmoid sign sin sinh sqrt square tan tanh trunc relu nan_to_num"
)
_ACTIVATIONS = (
    "celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 selu silu "
    "softplus softshrink softsign tanhshrink"
)
_OPERATIONS = "add sub mul div atan2 hypot logaddexp maximum minimum pow xlogy remainder fmod "
_LOSSES = "l1_loss mse_loss smooth_l1_loss huber_loss kl_div hinge_embedding_loss poisson_nll_loss"
ONE = [
    *(f"t.{name}(x)" for name in _FUNCTIONS.split()),
    *(f"F.{name}(x)" for name in _ACTIVATIONS.split()),
    *(f"x ** {p}" for p in (0, 0.5, -0.5, 1, 2, 3, -1, -2, 2.5, -1.5, 9)), *(f"{p} ** x" for p in (0.0, 1.0, 2.0, 0.5)),
    "t.clamp(x, 0)", "t.clamp(x, None, 1)", "t.clamp(x, -1, 1)", "t.clamp(x, 2, 1)", "F.threshold(x, 1.0, 2.0)",
    "F.softplus(x, 2.0, 5.0)", "t.logit(x, 0.1)", "x % 3.0", "x % -2.0", "t.fmod(x, 3.0)",
    "t.div(x, 3.0, rounding_mode='floor')",
    *(f"{text}" for k in ("3.0", "-2.0", "7.0", "0.1", "1e-40", "0.0", "float('inf')")
      for text in (f"x / {k}", f"{k} / x", f"x * {k}")),
]  # fmt: skip
TWO = [
    *(f"t.{name}(x, y)" for name in _OPERATIONS.split()),
    *(f"t.lerp(x, y, {weight})" for weight in (0.25, 0.75, 1.0, 0.0)),
    "t.where(x > y, x.log(), y)", "t.div(x, y, rounding_mode='floor')",
    *(f"F.{name}(x, y, reduction='none')" for name in _LOSSES.split()),
    "F.soft_margin_loss(x, y.detach(), reduction='none')",
    "F.binary_cross_entropy_with_logits(x, (y > 0).float(), reduction='none')",
    "F.poisson_nll_loss(x, y, False, True, reduction='none')", "F.kl_div(x, y, reduction='none', log_target=True)",
]  # fmt: skip
OF_ROWS = [
    *(f"x.{call}" for call in (
        "sum(-1)", "mean(-1)", "var(-1)", "std(-1)", "std(-1, correction=0)", "norm(2, -1)", "norm(1, -1)",
        "norm(float('inf'), -1)", "logsumexp(-1)", "softmax(-1)", "log_softmax(-1)", "prod(-1)", "amax(-1)", "amin(-1)",
        "max(-1)[0]", "min(-1)[0]", "median(-1)[0]", "cumsum(-1)", "cumprod(-1)", "nansum(-1)", "sort(-1)[0]",
        "topk(2, -1)[0]", "diff()", "quantile(0.5, -1)", "quantile(0.3, -1)", "kthvalue(2, -1)[0]", "sum(())")),
    *(f"F.{call}" for call in (
        "normalize(x, dim=-1)", "normalize(x, 1.0, dim=-1)", "softmin(x, -1)", "rms_norm(x, (3,))",
        "layer_norm(x, (3,))", "glu(x[:, :2], -1)")),
    *(f"t.linalg.vector_norm(x, {p}, -1)" for p in (3.0, 0.5, 0.0, 2.0, "float('inf')", "-float('inf')")),
]  # fmt: skip
OF_TWO_ROWS = [
    "F.cosine_similarity(x, y, -1)", "F.pairwise_distance(x, y)", "F.pairwise_distance(x, y, 1.0)",
    "F.pairwise_distance(x, y, 3.0)", "F.cosine_embedding_loss(x, y, t.ones(len(x)), reduction='none')",
    "F.cosine_embedding_loss(x, y, -t.ones(len(x)), 0.1, reduction='none')",
    "F.triplet_margin_loss(x, y, x * 1, reduction='none')",
]  # fmt: skip


def grid(*axes):
    return [each.ravel() for each in np.meshgrid(*axes)]


def close(ours, theirs):
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
    return same | (np.abs(ours - theirs) <= 1e-5 + 1e-4 * np.abs(theirs))


def differences(torch, text, arrays, at_nan=False):
    """Return a line for each value and gradient that is not PyTorch's, without those that are meant to differ.

    at_nan: gradients count where the value is NaN, too.
    """
    ours = [Tensor(array, requires_grad=True) for array in arrays]
    theirs = [torch.tensor(array, requires_grad=True) for array in arrays]
    y, expected = (
        eval(text, {"t": library, "F": functions, **dict(zip("xyz", given, strict=False))})
        for library, functions, given in ((as_torch, F, ours), (torch, torch.nn.functional, theirs))
    )
    values = expected.detach().numpy()
    is_meant = EDGES.get(text, lambda *arrays: np.zeros(len(arrays[0]), bool))(*arrays)

    def told(what, actual, reference, counts):
        at = ~close(actual, reference) & counts
        at &= ~(is_meant.reshape(-1, *(1,) * (at.ndim - 1)) if at.ndim else is_meant.any())
        places = [tuple(each) for each in np.argwhere(at)]
        return [f"{text}: {what} {place}: {actual[place]} for {reference[place]} of {[a[place[:1]] for a in arrays]}"
                for place in places[:2]]  # fmt: skip

    found = told("value", y.numpy(), values, np.True_)
    expected.sum().backward()
    F.sum(y).backward()
    is_nan = np.isnan(values)
    for own, other in zip(ours, theirs, strict=True):
        if other.grad is None:
            continue
        grad, reference = np.zeros(own.shape) if own.grad is None else own.grad.numpy(), other.grad.numpy()
        counts = ~np.isnan(reference)
        if not at_nan and is_nan.ndim and len(is_nan) == len(counts):
            counts &= ~is_nan.reshape(len(counts), -1).any(1).reshape(-1, *(1,) * (counts.ndim - 1))
        found += told("gradient", grad, reference, counts)
    return found


@pytest.mark.parametrize(("texts", "arrays"), [
    (ONE, [VALUES]), (TWO, grid(VALUES, VALUES)), (OF_ROWS, [ROWS]),
    (OF_TWO_ROWS, [np.repeat(ROWS, len(ROWS), 0), np.tile(ROWS, (len(ROWS), 1))]),
    (["F.binary_cross_entropy(x, y, reduction='none')"], grid(PROBABILITIES, [0, 1, 0.5, 0.1])),
    (["t.lerp(x, y, z)", "t.addcmul(x, y, z, value=0.5)", "t.addcdiv(x, y, z, value=0.5)",
      "F.margin_ranking_loss(x, y, z, 0.1, reduction='none')", "F.gaussian_nll_loss(x, y, z.abs(), reduction='none')"],
     grid(VALUES[:16], VALUES[:16], VALUES[:16])),
], ids=["of one", "of two", "rows", "of two rows", "probabilities", "of three"])  # fmt: skip
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
def test_functions_at_the_edges_of_float32_are_pytorchs(torch, texts, arrays):
    found = [line for text in texts for line in differences(torch, text, [np.float32(each) for each in arrays])]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("text", [
    "x.max()", "x.min()", "x.median()", "x.median(0)[0]", "x.norm(float('inf'))", "x.norm(-float('inf'))", "x.amax()",
    "x.max(0)[0]", "t.linalg.vector_norm(x, float('inf'), 0)", "F.hardtanh(x)", "F.relu6(x)", "F.hardsigmoid(x)",
    "F.hardshrink(x)", "F.softshrink(x)", "F.threshold(x, 0.1, 0.2)", "F.elu(x)", "F.celu(x)", "t.clamp(x, -1, 1)",
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_gets_pytorchs_share_of_the_gradient(torch, text):
    rng = np.random.default_rng(list(text.encode()))
    for _ in range(20):
        x = rng.choice(np.float32([NAN, NAN, INF, -INF, 0, 1, -1, 2]), rng.integers(1, 12))
        assert not differences(torch, text, [x], at_nan=True)


def test_a_discriminator_that_is_sure_trains_on_as_in_pytorch(torch):
    def trained(library):
        library.manual_seed(0)
        rng, nn, targets = np.random.default_rng(0), library.nn, np.repeat(np.float32([[1], [0]]), 32, 0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())
        optimizer, loss_of = library.optim.Adam(model.parameters(), lr=0.05), nn.BCELoss()
        for _ in range(60):
            x = np.concatenate([rng.standard_normal((32, 16)) + 2, rng.standard_normal((32, 16)) - 2])
            optimizer.zero_grad()
            loss = loss_of(model(library.tensor(np.float32(x))), library.tensor(targets))
            loss.backward()
            optimizer.step()
        return loss.item(), next(iter(model.parameters())).sum().item()

    assert trained(as_torch) == pytest.approx(trained(torch), rel=1e-2, abs=1e-6)
