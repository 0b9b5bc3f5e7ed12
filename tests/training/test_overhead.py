"""The share of Python and launches against steps whose parts are known, whatever else is in them."""

from __future__ import annotations

import random
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from training.overhead import SAMPLE_EVERY, Overhead


class Rank:
    """A rank whose clock stands still but for what its steps are made of, in seconds."""

    def __init__(self) -> None:
        self.now_s = self.exposed_s = self.kernels_s = 0.0

    @contextmanager
    def profile(self):
        began_s, kernels_s, found = self.now_s, self.kernels_s, SimpleNamespace()
        yield found
        found.seconds, found.kernel_s = self.now_s - began_s, self.kernels_s - kernels_s

    def step(self, overhead: Overhead, python_s: float, kernels_s: float, exposed_s: float, data_s: float) -> float:
        """Take a step; what is hidden goes on behind its kernels and takes no time of its own."""
        self.now_s += data_s
        with overhead.sampled():
            self.now_s += python_s + kernels_s + exposed_s
            self.exposed_s += exposed_s
            self.kernels_s += kernels_s
        return data_s + python_s + kernels_s + exposed_s


@pytest.mark.parametrize("seed", range(40))
def test_the_share_is_that_of_the_step(seed: int) -> None:
    """Steps differ in their waits, and in some the rank loses its core: like runs have like shares all the same."""
    rng = random.Random(seed)
    python_s, kernels_s = rng.uniform(1e-5, 2e-3), rng.uniform(1e-4, 1e-2)
    rank = Rank()
    overhead = Overhead(rank.profile, lambda: rank.exposed_s)
    waits = rng.choice([0.0, 1e-3, 1e-1])
    steps = []
    for _ in range(rng.randrange(8, 60) * SAMPLE_EVERY):
        lost_s = 0.02 if rng.random() < 0.1 else 0.0
        parts = python_s * rng.uniform(0.95, 1.05) + lost_s, kernels_s, rng.expovariate(1) * waits, rng.random() * 1e-3
        steps.append(rank.step(overhead, *parts))
    mean_s = sum(steps) / len(steps)
    assert overhead.launch_s == pytest.approx(python_s, rel=0.06) and overhead.kernel_s == pytest.approx(kernels_s)
    assert overhead.share(mean_s) == pytest.approx(python_s / mean_s, rel=0.06)


def test_a_step_with_more_kernels_than_time_has_no_share_below_nothing() -> None:
    """A device of its own goes on while the rank communicates."""
    rank = Rank()
    overhead = Overhead(rank.profile, lambda: rank.exposed_s)
    for _ in range(SAMPLE_EVERY):
        rank.kernels_s += 1.0
        rank.step(overhead, 1e-3, 2e-3, 5e-3, 0.0)
    assert overhead.share(1e-2) is not None and 0 <= overhead.share(1e-2) <= 1
    assert overhead.share(0.0) is None
