"""The GPT against PyTorch's of the same parameters, its replayed steps, its sizes, and what it sees."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import optim
from clcomm.base.errors import ArgumentError
from clcomm.engine import RandomStream, Replay, Tensor, no_grad
from clcomm.engine.device import Device
from clcomm.insight.summary import summarize
from models import GPT
from models.gpt import next_token_loss
from tests.helpers import cpu_device

SIZES = {"vocabulary": 23, "context": 40, "layers": 2, "width": 24, "heads": 3}


@pytest.fixture(scope="module")
def device() -> Device:
    return cpu_device("cpu")


def batch_of(number: int, rows: int = 3, length: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens that follow a rule with some noise, and the ones that come next."""
    rng = np.random.default_rng(number)
    starts, noise = rng.integers(0, 23, (rows, 1)), rng.integers(0, 2, (rows, length + 1))
    text = ((starts + 5 * np.arange(length + 1) + noise) % 23).astype(np.int32)
    return text[:, :-1], text[:, 1:]


def losses_of(model: GPT, device: Device, steps: int, replayed: bool) -> list[float]:
    model.flat_space()
    optimizer = optim.AdamW(model, lr=3e-3)

    def forward_and_backward(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = next_token_loss(model(tokens), targets)
        loss.backward()
        return loss

    run = Replay(forward_and_backward) if replayed else forward_and_backward
    losses = []
    for number in range(steps):
        losses.append(run(*(Tensor(array, device) for array in batch_of(number))).item())
        optimizer.step()
        optimizer.zero_grad()
    if replayed:
        assert run.replayed >= steps - 4
    return losses


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_losses_are_pytorchs_from_the_same_parameters(device, tied, approximate):
    torch = pytest.importorskip("torch")
    from training.engines import torch_gpt

    model = GPT(**SIZES, tied=tied, approximate=approximate, device=device, seed=1)
    twin = torch_gpt.TorchGPT(**SIZES, tied=tied, approximate=approximate)
    state = model.state_dict()
    assert list(state) == list(twin.state_dict())
    twin.load_state_dict({name: torch.tensor(values) for name, values in state.items()})
    optimizer = torch.optim.AdamW(twin.parameters(), lr=3e-3)
    expected = []
    for number in range(12):
        tokens, targets = (torch.tensor(array).long() for array in batch_of(number))
        loss = torch_gpt.next_token_loss(twin(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    losses = losses_of(model, device, 12, replayed=True)
    np.testing.assert_allclose(losses, expected, rtol=2e-4)
    assert losses[-1] < 0.9 * losses[0]


def test_replayed_steps_have_the_bits_of_plain_ones(device):
    plain, replayed = (
        losses_of(GPT(**SIZES, device=device, seed=2), device, 12, replayed) for replayed in (False, True)
    )
    assert plain == replayed


def test_dropout_is_drawn_in_training_alone_and_in_each_replayed_step_anew(device):
    model, whole = (GPT(**SIZES, dropout=share, device=device, seed=2) for share in (0.5, 0.0))
    tokens = Tensor(batch_of(0)[0], device)
    assert model.state_dict().keys() == whole.state_dict().keys()
    drawn, other, evaluated = model(tokens).numpy(), model(tokens).numpy(), model.eval()(tokens).numpy()
    assert len({each.tobytes() for each in (drawn, other, evaluated)}) == 3
    assert evaluated.tobytes() == whole(tokens).numpy().tobytes()
    found = []
    for replayed in (False, True):
        RandomStream.of(device).seed(7)
        found.append(losses_of(GPT(**SIZES, dropout=0.2, device=device, seed=2), device, 12, replayed))
    assert found[0] == found[1] != losses_of(GPT(**SIZES, device=device, seed=2), device, 12, replayed=True)


def test_a_seed_gives_the_same_values_and_another_others(device):
    first, second, third = (GPT(**SIZES, device=device, seed=seed).state_dict() for seed in (3, 3, 4))
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert not np.array_equal(first["transformer.wte.weight"], third["transformer.wte.weight"])
    assert abs(first["transformer.wte.weight"].std() - 0.02) < 0.002
    assert abs(first["transformer.h.0.mlp.c_proj.weight"].std() - 0.01) < 0.001  # divided by the root of 2 layers
    assert not first["transformer.h.1.attn.c_attn.bias"].any()


def test_a_prediction_does_not_see_what_comes_later(device):
    model = GPT(**SIZES, device=device, seed=5)
    tokens, _ = batch_of(0)
    changed = tokens.copy()
    changed[:, 25:] = (changed[:, 25:] + 7) % 23
    with no_grad():
        whole, other, part = (model(Tensor(each, device)).numpy() for each in (tokens, changed, tokens[:, :25]))
    np.testing.assert_array_equal(whole[:, :25], other[:, :25])
    np.testing.assert_allclose(part, whole[:, :25], rtol=1e-4, atol=1e-6)
    assert not np.array_equal(whole[:, 25:], other[:, 25:])


def test_its_layers_can_be_listed(device):
    model = GPT(**SIZES, device=device, seed=0)
    summary = summarize(model, (2, 40))
    assert sum(len(layer.parameters) for layer in summary.layers) == len(list(model.parameters()))
    products = 2 * 40 * (24 * 24 * 12 * 2 + 24 * 23)  # of a sample: the layers' and the head's
    attention = 2 * 2 * 40 * 40 * 24 * 2
    assert sum(layer.forward_flops for layer in summary.layers) == products + attention


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, "heads: expected a number that divides the width 24, got 5"),
        ({"layers": 0}, "layers: expected a whole number of at least 1, got 0"),
        ({"width": 2.5}, "width: expected a whole number of at least 1, got 2.5"),
        ({"dropout": 1.5}, "Dropout: expected p from 0 to 1, got 1.5"),
    ],
)
def test_wrong_sizes(device, change, message):
    with pytest.raises(ArgumentError) as caught:
        GPT(**{**SIZES, **change}, device=device)
    assert str(caught.value) == message


def test_too_many_tokens(device):
    with pytest.raises(ArgumentError, match=r"tokens: expected \[N, T\] with T up to 40, got shape \(1, 41\)"):
        GPT(**SIZES, device=device)(Tensor(np.zeros((1, 41), np.int32), device))
