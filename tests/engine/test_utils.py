"""The gradients' norms and limits of clcomm.engine.nn.utils, as PyTorch's."""

from __future__ import annotations

import math

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Tensor
from clcomm.engine.nn import utils
from tests.engine.values import drawn


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("limit", [0.5, 1e3])
def test_clipping_is_pytorchs(torch, device, limit, norm_type):
    both = []
    for make in (lambda v: Tensor(v, device, requires_grad=True), lambda v: torch.tensor(v, requires_grad=True)):
        leaves = [make(drawn(number, 3, 5)) for number in range(3)]
        (leaves[0] * leaves[1]).sum().backward()
        both.append(leaves)
    norms = [
        each.clip_grad_norm_(leaves, limit, norm_type).item()
        for each, leaves in zip((utils, torch.nn.utils), both, strict=True)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    for each, leaves in zip((utils, torch.nn.utils), both, strict=True):
        each.clip_grad_value_(leaves[0], 0.1)
    for ours, theirs in zip(*[leaves[:2] for leaves in both], strict=True):
        np.testing.assert_allclose(ours.grad.numpy(), theirs.grad.numpy(), rtol=1e-6)


def test_a_norm_that_is_not_finite_can_be_refused(device):
    x = Tensor([1.0, 2.0], device, requires_grad=True)
    x.grad = Tensor([np.inf, 1.0], device)
    with pytest.raises(ArgumentError, match="expected a finite norm of the gradients, got inf"):
        utils.clip_grad_norm_(x, 1.0, error_if_nonfinite=True)
    assert x.grad.numpy().tolist() == [np.inf, 1.0]
