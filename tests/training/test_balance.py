"""Shares of any sizes, changed at any step: the training of one rank on the same samples."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.base.errors import ArgumentError
from clcomm.sync.balance import Balancer
from tests.training.trainers import Watcher, epochs_of, make_trainer, relative_difference, solo
from training.options import TrainingOptions
from training.session import Session
from training.trainer import Trainer

BATCH = 8


class Scripted(Balancer):
    """Takes other shares after every second step, drawn alike on every rank."""

    def __init__(self, comm):
        super().__init__(comm, BATCH)
        self._drawn = np.random.default_rng(1)

    def step_finished(self, samples, seconds):
        self.changes += 1
        if self.changes % 2:
            return False
        rest = self.batch_size * self._comm.size - self._comm.size
        spread = self._drawn.multinomial(rest, np.full(self._comm.size, 1 / self._comm.size))
        before, self.shares = self.shares, tuple(int(each) + 1 for each in spread)
        return self.shares != before


class Shares(Watcher):
    def __init__(self):
        super().__init__()
        self.changes = []

    def shares_changed(self, step, shares):
        self.changes.append((step, shares))


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize(("accumulation", "sharded", "prefetch"), [(1, False, 0), (2, False, 2), (1, True, 2)])
@pytest.mark.parametrize("rest", [0, 1, 13])
def test_any_shares_equal_one_rank_with_all_samples(accumulation, sharded, prefetch, rest):
    comm = Communicator()
    samples = BATCH * comm.size * 6 + rest
    ours = make_trainer(
        comm, samples, BATCH, accumulation=accumulation, sharded=sharded, balancer=Scripted(comm), prefetch=prefetch
    )
    ours.callbacks[0] = shares = Shares()
    alone = make_trainer(solo(), samples, BATCH * comm.size, accumulation=accumulation, pad=False)
    together, steps = epochs_of(ours, 2)
    expected, expected_steps = epochs_of(alone, 2)
    assert steps == expected_steps == ours.total_steps(2)
    assert relative_difference(together, expected) < 1e-5
    assert len(shares.changes) > 1 or comm.size == 1
    everyone = comm.all_gather_object({name: value.tobytes() for name, value in together.items()})
    assert all(each == everyone[0] for each in everyone)
    assert ours.train_loss == pytest.approx(alone.train_loss, rel=1e-5)
    totals = [record.samples_of_all(comm.size) for record in shares.records]
    assert totals == [record.samples for record in alone.callbacks[0].records]
    comm.finalize()


@pytest.mark.mpi(min_size=1)
def test_the_option_balances_a_run():
    comm = Communicator()
    options = TrainingOptions(
        model="mlp", data="synthetic", balance="auto", max_steps=6, batch_size=4, eval=False, quiet=True, device="cpu"
    )
    session = Session(options, comm)
    assert isinstance(session.trainer.balancer, Balancer)
    result = session.run()
    assert result.steps == 6 and np.isfinite(result.train_loss) and result.images_per_s > 0
    comm.finalize()


def test_a_balancer_needs_its_sampler():
    comm = solo()
    made = make_trainer(comm, balancer=Balancer(comm, 4))
    for balancer, trainer in ((None, made), (Balancer(comm, 4), make_trainer(comm))):
        with pytest.raises(ArgumentError, match=r"^balancer: expected one with a BalancedSampler, and none with "):
            Trainer(comm, trainer.sync, trainer.parts, trainer.optimizer, trainer.loader, balancer=balancer)
