"""Dropout: masks as a reference computes them, on any device, in replayed steps, by rank and after a resume."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Dropout, Linear, RandomStream, Replay, Sequential, Tensor, manual_seed
from clcomm.engine import functional as F
from clcomm.engine.device import Device
from clcomm.engine.tuning import Tuning
from tests.helpers import cpu_device
from tests.random_words import philox, random_words
from training.engines.rehearsal import Rehearsal

SEED, RANK = 12_345_678_901_234, 3
#: Counters and keys with their words, from the authors' implementation.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def kept(p, draws, shape, seed=SEED, rank=RANK):
    """Return the factors of dropout's elements."""
    words = random_words(seed, rank, draws, int(np.prod(shape))).reshape(shape)
    return np.where(words >= round(p * 2**32), np.float32(1 / (1 - p)), np.float32(0))


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_the_reference_has_the_authors_words(counter, key, words):
    assert tuple(int(word) for word in philox(counter, key)) == words


def test_masks_do_not_depend_on_the_number_of_cores_or_lanes(device):
    masks = set()
    for units, lanes in ((1, 8), (3, 16), (64, 8)):
        other = Device(cpu_device("cpu").cl_device, kind=device.kind, tuning=Tuning(loop_lanes=lanes))
        other.compute_units = units
        RandomStream.of(other).seed(SEED, RANK)
        masks.add(F.dropout(Tensor(np.ones(70_001, np.float32), other), 0.25).numpy().tobytes())
    assert masks == {kept(0.25, 0, (70_001,)).tobytes()}


def test_shares_and_neighbours_are_as_of_coins(device):
    manual_seed(0)
    size, p = 1 << 20, 0.3
    first, second = ((F.dropout(Tensor(np.ones(size, np.float32), device), p).numpy() > 0) for _ in range(2))
    spread = 5 * np.sqrt(p * (1 - p) / size)
    assert abs(first.mean() - (1 - p)) < spread
    for a, b in ((first, second), (first[1:], first[:-1]), (first[8:], first[:-8]), (first[32:], first[:-32])):
        assert abs((a & b).mean() - (1 - p) ** 2) < 2 * spread


def test_seeds_and_ranks_have_masks_of_their_own(device):
    stream, x = RandomStream.of(device), Tensor(np.ones(512, np.float32), device)
    masks = []
    for seed, rank in ((0, 0), (0, 1), (1, 0), (1 << 32, 0), (0, 0)):
        stream.seed(seed, rank)
        masks += [F.dropout(x, 0.5).numpy().tobytes() for _ in range(2)]
    assert masks[:2] == masks[-2:] and len(set(masks)) == 8


def test_manual_seed_seeds_streams_present_and_later_for_the_launchers_rank(device, monkeypatch):
    monkeypatch.setenv("PMI_RANK", "5")
    manual_seed(11)
    later = Device(cpu_device("cpu").cl_device)
    for each in (RandomStream.of(device), RandomStream.of(later)):
        assert each.state().tolist() == [11, 0, 5, 0, 0]
    manual_seed(2**33 + 1)
    assert RandomStream.of(later).state().tolist() == [1, 2, 5, 0, 0]


def test_a_state_goes_on(device):
    stream, x = RandomStream.of(device), Tensor(np.ones(100, np.float32), device)
    stream.load(np.array([1, 2, 3, 2**32 - 1, 6], np.uint32))  # of which the low word is full
    masks = [F.dropout(x, 0.5).numpy() for _ in range(2)]
    assert stream.state().tolist() == [1, 2, 3, 1, 7]
    stream.load(np.array([1, 2, 3, 0, 7], np.uint32))
    np.testing.assert_array_equal(F.dropout(x, 0.5).numpy(), masks[1])
    for state in (np.zeros(5, np.int32), np.zeros(4, np.uint32)):
        with pytest.raises(ArgumentError, match="state: expected 5 uint32, got"):
            stream.load(state)
    for seed, rank in ((1.5, 0), (True, 0), (0, -1), (0, "1")):
        with pytest.raises(ArgumentError, match=r"expected a whole number"):
            stream.seed(seed, rank)


def test_replayed_steps_draw_fresh_masks_which_are_those_of_plain_steps(device):
    def make():
        model = Sequential(Linear(40, 30, device=device), Dropout(0.4), Linear(30, 20, device=device), Dropout(0.2))
        model.flat_space()

        def step(x):
            model.zero_grad()
            y = F.sum(model(x))
            y.backward()
            return y

        return model, step

    model, function = make()
    x = Tensor(np.ones((8, 40), np.float32), device)
    runs = []
    for step in (function, Replay(function)):
        RandomStream.of(device).seed(SEED, RANK)
        losses, gradients = [], []
        for _ in range(15):
            losses.append(step(x).item())
            gradients.append(b"".join(p.grad.numpy().tobytes() for p in model.parameters()))
        runs.append((losses, gradients))
        assert len(set(losses)) == 15
    assert step.replayed > 5 and runs[0] == runs[1]
    model.eval()
    assert len({step(x).item() for _ in range(5)}) == 1


def test_p_of_0_and_1_and_evaluation(device):
    values = np.float32([1, -2, np.inf, np.nan, 0])
    x = Tensor(values, device, requires_grad=True)
    RandomStream.of(device).seed(0, 0)
    assert F.dropout(x, 0) is x and F.dropout(x, 1, training=False) is x and Dropout(0.5).eval()(x) is x
    assert RandomStream.of(device).state()[3] == 0  # nothing was drawn
    y = F.dropout(x, 1.0)
    np.testing.assert_array_equal(y.numpy(), np.float32([0, 0, np.nan, np.nan, 0]))
    y.backward(Tensor(np.ones(5, np.float32), device))
    np.testing.assert_array_equal(x.grad.numpy(), np.zeros(5))


def test_the_ends_of_the_range_as_pytorch(device):
    torch = pytest.importorskip("torch")
    values = np.float32([1, -2, np.inf, np.nan, 0])
    for p in (0.0, 1.0):
        expected = torch.nn.functional.dropout(torch.tensor(values), p).numpy()
        np.testing.assert_array_equal(F.dropout(Tensor(values, device), p).numpy(), expected)


def test_copies_and_rehearsals_leave_the_stream_as_it_is(device):
    layer, stream = Dropout(0.5), RandomStream.of(device)
    stream.seed(SEED, RANK)
    state = stream.state().tolist()
    assert copy.deepcopy(layer).p == 0.5
    rehearsal = Rehearsal(device)
    layer(Tensor(np.ones(10, np.float32), rehearsal))
    rehearsal.build(rehearsal.programs)
    rehearsal.close()
    assert RandomStream.of(device) is stream and stream.state().tolist() == state


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan"), "half", None])
def test_probabilities_that_are_none(device, p):
    with pytest.raises(ArgumentError, match="Dropout: expected p from 0 to 1, got"):
        Dropout(p)
    with pytest.raises(ArgumentError, match=r"dropout: (expected p from 0 to 1|p: expected float or int), got"):
        F.dropout(Tensor(np.ones(3), device), p)
