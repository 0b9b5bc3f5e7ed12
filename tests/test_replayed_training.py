"""Training with a replayed step, whatever Python values choose its kernels: the bits of the plain loop, or an error."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer
from clcomm.base.errors import ReplayError
from clcomm.engine import Replay
from tests.replayed import around, attributes, unsteady
from tests.replayed.net import Net, Randomness, batch

#: Courses drawn for each kind of value; `make courses` draws more.
SEEDS = int(os.environ.get("CLCOMM_TEST_REPLAY_SEEDS", "1"))
STEPS = 24
STEADY = (*attributes.NETS, *around.NETS)
WAYS = [None, False, True]  # without a Synchronizer, with it, and with overlap


@pytest.fixture(autouse=True)
def the_same_randomness_for_later_tests(monkeypatch):
    monkeypatch.setenv(unsteady.VARIABLE, "0")
    before = Randomness()
    yield
    before.restore()


class Course:
    """A net with its step as it is and its like with the step replayed, on the same course of values and batches."""

    def __init__(self, comm, device, kind: type[Net], seed: int, overlap: bool | None, check_every: int = 5):
        self.device, self.rank = device, comm.rank
        self.nets = [kind(device) for _ in range(2)]
        self.functions = [net.function() for net in self.nets]
        self.replay = self.functions[1] = Replay(self.functions[1], check_every=check_every)
        self.syncs = [None if overlap is None else Synchronizer(comm, overlap=overlap) for _ in self.nets]
        self.rng = np.random.default_rng(seed)  # the same on all ranks
        random.seed(seed)
        np.random.seed(seed)

    def step(self, number: int, value: int | None) -> bool:
        """Train both by a step; return whether they are alike."""
        size = 3 if self.rng.random() < 0.2 else 4
        data = batch(self.device, np.random.default_rng([number, self.rank]), size)
        found, randomness = [], Randomness()
        for net, function, sync in zip(self.nets, self.functions, self.syncs, strict=True):
            randomness.restore()
            if value is not None:
                net.change(value)
            loss = function(*data)
            if sync is not None:
                sync.sync_gradients(net)
            gradients = [None if p.grad is None else p.grad.numpy().tobytes() for p in net.parameters()]
            net.update()
            found.append((loss.numpy().tobytes(), gradients, [p.numpy().tobytes() for p in net.parameters()]))
        return found[0] == found[1]

    def run(self, changes: bool = True) -> bool:
        """Run the course; return whether all steps were alike."""
        alike = True
        for number in range(STEPS):
            value = int(self.rng.integers(3)) if changes and self.rng.random() < 0.35 else None
            alike &= self.step(number, value)
        return alike


def may_synchronise(kind: type[Net], overlap: bool | None) -> bool:
    """Return whether a net's step leaves the averaging to a Synchronizer, on the same parameters throughout."""
    return overlap is None or not (kind.__name__ == "Frozen" or "InTheStep" in kind.__name__)


CASES = [
    pytest.param(kind, overlap, seed, id=f"{kind.__name__}-{overlap}-{seed}")
    for kind in (*STEADY, *unsteady.NETS)
    for overlap in WAYS
    for seed in range(SEEDS)
    if may_synchronise(kind, overlap)
]


@pytest.fixture
def alone():
    with Communicator(transport="solo") as comm:
        yield comm


@pytest.mark.parametrize(("kind", "overlap", "seed"), CASES)
def test_each_step_has_the_bits_of_the_plain_loop(alone, device, kind, overlap, seed):
    course = Course(alone, device, kind, seed, overlap)
    assert course.run()
    if kind in unsteady.NETS:
        assert course.replay.replayed == 0 and course.replay.refusal


@pytest.mark.sampled(20)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("kind", [kind for kind in (*STEADY, *unsteady.NETS) if may_synchronise(kind, True)])
def test_each_step_with_overlap_on_several_ranks(auto, device, kind, seed):
    assert Course(auto, device, kind, seed, True).run()


@pytest.mark.parametrize(
    ("kind", "overlap"), [(kind, way) for kind in STEADY for way in (None, True) if may_synchronise(kind, way)]
)
def test_what_stays_the_same_is_replayed(alone, device, kind, overlap):
    course = Course(alone, device, kind, 0, overlap, check_every=1000)
    assert course.run(changes=False)
    assert course.replay.refusal is None and course.replay.replayed >= STEPS - 9


@pytest.mark.parametrize("seed", range(SEEDS + 2))
def test_what_cannot_be_seen_is_an_error_in_the_end(alone, device, seed):
    course = Course(alone, device, unsteady.Environment, seed, None)
    for number in range(12):
        assert course.step(number, 0)
    with pytest.raises(ReplayError, match=r"but launch .* was 1\.0 and is 2\.0 now") as caught:
        for number in range(12, STEPS):
            course.step(number, 2)
    assert "\n" not in str(caught.value) and "CLCOMM_REPLAY=0" in str(caught.value)
