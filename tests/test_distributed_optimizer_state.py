"""The sharded state: each rank keeps its part, and the whole goes on with other ranks or unsharded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.base.errors import ArgumentError
from clcomm.jobs.checkpoint import Checkpoint, load
from clcomm.optim import Adam
from tests.examples.test_examples import run
from tests.sharded_jobs import KINDS, Job
from tests.training.trainers import assert_same_bits
from training.checkpoint_series import CheckpointSeries, load_newest


def test_whole_state_is_the_plain_optimizers(comm):
    plain, sharded = Job(comm, "rmsprop", sharded=False), Job(comm, "rmsprop")
    plain.run(3), sharded.run(3)
    assert_same_bits(sharded.optimizer.state_dict(), plain.optimizer.state_dict())


@pytest.mark.parametrize(("kind", "buffers"), [("sgd", 0), ("momentum", 1), ("adam", 2), ("rmsprop", 3)])
def test_each_rank_keeps_its_part_of_the_state(comm, kind, buffers):
    job = Job(comm, kind)
    span, alignment = job.model.flat_space().layout.span, job.model.flat_space().layout.alignment
    everyone = comm.all_gather(np.array([job.optimizer.state_nbytes]))
    assert everyone.sum() == buffers * span
    assert everyone.max() <= buffers * (span / comm.size + alignment)
    job.run(1)  # the state is made at its first use
    own = job.optimizer.optimizer
    parts = [own.state_dict()[name] for name in own.state_names]
    assert len(parts) == buffers and all(part.nbytes == job.optimizer.state_nbytes // buffers for part in parts)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["momentum", "adam"])
@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_a_state_of_all_ranks_goes_on_with_fewer(several, tmp_path, kind, transport):
    """Saved by all, resumed by two ranks and by one: what the plain optimizer does from there."""
    path = several.broadcast_object(str(tmp_path / "state.npz"))
    job = Job(several, kind)
    job.run(3)
    state = job.optimizer.state_dict()
    checkpoint = Checkpoint()
    checkpoint.add_group("parameter", job.model.state_dict())
    checkpoint.add_group("optimizer", state)
    CheckpointSeries(several, path).save(checkpoint)
    for ranks in {1, 2, several.size}:
        part = several.comm.Split(several.rank // ranks, several.rank)
        if part.Get_size() == ranks:
            with Communicator(part, transport=transport) as fewer:
                resumed = [_resumed(fewer, path, kind, sharded).run(3, 10) for sharded in (False, True)]
                assert_same_bits(*resumed)
        part.Free()


def test_a_state_goes_on_where_the_parameters_were_given_in_another_order(comm, monkeypatch):
    monkeypatch.setitem(KINDS, "turned", lambda model: Adam([*model.parameters()][::-1], 2e-3))
    job = Job(comm, "adam")
    parameters, state = job.run(3), job.optimizer.state_dict()
    expected = job.run(2, 3)
    for sharded in (False, True):
        turned = Job(comm, "turned", sharded)
        turned.model.load_state_dict(parameters)
        turned.optimizer.load_state_dict(state)
        again = Job(comm, "adam", sharded)
        again.model.load_state_dict(parameters)
        again.optimizer.load_state_dict(turned.optimizer.state_dict())
        assert_same_bits(turned.run(2, 3), expected)
        assert_same_bits(again.run(2, 3), expected)


def _resumed(comm, path, kind, sharded):
    job, checkpoint = Job(comm, kind, sharded), load_newest(comm, path)[1]
    job.model.load_state_dict(checkpoint.group("parameter"))
    job.optimizer.load_state_dict(checkpoint.group("optimizer"))
    assert int(job.optimizer.state_dict()["steps"]) == 3
    return job


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam", "adamw", "rmsprop"])
def test_every_rank_refuses_a_state_of_nonsense_and_changes_nothing(comm, kind):
    job, other = Job(comm, kind), Job(comm, kind)
    job.run(2), other.run(3)
    before, valid = job.optimizer.state_dict(), other.optimizer.state_dict()
    names = job.optimizer.optimizer.state_names
    nonsense = [("steps", -1), ("steps", 0.5), ("weight_decay", -1.0), ("lr", np.nan), ("lr", "fast")]
    nonsense += [(name, valid[name].astype(str)) for name in names]
    for name, value in nonsense:
        with pytest.raises(ArgumentError, match=rf"state_dict\['{name}'\]: expected"):
            job.optimizer.load_state_dict({**valid, name: np.array(value)})
        assert_same_bits(job.optimizer.state_dict(), before)
    job.optimizer.load_state_dict(valid)
    assert_same_bits(job.optimizer.state_dict(), valid)


def test_the_option_cuts_the_state_and_changes_no_bit(tmp_path: Path):
    found = []
    for arguments in ([], ["--sharded-optimizer"]):
        report, saved = tmp_path / "report.json", tmp_path / "run.npz"
        told = run(
            "examples.mnist", "--data", "synthetic", "--model", "mlp", "--optimizer", "adam", "--max-steps", "4",
            "--no-eval", "--report", str(report), "--checkpoint", str(saved), "--bucket-size", "64KiB",
            *arguments, ranks=2,
        )  # fmt: skip
        figures = json.loads(report.read_text())
        assert ("; sharded update" if arguments else f"; {len(figures['layout'])} buckets of 64 KiB") in told
        assert (len(figures["layout"]) == 1) == bool(arguments)
        arrays = load(saved).arrays
        kept = {name: array for name, array in arrays.items() if not name.startswith("random/")}
        found.append((figures["optimizer_state_bytes"], kept))
    (plain_bytes, plain), (sharded_bytes, sharded) = found
    assert plain_bytes / 2 <= sharded_bytes <= plain_bytes / 2 + 2 * 512  # two buffers, each within the alignment
    assert_same_bits(sharded, plain)
