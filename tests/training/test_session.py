"""A session that loses ranks goes on with the same bits; what MPI does about lost ranks, tests/faults has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clcomm.comm.communicator import Communicator
from clcomm.jobs import checkpoint
from clcomm.sync import elastic
from clcomm.sync.synchronizer import Synchronizer
from tests.training.trainers import assert_same_bits
from training.console import make_console
from training.data.datasets import load_synthetic
from training.metrics import StepRecord
from training.options import TrainingOptions
from training.session import Session
from training.trainer import Callback
from training.trainer_state import load_state, state_of

STEPS = 12
SPLITS = load_synthetic(240, 16, shape=(1, 8, 8))
OPTIONS = TrainingOptions(
    model="mlp", batch_size=4, epochs=2, max_steps=STEPS, device="cpu", eval=False, quiet=True, elastic=True
)


class LostPeer(Exception):
    pass


class Loses(Callback):
    """Raises what a lost rank raises, at some steps."""

    def __init__(self, *steps: int):
        self.steps = steps

    def step_finished(self, record: StepRecord) -> None:
        if record.step in self.steps:
            raise LostPeer


def trained(comm: Communicator, options: TrainingOptions, *lost_at: int) -> tuple[Session, dict[str, np.ndarray]]:
    session = Session(options, comm, SPLITS, make_console(comm))
    session.trainer.callbacks.append(Loses(*lost_at))
    assert session.run().steps == STEPS
    return session, session.parts.model.state_dict()


@pytest.fixture
def survivors(monkeypatch: pytest.MonkeyPatch) -> list[Communicator]:
    """Let LostPeer pass for a lost rank, after which all ranks go on as a new world; return the worlds."""
    worlds: list[Communicator] = []

    def survivors_of(comm: Communicator) -> Communicator:
        worlds.append(Communicator(transport=comm.transport))
        return worlds[-1]

    monkeypatch.setattr(elastic, "is_lost_peer", lambda error: isinstance(error, LostPeer))
    monkeypatch.setattr(elastic, "survivors_of", survivors_of)
    return worlds


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("lost_at", [1, 5, STEPS])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_run_goes_on_where_it_lost_ranks(
    auto: Communicator, survivors: list[Communicator], lost_at: int, optimizer: str
) -> None:
    options = replace(OPTIONS, optimizer=optimizer)
    _, undisturbed = trained(auto, options)
    session, found = trained(auto, options, lost_at)
    assert survivors == [session.comm] and session.trainer.progress.step == STEPS
    assert_same_bits(found, undisturbed)


@pytest.mark.parametrize("at", [1, 5, STEPS])
def test_a_step_that_was_interrupted_has_its_gradients_once(
    survivors: list[Communicator], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    average, calls = Synchronizer.sync_gradients, iter(range(1, 99))

    def lost(self: Synchronizer, *arguments: Any, **named: Any) -> None:
        if next(calls) == at:
            raise LostPeer
        average(self, *arguments, **named)

    _, undisturbed = trained(Communicator(transport="solo"), OPTIONS)
    monkeypatch.setattr(Synchronizer, "sync_gradients", lost)
    _, found = trained(Communicator(transport="solo"), OPTIONS)
    assert len(survivors) == 1
    assert_same_bits(found, undisturbed)


def test_nothing_stays_of_a_state_whose_sender_is_lost_too(
    survivors: list[Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that had completed a step more sends its parameters, and no more."""
    send_arrays, calls = elastic.send_arrays, iter(range(99))

    def sent(comm: Communicator, arrays: dict[str, np.ndarray], root: int) -> dict[str, np.ndarray]:
        call = next(calls)
        if call == 1:
            raise LostPeer
        return {name: 2 * array for name, array in arrays.items()} if call == 0 else send_arrays(comm, arrays, root)

    _, undisturbed = trained(Communicator(transport="solo"), OPTIONS)
    monkeypatch.setattr(elastic, "send_arrays", sent)
    _, found = trained(Communicator(transport="solo"), OPTIONS, 5)
    assert len(survivors) == 2
    assert_same_bits(found, undisturbed)


@pytest.mark.parametrize("done", [1, 4, 19])
def test_an_epoch_that_other_ranks_began_leaves_the_next_one_whole(done: int) -> None:
    options = replace(OPTIONS, epochs=3, max_steps=None)
    session = Session(options, Communicator(transport="solo"), SPLITS)
    state = state_of(session.trainer)
    state["sampler"]["world_size"], state["progress"]["batch"] = 3, done
    load_state(session.trainer, state)
    ends = [session.trainer.epoch_done for _ in session.steps()]
    left = -(-(240 - 3 * 4 * done) // 4)
    assert [at for at, ended in enumerate(ends, 1) if ended] == [left, left + 60, left + 120]
    assert len(ends) == left + 120


@pytest.mark.parametrize("lost_at", [3, 4, STEPS])
def test_checkpoints_go_on_too(tmp_path: Path, survivors: list[Communicator], lost_at: int) -> None:
    file = tmp_path / "run.npz"
    options = replace(OPTIONS, checkpoint=str(file), checkpoint_every=4, checkpoint_keep=3)
    trained(Communicator(transport="solo"), options, lost_at)
    steps = {path.name: checkpoint.load(path).facts["training"]["progress"]["step"] for path in tmp_path.iterdir()}
    assert steps == {"run.npz": 12, "run.npz.1": 8} | (
        {"run.npz.2": 4} if lost_at != 4 else {}
    )  # 4 is lost before it is saved


def test_other_errors_end_the_run(survivors: list[Communicator], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "is_lost_peer", lambda error: False)
    with pytest.raises(LostPeer):
        trained(Communicator(transport="solo"), OPTIONS, 3)
    monkeypatch.setattr(elastic, "is_lost_peer", lambda error: True)
    with pytest.raises(LostPeer):
        trained(Communicator(transport="solo"), replace(OPTIONS, elastic=False), 3)
    assert survivors == []
