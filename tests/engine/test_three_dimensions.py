"""Layers of volumes, of windows and of bags against PyTorch: values, gradients of inputs and of parameters."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Replay, Tensor, nn
from clcomm.engine import functional as F
from tests.engine.values import assert_close, drawn

VOLUMES = drawn(0, 2, 4, 5, 6, 7)


def assert_alike(torch, ours, theirs, values: np.ndarray) -> None:
    """Compare a function of both libraries: its values, its gradient, and those of a layer's parameters."""
    x, other = Tensor(values, requires_grad=True), torch.tensor(values, requires_grad=True)
    y, z = ours(x), theirs(other)
    assert_close(y.numpy(), z.detach().numpy())
    (y * Tensor(drawn(9, *y.shape))).sum().backward()
    (z * torch.tensor(drawn(9, *y.shape))).sum().backward()
    assert_close(x.grad.numpy(), other.grad.numpy())
    if isinstance(ours, nn.Module):
        for parameter, tensor in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert_close(parameter.grad.numpy(), tensor.grad.numpy())


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_by_their_offsets_are_pytorchs(torch, mode):
    ours, theirs = (library.EmbeddingBag(9, 3, mode=mode) for library in (nn, torch.nn))
    ours.load_state_dict({"weight": theirs.weight.detach().numpy()})
    indices, offsets = np.array([1, 8, 8, 0, 3, 3, 2, 5, 5, 5, 7]), np.array([0, 3, 3, 7])
    y, z = ours(Tensor(indices), Tensor(offsets)), theirs(torch.tensor(indices), torch.tensor(offsets))
    y.square().sum().backward()
    z.square().sum().backward()
    assert_close(y.numpy(), z.detach().numpy())
    assert_close(ours.weight.grad.numpy(), theirs.weight.grad.numpy())
    with pytest.raises(ArgumentError, match=r"offsets: expected some from 0 up to 11, got \[0, 12\]"):
        ours(Tensor(indices), [0, 12])


def test_columns_of_windows_and_additions_at_indices_are_pytorchs(torch):
    index, source = np.random.default_rng(1).integers(0, 6, (3, 4, 7)), drawn(2, 3, 4, 7)
    for ours, theirs, values in (
        (lambda x: F.unfold(x, (2, 3), 1, 1, 2), lambda x: torch.nn.functional.unfold(x, (2, 3), 1, 1, 2),
         VOLUMES[:, :, 0]),
        (nn.AdaptiveMaxPool1d(3), torch.nn.AdaptiveMaxPool1d(3), VOLUMES[0, :, 0]),
        (lambda x: x.scatter_add(1, Tensor(index), Tensor(source)),
         lambda x: x.scatter_add(1, torch.tensor(index), torch.tensor(source)), VOLUMES[0, 0]),
        (lambda x: Tensor(VOLUMES[0, 0]).scatter_add(1, Tensor(index), x),
         lambda x: torch.tensor(VOLUMES[0, 0]).scatter_add(1, torch.tensor(index), x), source),
    ):  # fmt: skip
        assert_alike(torch, ours, theirs, values)
    with pytest.raises(ArgumentError, match="scatter_add: expected indices from 0 to 5, got 6"):
        Tensor(VOLUMES[0, 0]).scatter_add(1, Tensor(index + 1), Tensor(source))


def test_a_replayed_step_of_volumes_has_the_bits_of_the_plain_one():
    found = []
    for is_replayed in (False, True):
        nn.manual_seed(3)
        model = nn.Sequential(nn.Conv3d(4, 6, 3, 2, 1), nn.ReLU(), nn.ConvTranspose3d(6, 2, 2, 2), nn.MaxPool3d(2))
        space = model.flat_space()

        def step(x, model=model, space=space):
            space.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        run = Replay(step) if is_replayed else step
        losses = [run(Tensor(VOLUMES * k)).item() for k in (1, 2, 3, 4)]
        found.append((losses, [p.grad.numpy().tobytes() for p in model.parameters()]))
    assert run.replayed > 0 and found[0] == found[1]
