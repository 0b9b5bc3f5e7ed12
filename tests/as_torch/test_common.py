"""Calls that scripts make often: integers, unbatched images, closures, names of layers; PyTorch's results."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from clcomm import as_torch
from clcomm.base.errors import ArgumentError
from clcomm.engine import functional as F

#: With n, m: integers [3, 4], floats x, y [3, 4], images b [2, 3, 6, 5], square s [3, 3] and rows r [4, 3, 5].
CALLS = (
    "n.argmax()", "n.argmax(1)", "n.argmin(0, True)", "n.max(1)[0]", "n.max(1)[1]", "n.min(0, True)[0]",
    "n.amax((0, 1))",
    "n.amin(1)", "n.cumsum(1)", "n.clamp(0, 3)", "n.clamp(min=1)", "n.clamp(0.5, 2.5)", "n.sum(dim=())", "n.max()",
    "t.cat([n, x])", "t.cat([x, n], 1)", "t.stack([n, x])", "t.cat([n > 0, n])", "t.cat([x, n > 0])", "t.cat([n, n])",
    "x % y", "t.remainder(x, -y)", "t.fmod(x, y)", "x // y", "3.0 % y", "n % (m + 9)", "n % y", "x % 0.7",
    "t.einsum('...ij,...jk->...ik', b, b.transpose(2, 3))", "t.einsum('ii', s)", "t.einsum('ii->i', s)",
    "t.einsum('...j,j->...', r, r[0, 0])", "t.einsum('i...,i...->...', r, r)", "t.einsum('...a->...', x)",
    "t.einsum('bij,...jk->b...ik', r, s.new_ones(5, 2))", "t.einsum('iji->j', b[:, :, :2, 0].permute(0, 1, 2))",
    "t.einsum('...ij,...ij->...', b, b[:1])", "t.einsum('...,...', x, y)", "t.einsum('ij,...', x, y)",
    "F.conv2d(b[0], t.ones(2, 3, 3, 3))", "F.conv1d(r[0], t.ones(2, 3, 3), padding=1)", "F.max_pool2d(b[0], 2)",
    "F.conv_transpose2d(b[0], t.ones(3, 2, 2, 2), stride=2)", "F.avg_pool2d(b[0], 2, 1)", "F.max_pool1d(r[0], 2)",
    "F.adaptive_avg_pool2d(b[0], 2)", "F.adaptive_max_pool1d(r[0], 3)", "F.conv3d(b, t.ones(1, 2, 2, 2, 2))",
    "x[1, [0, 2]]", "b[1, :, [0, 2]]", "b[0, :, :, [1, 0]]", "b[:, 1, :, [0, 2]]", "b[[0, 1], :, [0, 2]]",
    "b[0, ..., [1]]",
    "t.tensor([7.0, 49.0, 41.0]) / 49", "t.ones(49).mean()", "t.full((7, 7), 0.1).mean()", "t.ones(41).var()",
)  # fmt: skip


def arrays():
    rng = np.random.default_rng(3)
    return {
        "n": rng.integers(-5, 9, (3, 4)), "m": rng.integers(0, 4, (3, 4)),
        **{name: rng.standard_normal(shape).astype(np.float32) for name, shape in (
            ("x", (3, 4)), ("y", (3, 4)), ("b", (2, 3, 6, 5)), ("s", (3, 3)), ("r", (4, 3, 5)))},
    }  # fmt: skip


def test_common_calls_are_pytorchs(torch):
    for text in CALLS:
        ours, theirs = (
            eval(text, {"t": library, "F": functions, **{k: library.tensor(v) for k, v in arrays().items()}})
            for library, functions in ((as_torch, F), (torch, torch.nn.functional))
        )
        assert ours.shape == tuple(theirs.shape), text
        assert (ours.dtype == np.float32) == theirs.dtype.is_floating_point, text
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), 1e-5, 1e-6, err_msg=text)


def test_numbers_divide_by_themselves(torch):
    numbers = np.arange(1, 400, dtype=np.float32)
    for divisor in (3, 7, 49, 0.1, 1e-40, 1e30):
        for library in (as_torch, as_torch.jit.script):
            divide = (
                (lambda x, d=divisor: (x + 0.0) / d)
                if library is as_torch
                else library(lambda x, d=divisor: (x + 0.0) / d)
            )
            assert np.array_equal(divide(as_torch.tensor(numbers)).numpy(), (torch.tensor(numbers) / divisor).numpy())
    assert all((as_torch.tensor([n]) / int(n)).item() == 1 for n in numbers)
    assert all(as_torch.ones(int(n)).mean().item() == 1 for n in numbers[::7])


def test_a_drawn_index_is_pytorchs(torch):
    rng, x = np.random.default_rng(5), np.arange(120, dtype=np.float32).reshape(2, 3, 4, 5)
    compared = 0
    for _ in range(400):
        rows = [int(each) for each in rng.integers(0, 2, rng.integers(1, 4))]
        parts = (0, -1, slice(None), slice(0, 2), rows, rows[::-1], None, np.array(1))
        index = [parts[each] for each in rng.integers(0, len(parts), rng.integers(1, 5))]
        if rng.integers(3) == 0:
            index.insert(int(rng.integers(len(index) + 1)), ...)
        try:
            expected = torch.tensor(x)[tuple(torch.tensor(e) if isinstance(e, np.ndarray) else e for e in index)]
        except IndexError:
            continue
        compared += 1
        assert np.array_equal(as_torch.tensor(x)[tuple(index)].numpy(), expected.numpy()), index
        written, reference = as_torch.tensor(x), torch.tensor(x)
        written[tuple(index)] = -1.0
        reference[tuple(index)] = -1.0
        assert np.array_equal(written.numpy(), reference.numpy()), index
    assert compared > 200


def test_a_generator_that_is_seeded_is_the_one_that_draws(torch):
    parts = [
        [list(each.indices) for each in split(list(range(10)), [7, 3], generator=generator().manual_seed(7))]
        for split, generator in ((as_torch.data.random_split, as_torch.Generator),
                                 (torch.utils.data.random_split, torch.Generator))
    ]  # fmt: skip
    assert parts[0] == parts[1]
    assert (
        as_torch.manual_seed(3).uniform((2,), 0.0, 1.0).tolist()
        == torch.rand(2, generator=torch.manual_seed(3)).tolist()
    )


@pytest.mark.parametrize("values", [[3e9], [1.0, -3e9], [float("nan")], [float("inf"), 1.0]])
def test_floats_that_int32_has_not_are_no_integers(values):
    with pytest.raises(ArgumentError, match=r"^int: expected floats within int32 to convert, got others, or NaN$"):
        as_torch.tensor(values).long().numpy()
    assert as_torch.tensor([2.9, -2.9, 2147483520.0]).long().tolist() == [2, -2, 2147483520]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16])
def test_integers_that_would_wrap_are_refused(dtype):
    with pytest.raises(ArgumentError, match="dtype: expected float32, int32 or bool"):
        as_torch.tensor([300], dtype=dtype)


def test_tied_weights_have_both_names(torch):
    def made(library):
        class Tied(library.nn.Module):
            def __init__(self):
                super().__init__()
                self.table, self.head = library.nn.Embedding(5, 3), library.nn.Linear(3, 5, bias=False)
                self.head.weight = self.table.weight

        return Tied()

    ours, theirs = made(as_torch), made(torch)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict({name: value.numpy() for name, value in theirs.state_dict().items()})
    assert np.array_equal(ours.head.weight.numpy(), theirs.table.weight.detach().numpy())
    assert len(list(ours.parameters())) == 1
    ours.load_state_dict({"table.weight": np.ones((5, 3), np.float32)})  # as before there were both
    assert ours.head.weight.numpy().all()
    with pytest.raises(ArgumentError, match="missing"):
        ours.load_state_dict({})


def test_a_closure_and_named_layers_train_as_in_pytorch(torch):
    def trained(library):
        library.manual_seed(1)
        nn = library.nn
        model = nn.Sequential(OrderedDict(first=nn.Linear(4, 3), act=nn.ReLU(), last=nn.Linear(3, 1)))
        optimizer, x = library.optim.SGD(model.parameters(), lr=0.1), library.tensor(arrays()["x"])

        def closure():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]
        return losses, list(model.state_dict()), model.first.weight.detach().numpy()

    (losses, names, weight), (their_losses, their_names, their_weight) = trained(as_torch), trained(torch)
    assert names == their_names and losses == pytest.approx(their_losses, rel=1e-5)
    np.testing.assert_allclose(weight, their_weight, 1e-5)
