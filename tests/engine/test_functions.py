"""Functions with PyTorch's names against PyTorch: values, gradients, extremes, booleans, order, indices and einsum."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Replay, Tensor, nn, no_grad
from clcomm.engine import functional as F

torch = pytest.importorskip("torch")

RNG = np.random.default_rng(0)
X = RNG.standard_normal((3, 4, 5)).astype(np.float32)
TIED = np.float32([[2, 1, 2, 0], [-1, 3, 3, 3], [0, 0, 0, 0]])
ABOVE = np.abs(X) + 0.1
#: Of the tensor, for both libraries alike: what they do, and the values that it starts from.
ALIKE: dict[str, tuple[Any, np.ndarray]] = {
    "exp": (lambda x: x.exp(), X),
    "log": (lambda x: x.log(), ABOVE),
    "sqrt": (lambda x: x.sqrt(), ABOVE),
    "rsqrt": (lambda x: x.rsqrt(), ABOVE),
    "abs": (lambda x: abs(x), np.float32([[-2, 0, 3]])),
    "square": (lambda x: x.square(), X),
    "sin": (lambda x: x.sin(), 40 * X),
    "cos": (lambda x: x.cos(), 40 * X),
    "erf": (lambda x: x.erf(), np.linspace(-6, 6, 200, dtype=np.float32)),
    "pow": (lambda x: x**3 + x.pow(2) + x**1, X),
    "pow 0": (lambda x: x**0 + x * 1e-3, TIED),
    "pow negative": (lambda x: x**-1.5, ABOVE),
    "number to the power": (lambda x: 3**x, X),
    "clamp": (lambda x: x.clamp(-0.5, 0.25), X),
    "clamp min": (lambda x: x.clamp(min=0.1), X),
    "clamp of limits": (lambda x: x.clamp(-1, 2), TIED),
    "max": (lambda x: x.max(), TIED),
    "min": (lambda x: x.min(), TIED),
    "max of dim": (lambda x: x.max(dim=1)[0], X),
    "max keepdim": (lambda x: x.max(1, keepdim=True).values, X),
    "min of dim": (lambda x: x.min(-1).values, TIED),
    "max of ties": (lambda x: x.max(1).values, TIED),
    "sort": (lambda x: x.sort(dim=1, descending=True).values, X),
    "sort of ties": (lambda x: x.sort(stable=True).values if isinstance(x, torch.Tensor) else x.sort().values, TIED),
    "topk": (lambda x: x.topk(2).values, X),
    "topk smallest": (lambda x: x.topk(2, dim=1, largest=False)[0], X),
    "median": (lambda x: x.median() + x.median(1).values.sum(), X),
    "median of ties": (lambda x: x.median(), TIED),
    "median of nan": (
        lambda x: (
            x.median(dim=1)[0].nan_to_num(7.0)
            if isinstance(x, torch.Tensor)
            else F.where(x.median(dim=1)[0].isnan(), 7.0, x.median(dim=1)[0])
        ),
        np.float32([[1, math.nan, 2], [3, 1, 2]]),
    ),
    "unfold": (lambda x: x.unfold(1, 3, 1) * 2, X),
    "scatter of a number": (lambda x: x.scatter(1, _indices(x, [[[0, 2]], [[3, 1]]]), 2.5), X),
    "cumsum": (lambda x: x.cumsum(dim=1), X),
    "cumsum 0": (lambda x: x.cumsum(0), X),
    "prod": (lambda x: x.prod(), X),
    "prod of zeros": (lambda x: x.prod(dim=1), TIED),
    "std": (lambda x: x.std(dim=1), X),
    "norm": (lambda x: x.norm() + x.norm(dim=1).sum() + x.norm(1), X),
    "norm at 0": (lambda x: x.norm(), np.zeros((2, 3), np.float32)),
    "norm inf": (lambda x: x.norm(math.inf), X),
    "sum of dims": (lambda x: x.sum(dim=(0, 2), keepdim=True) * x.mean(dim=1, keepdim=True), X),
    "softmax of dim": (lambda x: x.softmax(dim=1) + x.log_softmax(dim=0) + x.logsumexp(dim=2, keepdim=True), X),
    "tril": (lambda x: x.tril() - x.triu(1), X),
    "tril of another diagonal": (lambda x: x.tril(-1) + x.triu(diagonal=-2), X),
    "view": (lambda x: x.view(3, -1).unsqueeze(1).squeeze(1), X),
    "squeeze": (lambda x: x[:1].squeeze() * 2 + x[:1].squeeze(0), X),
    "expand": (lambda x: x.unsqueeze(0).expand(2, -1, -1, 5) * 1.5, X),
    "clone": (lambda x: x.clone() * x, X),
    "chunk": (lambda x: x.chunk(2, dim=1)[0] * x.chunk(2, 1)[1], X),
    "permute": (lambda x: x.permute(2, 0, 1).reshape(5, 12), X),
    "masked_fill": (lambda x: x.masked_fill(x > 0.3, -2.0), X),
    "mask times": (lambda x: x * (x > 0), X),
    "indices": (lambda x: x[[2, 0, 2]], X),
    "pairs of indices": (lambda x: x[[0, 1, 2], [3, -1, 0]], X),
    "mask as index": (lambda x: x[x > 0.5], X),
    "gather": (lambda x: x.gather(1, x.argmax(dim=1, keepdim=True)), X),
}


def _indices(like: Any, values: list[Any]) -> Any:
    return torch.tensor(values) if isinstance(like, torch.Tensor) else Tensor(np.array(values))


def both(function: Any, values: np.ndarray) -> tuple[Tensor, Any, Tensor, Any]:
    """Return the results of both libraries and their leaves, after a backward with the same gradient."""
    ours, theirs = Tensor(values, requires_grad=True), torch.tensor(values, requires_grad=True)
    result, expected = function(ours), function(theirs)
    above = RNG.standard_normal(tuple(expected.shape)).astype(np.float32)
    result.backward(Tensor(above) if above.shape else float(above))
    expected.backward(torch.tensor(above))
    return result, expected.detach(), ours.grad, theirs.grad


@pytest.mark.parametrize("name", ALIKE)
def test_is_pytorchs(name):
    result, expected, grad, its = both(*ALIKE[name])
    assert result.shape == tuple(expected.shape)
    np.testing.assert_allclose(result.numpy(), expected.numpy(), rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(grad.numpy(), its.numpy(), rtol=1e-5, atol=2e-5)


def test_order_with_nan_is_pytorchs():
    values = np.float32([[3, np.nan, 1, np.inf, 1], [np.nan, 2, np.nan, -np.inf, 2]])
    ours, theirs = Tensor(values), torch.tensor(values)
    for descending in (False, True):
        own, other = ours.sort(1, descending), theirs.sort(dim=1, descending=descending, stable=True)
        np.testing.assert_array_equal(own.values.numpy(), other.values.numpy())
        finite = np.isfinite(other.values.numpy())
        np.testing.assert_array_equal(own.indices.numpy()[finite], other.indices.numpy()[finite])
    for name in ("argmax", "argmin"):
        assert getattr(ours, name)().item() == getattr(theirs, name)().item()
        np.testing.assert_array_equal(getattr(ours, name)(dim=1).numpy(), getattr(theirs, name)(dim=1).numpy())
        np.testing.assert_array_equal(getattr(ours, name)(0, True).numpy(), getattr(theirs, name)(0, True).numpy())


@pytest.mark.parametrize("length", [8, 9, 37])
def test_extremes_of_long_rows_are_pytorchs(length):
    """Wherever the largest lies, twice too, and the first NaN, in any lane and behind the last whole vector."""
    values = np.tile(RNG.integers(-3, 3, length).astype(np.float32), (2 * length, 1))
    for row in range(length):
        values[row, row] = values[row, row // 2] = 7
        values[length + row, row] = values[length + row, -1 - row // 2] = np.nan
    ours, theirs = Tensor(values), torch.tensor(values)
    for name in ("argmax", "argmin"):
        np.testing.assert_array_equal(getattr(ours, name)(1).numpy(), getattr(theirs, name)(1).numpy())
    for largest in (True, False):
        found, expected = ours.topk(length, 1, largest), theirs.topk(length, 1, largest)
        np.testing.assert_array_equal(found.values.numpy(), expected.values.numpy())
    order = theirs.sort(dim=1, stable=True).indices
    np.testing.assert_array_equal(ours.sort(1).indices.numpy(), order.numpy())


@pytest.mark.parametrize("equation", [
    "ij,jk->ik", "ij,jk", "bij,bjk->bik", "bhqd,bhkd->bhqk", "ij,ij->", "ij->ji", "ij->i", "i,j->ij", "bi,oi->bo",
    "bij,bkj->bik", "bij,j,bik->bk", "ab,cd->abcd", "abc,cab->bca", "ij,kj,kl->li", "ij,k->kj",
])  # fmt: skip
def test_einsum_is_pytorchs(equation):
    sizes = dict(zip("abcdijklhqo", (2, 3, 4, 2, 3, 4, 5, 2, 3, 4, 5), strict=True))
    terms = equation.partition("->")[0].split(",")
    arrays = [RNG.standard_normal([sizes[letter] for letter in term]).astype(np.float32) for term in terms]
    ours = [Tensor(x, requires_grad=True) for x in arrays]
    theirs = [torch.tensor(x, requires_grad=True) for x in arrays]
    result, expected = F.einsum(equation, *ours), torch.einsum(equation, *theirs)
    assert result.shape == tuple(expected.shape)
    np.testing.assert_allclose(result.numpy(), expected.detach().numpy(), rtol=1e-5, atol=1e-5)
    (result * result).sum().backward()
    (expected * expected).sum().backward()
    for own, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(own.grad.numpy(), other.grad.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("values", [X, TIED > 1, np.int32([3, -4])])
def test_a_clone_is_a_copy_of_any_type(values):
    x = Tensor(values)
    copied = x.clone()
    x.copy_from(np.zeros_like(values))
    assert np.array_equal(copied.numpy(), values) and copied.dtype == values.dtype
    assert np.array_equal(np.asarray(copied), values)


def test_one_hot_is_pytorchs():
    classes = np.array([[0, 3], [1, 1]])
    ours, theirs = F.one_hot(Tensor(classes), 5), torch.nn.functional.one_hot(torch.tensor(classes), 5)
    np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    assert F.one_hot(Tensor(classes)).shape == (2, 2, 4)


def test_a_replayed_step_of_them_repeats_them():
    x = Tensor(X)
    replay = Replay(
        no_grad()(lambda t: (t.exp() * (t > 0)).max(dim=1).values.cumsum(0) + F.where(t[:, 0] < 0, 1.0, 2.0))
    )
    expected = replay(x).numpy()
    for _ in range(3):
        assert np.array_equal(replay(x).numpy(), expected)
    x.copy_from(-X)
    assert not np.array_equal(replay(x).numpy(), expected)


def test_a_replay_notices_another_tensor_of_equal_value():
    around = Tensor(2.0)
    replay = Replay(no_grad()(lambda x: x * around))
    for _ in range(3):
        assert replay(Tensor([3.0])).item() == 6
    earlier, around = around, Tensor(2.0)
    around.copy_from(5.0)
    assert replay(Tensor([3.0])).item() == 15 and earlier.item() == 2


@pytest.mark.parametrize(("mistake", "words"), [
    (lambda x, n: n // 0, "floor_divide: expected to divide by other integers than 0, got 0"),
    (lambda x, n: (x > 0) // True, "floor_divide: expected a float32 tensor, got bool of shape"),
    (lambda x, n: x.div(2, rounding_mode="down"), "div: rounding_mode: expected None, 'floor' or 'trunc', got 'down'"),
    (lambda x, n: x % 0, "remainder: expected a number other than 0 or a tensor to divide by, got 0"),
    (lambda x, n: x & x, "&: expected a tensor of booleans, got float32; x != 0 is one"),
    (lambda x, n: x > X, ">: expected a tensor or a number, got ndarray; wrap arrays in Tensor(...)"),
    (lambda x, n: x**"2", "pow: exponent: expected a number or a tensor, got str"),
    (lambda x, n: x ** x[:2], "pow: shapes (3, 4, 5) and (2, 4, 5) do not broadcast"),
    (lambda x, n: n << 32, "<<: expected to shift by 0 to 31 bits, got 32"),
    (lambda x, n: n << 31, "integers must fit int32"),
    (lambda x, n: x << 1, "<<: expected integers, got float32 and int"),
    (lambda x, n: n.add_(0.5), "in place: expected a result of int32 of shape"),
    (lambda x, n: x.diff(9), "diff: expected more than 9 elements along axis -1, got shape (3, 4, 1)"),
    (lambda x, n: x.kthvalue(6), "kthvalue: k: expected 1 to 5, the dimension's size, got 6"),
    (lambda x, n: x.quantile(1.5), "quantile: q: expected a number from 0 to 1, got 1.5"),
    (lambda x, n: F.tensor_split(x, 9), "tensor_split: expected parts of 3 elements, got 9"),
    (lambda x, n: F.tensor_split(x, (2, 2)), "tensor_split: expected parts of 3 elements, got (2, 2)"),
    (lambda x, n: x.index_add(0, [3], x[:1]), "index_add: expected indices from 0 to 2, got 3 to 3"),
    (lambda x, n: x.index_add(0, [0], x), "index_add: expected a slice of (3, 4, 5) for each index, got shapes"),
    (lambda x, n: x.diagonal(9), "diagonal: offset: expected one within shape (3, 4), got 9"),
    (lambda x, n: F.cross(x[:2], x[:2]), "cross: expected 3 elements along axis -1, got shapes (2, 4, 5)"),
    (lambda x, n: F.tensordot(x, x, 1), "tensordot: dimensions 1 of shapes (3, 4, 5) and (3, 4, 5) are not of equal"),
    (lambda x, n: F.fold(x, 3, 2), "fold: expected [N, C * 4, 4] for these sizes, got shape (3, 4, 5)"),
    (lambda x, n: F.grid_sample(x, x), "grid_sample: expected [N, C, H, W] and [N, rows, columns, 2], got (3, 4, 5)"),
    (lambda x, n: F.soft_margin_loss(x, x, reduction="none "), "loss: expected reduction 'mean', 'sum' or 'none'"),
    (lambda x, n: F.multi_margin_loss(x[0], n, p=3), "multi_margin_loss: p: expected 1 or 2, got 3"),
    (lambda x, n: x.clamp(), "clamp: expected min, max or both, got neither"),
    (lambda x, n: x.topk(9), "topk: k: expected 1 to 5, the dimension's size, got 9"),
    (lambda x, n: x.max(dim=7), "max: axis 7 does not fit a tensor of shape (3, 4, 5)"),
    (lambda x, n: x.sum(dim=1, axis=1), "sum: expected dim or axis, got both"),
    (lambda x, n: x.masked_fill(n, 1.0), "masked_fill: mask: expected a tensor of booleans, got int32; x != 0 is one"),
    (lambda x, n: x.masked_fill(x.sum(0, True) > 0, x), "masked_fill: value: expected float or int, got Tensor"),
    (lambda x, n: x[:1].masked_fill(x > 0, 1.0), "expected booleans that broadcast to shape (1, 4, 5), got (3, 4, 5)"),
    (lambda x, n: x[x > 99].max(), "Extreme: expected one element or more, got a tensor of shape (0,)"),
    (lambda x, n: x[:0].argmax(0), "argmax: expected one element or more, got a tensor of shape (0, 4, 5)"),
    (lambda x, n: F.matmul(x[:, :0], x), "matmul: expected as many rows in b as columns in a"),
    (lambda x, n: F.cross_entropy(x[0, :0], n[:0]), "expected one element or more"),
    (lambda x, n: x[:0].item(), "item: expected a tensor of one element, got shape (0, 4, 5)"),
    (lambda x, n: x[[0, 3]], "index: expected indices from -3 to 2, got 3"),
    (lambda x, n: x[[0.5]], "index: expected integers for at most 3 dimensions, or one array of booleans"),
    (lambda x, n: x.expand(2, 4, 5), "expand: expected a shape to which (3, 4, 5) broadcasts, got (2, 4, 5)"),
    (lambda x, n: x.squeeze(3), "squeeze: axis 3 does not fit a tensor of shape (3, 4, 5)"),
    (lambda x, n: F.einsum("ij,jk", x, x), "einsum: expected a letter for each dimension of (3, 4, 5)"),
    (lambda x, n: F.einsum("abc,abd->cd", x, x[:2]), "einsum: expected one size of 'a', got 3 and 2"),
    (lambda x, n: F.einsum("...ab->a", x[0, 0]), "einsum: expected letters for each of 1 tensors, got '...ab->a'"),
    (lambda x, n: F.one_hot(x), "one_hot: expected int32 classes, got float32"),
    (lambda x, n: (x > 0).mean(), "mean: expected a float32 tensor, got bool of shape (3, 4, 5); x.float() is one"),
    (lambda x, n: bool(x > 0), "item: expected a tensor of one element, got shape (3, 4, 5)"),
    (lambda x, n: x.norm("nuc"), "norm: p: expected a number or 'fro', got 'nuc'"),
    (lambda x, n: F.softplus(x, 0), "softplus: expected a positive beta, got 0"),
    (lambda x, n: F.hardtanh(x, 2, 1), "hardtanh: expected min_val of at most max_val, got 2 and 1"),
    (lambda x, n: F.prelu(x, x[0, 0]), "prelu: weight: expected shape (1,) or (4,), got (5,)"),
    (lambda x, n: F.rms_norm(x, 4), "rms_norm: expected the last dimensions (4,), got shape (3, 4, 5)"),
    (lambda x, n: F.huber_loss(x, x, delta=0), "huber_loss: expected a positive delta, got 0"),
    (lambda x, n: F.l1_loss(x, x[0]), "l1_loss: expected two tensors of one shape, got (3, 4, 5) and (4, 5)"),
    (lambda x, n: nn.PReLU(0), "PReLU: expected num_parameters of at least 1, got 0"),
    (lambda x, n: F.where(x, x, x), "where: condition: expected a tensor of booleans, got float32; x != 0 is one"),
])  # fmt: skip
def test_mistakes_are_one_line(mistake, words):
    with pytest.raises(ArgumentError) as raised:
        mistake(Tensor(X), Tensor([1, 2]))
    assert words in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("operands", ["tensors", "divisor", "dividend"])
def test_quotients_rounded_down_are_pytorchs_also_by_infinity(operands):
    values = (math.inf, -math.inf, math.nan, 0.0, *RNG.normal(0, 9, 12).astype(np.float32).tolist(), 1e-30, -1e30)
    for b in values:
        for a in values if operands == "dividend" else [values]:
            results = []
            for made in (torch.tensor, lambda each: Tensor(np.float32(each))):
                first = a if operands == "dividend" else made(a)
                second = b if operands == "divisor" else made(b if operands == "dividend" else [b] * len(values))
                results.append((first // second).numpy())
            np.testing.assert_array_equal(*results, err_msg=f"{a} // {b}")
