"""Labels, indices and lengths that come late: a replayed step does with them what a plain one does, errors included."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Embedding, Linear, Replay, Tensor
from clcomm.engine import functional as F
from clcomm.optim import SGD

_DRAWS = int(os.environ.get("CLCOMM_LATE_CASES", "1"))
_STEPS, _ROWS, _CLASSES = 22, 4, 5

Loss = Callable[[Linear, Tensor, Tensor], Tensor]


def _places(m: Linear, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m(x).reshape(2, 2, _CLASSES).transpose(1, 2), y.reshape(2, 2))


_LENGTHS: dict[object, tuple[Tensor, Tensor]] = {}  # by device


def _paths(m: Linear, x: Tensor, y: Tensor, lengths: Tensor | None = None) -> Tensor:
    scores = F.log_softmax(m(x), -1).reshape(_ROWS, 1, _CLASSES)
    labels, steps = _LENGTHS[x.device]
    return F.ctc_loss(scores, y, steps, labels if lengths is None else lengths, zero_infinity=True)


#: By name: a loss of a model, its input and integers, and the integers that come late.
DECISIONS: dict[str, tuple[Loss, list[int]]] = {
    "cross_entropy": (lambda m, x, y: F.cross_entropy(m(x), y), [-100, 5, -1, 99]),
    "places": (_places, [-100, 5, -7]),
    "sum": (lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum"), [-100, 6]),
    "ignore_index": (lambda m, x, y: F.cross_entropy(m(x), y, ignore_index=7), [7, 8, -100]),
    "smoothed": (lambda m, x, y: F.cross_entropy(m(x), y, label_smoothing=0.1), [-100, 5]),
    "nll_loss": (lambda m, x, y: F.nll_loss(F.log_softmax(m(x), -1), y), [-100, 5, -2]),
    "reshaped": (lambda m, x, y: F.cross_entropy(m(x), y.reshape(2, 2).reshape(-1)), [-100, 5]),
    "embedding": (lambda m, x, y: (F.embedding(y, m.weight).square().mean() + m(x).mean()), [5, -1, 4]),
    "scatter_add": (
        lambda m, x, y: F.scatter_add(m(x), 1, y.reshape(-1, 1), m(x)[:, 1:2]).square().mean(), [5, -1, 4]
    ),
    "gather": (lambda m, x, y: F.gather(m(x), 1, y.reshape(-1, 1)).square().mean(), [4, 5]),
    "index_select": (lambda m, x, y: F.index_select(m(x), 1, y).square().mean(), [4, 5]),
    "picked": (lambda m, x, y: m(x)[:, y].square().mean(), [4, 5, -1]),
    "compared": (lambda m, x, y: F.masked_fill(m(x), (y == 4).unsqueeze(1), 0.5).square().mean(), [4, -100]),
    "read": (lambda m, x, y: m(x).square().mean() * (2.0 if y.numpy().min() < 0 else 1.0), [-1]),
    "labels of paths": (lambda m, x, y: _paths(m, x, y.reshape(1, -1)), [5, -1, 4]),
}  # fmt: skip


def outcome(step: Callable, *args: Tensor) -> list[np.ndarray] | str:
    """Return the loss and the gradients of a step, or its error."""
    try:
        loss = step(*args)
        return [loss.numpy(), *(each.grad.numpy() for each in step.model.parameters())]
    except ArgumentError as error:
        return str(error)
    finally:
        step.model.zero_grad()


class Step:
    """A forward and a backward of a model, which two of them have the same of."""

    def __init__(self, device, loss: Callable):
        self.loss, self.model = loss, Linear(3, _CLASSES, device=device)
        rng = np.random.default_rng(1)
        for parameter in self.model.parameters():
            parameter.copy_from(rng.normal(size=parameter.shape))
        self.model.flat_space()
        _LENGTHS[device] = Tensor([2], device), Tensor([_ROWS], device)

    def __call__(self, *args: Tensor) -> Tensor:
        loss = self.loss(self.model, *args)
        loss.backward()
        return loss


class Replayed:
    """A step that is replayed."""

    def __init__(self, step: Step):
        self.model, self.replay = step.model, Replay(step)

    def __call__(self, *args: Tensor) -> Tensor:
        return self.replay(*args)


def same(found: list[np.ndarray] | str, expected: list[np.ndarray] | str) -> bool:
    if isinstance(found, str) or isinstance(expected, str):
        return found == expected
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", DECISIONS)
def test_a_late_value_does_in_a_replayed_step_what_it_does_in_a_plain_one(device, name):
    loss, late = DECISIONS[name]
    for draw in range(_DRAWS):
        rng = np.random.default_rng([draw, len(name)])
        plain, replayed = Step(device, loss), Replayed(Step(device, loss))
        comes = dict(zip(rng.choice(np.arange(8, _STEPS - 2), len(late), replace=False).tolist(), late, strict=True))
        for number in range(_STEPS):
            x = Tensor(rng.normal(size=(_ROWS, 3)), device)
            integers = rng.integers(1, 4, _ROWS).astype(np.int32)
            if number in comes:
                integers[rng.integers(_ROWS)] = comes[number]
            expected = outcome(plain, x, Tensor(integers, device))
            found = outcome(replayed, x, Tensor(integers, device))
            assert same(found, expected), (number, integers, found, expected)
        assert replayed.replay.replayed > 8 or replayed.replay.refusal, "it was never replayed"


def test_lengths_that_decide_how_much_memory_there_is(device):
    plain, replayed = Step(device, _paths), Replayed(Step(device, _paths))
    for number in range(_STEPS):
        x = Tensor(np.random.default_rng(number).normal(size=(_ROWS, 3)), device)
        args = x, Tensor([1, 2, 3], device), Tensor([1 + (number > 9) + (number > 14) + (number == 18)], device)
        assert same(outcome(replayed, *args), outcome(plain, *args)), number
    assert replayed.replay.replayed > 4 and replayed.replay.refusal is None


def test_labels_that_are_no_argument(device):
    labels = Tensor([1, 2, 3, 1], device)
    loss = lambda m, x: F.cross_entropy(m(x), labels.reshape(-1))  # noqa: E731
    plain, replayed = Step(device, loss), Replayed(Step(device, loss))
    for number in range(_STEPS):
        x = Tensor(np.random.default_rng(number).normal(size=(_ROWS, 3)), device)
        labels.copy_from({12: [1, -100, 0, 1], 15: [1, 5, 0, 1], 18: [-1, 4, 0, 1]}.get(number, [number % 5, 2, 3, 1]))
        assert same(outcome(replayed, x), outcome(plain, x)), number
    assert replayed.replay.replayed > 8


def test_integers_that_an_operation_overwrote_are_no_longer_known(device):
    scores, labels = Tensor(np.zeros((2, 3)), device), Tensor([1, 9], device)
    other = labels.reshape(2)
    labels -= 7
    labels += 7 - 8
    assert labels.numpy().tolist() == [-7, 1]
    for each in (labels, other):
        with pytest.raises(ArgumentError, match="targets must be 0 to 2, got -7"):
            F.cross_entropy(scores, each).item()
    np.asarray(labels)[:] = [1, 2]  # through memory that is shared, where it is
    if device.shares_host_memory:
        assert np.isfinite(F.cross_entropy(scores, labels).item())


#: Elements of a table [5, 3] at the indices [2], whose gradients are finite whatever the indices are.
PICKED = {
    "embedding": lambda t, i: F.embedding(i, t), "gather": lambda t, i: F.gather(t, 0, i.reshape(2, 1)),
    "each of a slice": lambda t, i: F.gather(t, 0, i.reshape(2, 1).expand(2, 3)),
    "index_select": lambda t, i: F.index_select(t, 0, i),
    "picked of an index": lambda t, i: F.index_select(t.reshape(15), 0, i),
}  # fmt: skip
USES = {
    "step": lambda table, optimizer: optimizer.step(), "read": lambda table, _: table.weight.grad.numpy(),
    "norm": lambda table, _: (table.weight.grad * 2.0).square().sum().item(),
}  # fmt: skip


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", PICKED)
def test_an_index_of_nothing_that_the_device_alone_knows_is_named_where_its_gradients_are_used(device, name, use):
    count = 15 if name == "picked of an index" else 5
    for outside in (count, -1):
        table = Embedding(5, 3, device=device)
        optimizer = SGD(table, 0.1)
        PICKED[name](table.weight, F.to_int(Tensor([1.0, 4.0], device))).sum().backward()
        USES[use](table, optimizer)
        optimizer.zero_grad()
        before = table.weight.numpy()
        PICKED[name](table.weight, F.to_int(Tensor([1.0, outside], device))).sum().backward()
        with pytest.raises(ArgumentError) as caught:
            USES[use](table, optimizer)
        assert str(caught.value) == f"index: expected 0 to {count - 1}, got {outside}"
        np.testing.assert_array_equal(table.weight.numpy(), before)


def test_a_class_outside_that_the_device_alone_knows_has_no_row_of_zeros(device):
    assert F.one_hot(F.to_int(Tensor([2.0], device)), 3).numpy().tolist() == [[0, 0, 1]]
    with pytest.raises(ArgumentError, match=r"^one_hot: expected classes from 0 to 2, got 3$"):
        F.one_hot(F.to_int(Tensor([3.0], device)), 3)
