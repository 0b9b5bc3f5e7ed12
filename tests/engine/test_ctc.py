"""Connectionist temporal classification against PyTorch: empty, repeated and impossible targets, errors."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import CTCLoss, Replay, Tensor
from clcomm.engine import functional as F
from tests.engine.values import drawn

STEPS, CLASSES = 9, 4
#: Repeated labels, padding that repeats, none, and in the last sample more than the steps have room for.
TARGETS = np.array([[1, 2, 3, 1], [1, 1, 2, 2], [3, 3, 3, 3], [2, 1, 1, 1], [1, 1, 1, 1]])
LENGTHS, COUNTS = np.array([4, 4, 2, 0, 4]), np.array([9, 6, 9, 7, 4])


@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("form", ["padded", "one after the other", "no log_softmax"])
def test_losses_and_gradients_are_pytorchs(torch, device, zero_infinity, reduction, form):
    values = drawn(0, STEPS, 5, CLASSES)
    x, other = Tensor(values, device, requires_grad=True), torch.tensor(values, requires_grad=True)
    given = [x, other] if form == "no log_softmax" else [x.log_softmax(2), other.log_softmax(2)]
    joined = np.concatenate([labels[:n] for labels, n in zip(TARGETS, LENGTHS, strict=True)])
    targets = joined if form == "one after the other" else TARGETS
    y = CTCLoss(0, reduction, zero_infinity)(given[0], targets, COUNTS, LENGTHS)
    z = torch.nn.CTCLoss(0, reduction, zero_infinity)(given[1], *map(torch.tensor, (targets, COUNTS, LENGTHS)))
    weights = np.float32([1, 2, 3, 4, 5]) if reduction == "none" else np.float32(2)
    (y * Tensor(weights, device)).sum().backward()
    (z * torch.tensor(weights)).sum().backward()
    np.testing.assert_allclose(y.numpy(), z.detach().numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(x.grad.numpy(), other.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_one_sample_and_a_replay(torch, device):
    values = drawn(1, STEPS, CLASSES)
    loss = F.ctc_loss(Tensor(values, device), TARGETS[0], STEPS, 4, blank=0, reduction="none")
    expected = torch.nn.functional.ctc_loss(
        torch.tensor(values), torch.tensor(TARGETS[0]), torch.tensor(STEPS), torch.tensor(4), reduction="none"
    )
    assert loss.shape == () and loss.item() == pytest.approx(expected.item(), rel=1e-5)
    integers = [Tensor(each, device) for each in (TARGETS, COUNTS, LENGTHS)]
    run = Replay(lambda x, *given: F.ctc_loss(x, *given, zero_infinity=True))
    for number in range(4):
        x = Tensor(drawn(number, STEPS, 5, CLASSES), device)
        assert run(x, *integers).item() == F.ctc_loss(x, *integers, zero_infinity=True).item()
    assert run.replayed > 0, run.refusal
    joined = Tensor(np.concatenate([labels[:n] for labels, n in zip(TARGETS, LENGTHS, strict=True)]), device)
    before = run.replayed
    for number in range(8):  # of which the longest decides how much memory there is
        lengths = Tensor(np.minimum(LENGTHS, 1 + number % 2) if number > 3 else LENGTHS, device)
        x = Tensor(drawn(number, STEPS, 5, CLASSES), device)
        expected = F.ctc_loss(x, joined, integers[1], lengths, zero_infinity=True).item()
        assert run(x, joined, integers[1], lengths).item() == expected
    assert run.replayed > before and run.refusal is None


def test_what_does_not_fit_is_refused_or_nan(device):
    x = Tensor(drawn(0, STEPS, 5, CLASSES), device)
    for given, said in (
        ((TARGETS + 3, COUNTS, LENGTHS), "targets: expected integers from 0 to 3, got 4"),
        ((TARGETS, COUNTS + 1, LENGTHS), "input_lengths: expected integers from 0 to 9, got 10"),
        ((TARGETS, COUNTS, LENGTHS + 1), "target_lengths: expected integers from 0 to 4"),
        ((TARGETS, COUNTS[:4], LENGTHS), "expected 5 lengths"),
        ((TARGETS, COUNTS, LENGTHS, 4), "blank: expected a class from 0 to 3"),
    ):
        with pytest.raises(ArgumentError, match=said):
            F.ctc_loss(x, *given)
    losses = F.ctc_loss(x, TARGETS, COUNTS, LENGTHS, blank=3, reduction="none").numpy()
    assert np.isnan(losses).tolist() == [True, False, True, False, False]  # a label that is the blank
