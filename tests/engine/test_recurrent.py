"""RNN, LSTM, GRU and their cells against PyTorch's, with its weights: results, states and gradients."""

from __future__ import annotations

import itertools

import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Tensor, manual_seed, nn
from clcomm.engine.device import Device
from clcomm.engine.nn.utils import rnn
from tests.engine.values import assert_close, drawn

KINDS = {"RNN": {}, "RNN relu": {"nonlinearity": "relu"}, "LSTM": {}, "GRU": {}}
LAYOUTS = [
    {},
    {"num_layers": 2, "bidirectional": True},
    {"batch_first": True, "bias": False},
    {"batch_first": True, "num_layers": 3},
]


def made(torch, device, kind, *sizes, cell="", **more):
    """Return our layer and PyTorch's, of the same weights."""
    name, named = kind.split()[0] + cell, {**KINDS[kind], **more}
    theirs = getattr(torch.nn, name)(*sizes, **named)
    ours = getattr(nn, name)(*sizes, device=device, **named)
    ours.load_state_dict({key: value.numpy() for key, value in theirs.state_dict().items()})
    return ours, theirs


def flat(result):
    parts = (result,) if not isinstance(result, tuple) else itertools.chain.from_iterable(map(flat, result))
    return list(parts)


def compare(torch, device, ours, theirs, x, *states):
    """Compare all results, and all gradients of their sum weighed at random."""
    own, other = ([make(each) for each in (x, *states)] for make in (
        lambda v: Tensor(v, device, requires_grad=True), lambda v: torch.tensor(v, requires_grad=True)))  # fmt: skip
    results = []
    for layer, (first, *rest) in ((ours, own), (theirs, other)):
        hx = (None if not rest else rest[0] if len(rest) == 1 else tuple(rest),)
        results.append(flat(layer(first, *hx)))
    assert len(results[0]) == len(results[1])
    totals = [0, 0]
    for number, (actual, expected) in enumerate(zip(*results, strict=True)):
        assert_close(actual.numpy(), expected.detach().numpy())
        factor = drawn(50 + number, *actual.shape)
        totals[0] = (actual * Tensor(factor, device)).sum() + totals[0]
        totals[1] = (expected * torch.tensor(factor)).sum() + totals[1]
    for total in totals:
        total.backward()
    for actual, expected in zip(own, other, strict=True):
        assert_close(actual.grad.numpy(), expected.grad.numpy())
    gradients = {name: p.grad.numpy() for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert_close(parameter.grad.numpy(), gradients[name])


@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_pytorchs(torch, device, kind, layout, has_states):
    ours, theirs = made(torch, device, kind, 5, 13, **layout)
    x = drawn(1, *((4, 7, 5) if "batch_first" in layout else (7, 4, 5)))
    rows = layout.get("num_layers", 1) * (1 + ("bidirectional" in layout))
    states = [drawn(2 + n, rows, 4, 13) for n in range(2 if kind == "LSTM" else 1)] if has_states else []
    compare(torch, device, ours, theirs, x, *states)


@pytest.mark.parametrize("kind", KINDS)
def test_one_sequence_and_a_cell_are_pytorchs(torch, device, kind):
    states = 2 if kind == "LSTM" else 1
    compare(
        torch, device, *made(torch, device, kind, 3, 8), drawn(1, 6, 3), *[drawn(2 + n, 1, 8) for n in range(states)]
    )
    for shape in ((5,), ()):
        compare(torch, device, *made(torch, device, kind, 3, 8, cell="Cell"), drawn(1, *shape, 3))
        hx = [drawn(2 + n, *shape, 8) for n in range(states)]
        compare(torch, device, *made(torch, device, kind, 3, 8, cell="Cell"), drawn(1, *shape, 3), *hx)


@pytest.mark.parametrize("lengths", [[6, 5, 5, 1], [2, 5, 1, 4]])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_are_pytorchs(torch, device, kind, lengths):
    ours, theirs = made(torch, device, kind, 3, 9, num_layers=2, bidirectional=True)
    is_sorted, packing = lengths[0] == 6, torch.nn.utils.rnn

    def run(layer, utils):
        def call(x, hx=None):
            packed = utils.pack_padded_sequence(x, lengths, enforce_sorted=is_sorted)
            y, last = layer(packed, hx)
            padded, kept = utils.pad_packed_sequence(y, padding_value=7.0, total_length=8)
            assert kept.numpy().tolist() == lengths
            return padded, y.data, packed.data, last

        return call

    class Both:  # `compare` asks for the parameters
        def __init__(self, layer, utils):
            self.named_parameters, self.call = layer.named_parameters, run(layer, utils)

        def __call__(self, *args):
            return self.call(*args)

    states = [drawn(2 + n, 4, 4, 9) for n in range(2 if kind == "LSTM" else 1)]
    compare(torch, device, Both(ours, rnn), Both(theirs, packing), drawn(1, 7, 4, 3), *states)
    packed = rnn.pack_padded_sequence(Tensor(drawn(1, 7, 4, 3), device), lengths, enforce_sorted=is_sorted)
    expected = packing.pack_padded_sequence(torch.zeros(7, 4, 3), lengths, enforce_sorted=is_sorted)
    assert packed.batch_sizes.numpy().tolist() == expected.batch_sizes.tolist()
    parts = [drawn(n, length, 3) for n, length in enumerate(lengths)]
    joined = rnn.pack_sequence([Tensor(part, device) for part in parts], is_sorted).data.numpy()
    assert_close(joined, packing.pack_sequence([torch.tensor(part) for part in parts], is_sorted).data.numpy())


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_any_number_of_compute_units(device, kind):
    results = []
    for units in (1, 2):
        each = Device(device.cl_device, kind=device.kind)
        each.compute_units = units
        manual_seed(3)
        layer = getattr(nn, kind.split()[0])(40, 70, **KINDS[kind], device=each)
        y, last = layer(Tensor(drawn(1, 5, 9, 40), each))
        (y * y).sum().backward()
        parts = [y, *flat(last), *(p.grad for p in layer.parameters())]
        results.append([part.numpy().tobytes() for part in parts])
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", KINDS)
def test_initial_values_are_pytorchs(torch, device, kind):
    torch.manual_seed(5)
    theirs = getattr(torch.nn, kind.split()[0])(3, 4, 2, bidirectional=True, **KINDS[kind])
    manual_seed(5)
    ours = getattr(nn, kind.split()[0])(3, 4, 2, bidirectional=True, device=device, **KINDS[kind])
    for name, value in ours.state_dict().items():
        assert value.tobytes() == theirs.state_dict()[name].numpy().tobytes(), name


def test_refusals(device):
    layer, x = nn.LSTM(3, 4, device=device), Tensor(drawn(1, 5, 2, 3), device)
    state = Tensor(drawn(2, 1, 2, 4), device)
    for call, message in (
        (
            lambda: layer(Tensor(drawn(1, 5, 2, 4), device)),
            "LSTM: expected 2 or 3 dimensions, the last of 3",
        ),
        (lambda: layer(x, state), "LSTM: hx: expected 2 states, got 1"),
        (lambda: layer(x, (state, state[:, :1])), r"LSTM: hx: expected shape \(1, 2, 4\), got \(1, 1, 4\)"),
        (lambda: nn.RNN(3, 4, 1, "sigmoid"), "nonlinearity: expected 'tanh' or 'relu', got 'sigmoid'"),
        (lambda: nn.LSTM(3, 4, 1, "tanh"), "LSTM: bias: expected True or False, got 'tanh'"),
        (lambda: rnn.pack_padded_sequence(x, [3, 6]), "lengths: expected 2 whole numbers from 1 to 5"),
        (lambda: rnn.pack_padded_sequence(x, [3, 5]), "lengths: expected the longest first"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()
