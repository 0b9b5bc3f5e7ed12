"""Runs under a policy: alike when evaluated and at the end, resumed from a checkpoint, other libraries' models."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.base.errors import ArgumentError, CheckpointError
from clcomm.jobs.checkpoint import load, save
from tests.helpers import one_line
from training.console import make_console
from training.data.datasets import load_synthetic
from training.options import TrainingOptions
from training.session import Session
from training.trainer_state import MovingState

SPLITS = load_synthetic(103, 50, shape=(1, 8, 8))
OPTIONS: dict[str, object] = {
    "model": "mlp", "batch_size": 4, "epochs": 2, "max_steps": 9, "device": "cpu", "quiet": True, "optimizer": "adam",
    "clip_norm": 0.5,
}  # fmt: skip


POLICIES = ("local:h=2", "diloco:h=4", "streaming:h=4", "sparseloco:h=4", "noloco:h=2")


def session_of(comm: Communicator, policy: str, **options: object) -> Session:
    return Session(TrainingOptions(**{**OPTIONS, "policy": policy, **options}), comm, SPLITS, make_console(comm))  # type: ignore[arg-type]


def ends_with(comm: Communicator, **options: object) -> tuple[str, float]:
    """Return a run's hash of the parameters and its loss on the test set."""
    session = Session(TrainingOptions(**{**OPTIONS, **options}), comm, SPLITS, make_console(comm))  # type: ignore[arg-type]
    result = session.run()
    state = session.parts.model.state_dict()
    assert result.evaluation is not None
    values = b"".join(np.asarray(state[name]).tobytes() for name in sorted(state))
    return hashlib.sha256(values).hexdigest(), result.evaluation.loss


@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_are_alike_at_the_end(comm: Communicator, policy: str) -> None:
    mine = ends_with(comm, policy=policy)
    assert comm.all_gather_object(mine) == [mine] * comm.size


def test_outer_steps_that_do_nothing_are_those_of_one_rank() -> None:
    comm = Communicator(transport="solo")
    assert ends_with(comm, policy="local:h=3", clip_norm=None) == ends_with(comm, clip_norm=None)


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_resumed_run_has_the_bits_of_a_whole_one(auto: Communicator, tmp_path: Path, policy: str) -> None:
    """From 5 steps, between two outer ones: each rank's parameters and moments are its own."""
    file = auto.broadcast_object(str(tmp_path / "run.npz"))
    whole = ends_with(auto, policy=policy)
    session_of(auto, policy, max_steps=5, checkpoint=file, eval=False).run()
    resumed = ends_with(auto, policy=policy, resume=file)
    assert auto.all_gather_object(resumed) == auto.all_gather_object(whole) == [whole] * auto.size
    with pytest.raises(CheckpointError, match="policy"):
        ends_with(auto, policy=f"{policy[:-1]}5", resume=file)


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_goes_on_from_training_without_one(auto: Communicator, tmp_path: Path, policy: str) -> None:
    """All begin at the same parameters and moments; a run resumed once more has the bits of one resumed once."""
    plain, file = (auto.broadcast_object(str(tmp_path / name)) for name in ("plain.npz", "run.npz"))
    ends = partial(ends_with, auto, clip_norm=None)  # which a policy computes in another order
    trained = ends(max_steps=2, checkpoint=plain)
    assert ends(policy=policy, resume=plain, max_steps=2) == trained
    whole = ends(policy=policy, resume=plain)
    if auto.size == 1 and policy == "local:h=2":  # whose outer steps then do nothing
        assert whole == ends(resume=plain)
    session_of(auto, policy, max_steps=5, checkpoint=file, resume=plain, eval=False, clip_norm=None).run()
    assert auto.all_gather_object(ends(policy=policy, resume=file)) == [whole] * auto.size
    with pytest.raises(CheckpointError, match=f"--policy {policy}, this job has none"):
        ends(resume=file)


@pytest.mark.mpi(min_size=1)
def test_a_checkpoint_of_aligned_ranks_takes_no_outer_step_again(auto: Communicator, tmp_path: Path) -> None:
    """An epoch ends with an evaluation, whose outer step is brought forward, and then with a checkpoint."""
    file = auto.broadcast_object(str(tmp_path / "run.npz"))
    ended = {"policy": "diloco:h=50", "max_steps": None, "epochs": 1}
    assert ends_with(auto, checkpoint=file, **ended) == ends_with(auto, resume=file, **ended)


@pytest.mark.mpi(min_size=2)
def test_a_checkpoint_without_a_ranks_optimizer_is_refused_on_every_rank(auto: Communicator, tmp_path: Path) -> None:
    file = Path(auto.broadcast_object(str(tmp_path / "run.npz")))
    session_of(auto, "diloco:h=4", max_steps=5, checkpoint=str(file), eval=False).run()
    if auto.rank == 0:
        found = load(file)
        found.arrays = {name: array for name, array in found.arrays.items() if not name.startswith("optimizers/1/")}
        save(file, found)
    auto.barrier()
    with pytest.raises(CheckpointError) as caught:
        session_of(auto, "diloco:h=4", resume=str(file)).run()
    assert "optimizers/1: expected arrays like those of rank 0's optimizer, got none" in one_line(caught)


@pytest.mark.mpi(min_size=1)
def test_another_number_of_ranks_goes_on_with_the_outer_optimizer(auto: Communicator, tmp_path: Path) -> None:
    """All begin at rank 0's place, between two outer steps; outer momentum has moved the anchor away from it."""
    file = auto.broadcast_object(str(tmp_path / "run.npz"))
    session_of(auto, "diloco:h=4", max_steps=6, checkpoint=file, eval=False).run()
    kept = load(file).group("sync/0")
    alone = Communicator(transport="solo")
    resumed = session_of(alone, "diloco:h=4", resume=file, max_steps=6, eval=False)
    resumed.run()
    found = resumed.trainer.sync.state_dict(resumed.parts.model)
    assert found.keys() == kept.keys() and found["velocity"].any()
    assert all(found[name].tobytes() == kept[name].tobytes() for name in kept)


@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_that_are_left_have_the_outer_state_of_the_first(comm: Communicator, policy: str) -> None:
    """What a session does after a loss: the state of the lowest of the ranks that are farthest goes to all."""
    session = session_of(comm, policy, max_steps=7)
    for _ in session.steps():
        pass
    old = session.trainer
    mine = MovingState.of(old)
    if comm.rank == 0:
        assert mine.policy["steps"] == 7
    session._take_over(old, mine.newest(comm))
    assert session.trainer is not old
    found = session.trainer.sync.state_dict(session.parts.model)
    theirs = comm.broadcast_object({name: array.tobytes() for name, array in mine.policy.items()}, 0)
    assert {name: array.tobytes() for name, array in found.items()} == theirs
    again = comm.all_gather_object(session.run().evaluation)
    assert again == again[:1] * comm.size


def test_ranks_that_lost_one_before_the_policy_began_begin_it(comm: Communicator) -> None:
    session = session_of(comm, "diloco:h=4")
    session._take_over(session.trainer, MovingState.of(session.trainer).newest(comm))
    assert session.run().steps == 9


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("--compression", {"compression": "fp16"}), ("--overlap on", {"overlap": "on"}), ("--zero 2", {"zero": 2}),
        ("--balance auto", {"balance": "auto"}), ("--check-finite", {"check_finite": True}),
        ("--check-replicas", {"check_replicas": 3}), ("--precision bf16", {"precision": "bf16"}),
        ("--clip-norm with --engine torch", {"engine": "torch", "clip_norm": 1.0}),
        ("--uneven-inputs join", {"uneven_inputs": "join"}),
    ],
)  # fmt: skip
def test_options_that_work_on_all_gradients_are_refused(option: str, given: dict[str, object]) -> None:
    with pytest.raises(ArgumentError) as caught:
        TrainingOptions(policy="diloco", **given)  # type: ignore[arg-type]
    assert one_line(caught) == f"--policy: expected no {option} with it; use one of the two"
