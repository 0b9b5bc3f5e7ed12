"""What compression keeps from step to step: residuals, steps and factors, in checkpoints too."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer
from clcomm.base.errors import ArgumentError, CheckpointError
from clcomm.jobs import checkpoint
from clcomm.sync.compression.quantized import Int8
from clcomm.sync.compression.ranks import Task
from tests.compressed_gradients import FEEDBACK, LAYOUT, SCHEMES
from tests.helpers import one_line
from tests.numpy_models import set_gradients, small_model
from tests.training.trainers import make_trainer, train
from training.checkpoint_series import CheckpointSeries
from training.snapshot import restore_snapshot, save_snapshot


@pytest.mark.parametrize("cut", [{}, {"use_bucketing": False}])
@pytest.mark.parametrize("scheme", [*SCHEMES, "none"])
def test_a_restored_state_continues_with_the_same_bits(comm, scheme, cut):
    model, sync = small_model(), Synchronizer(comm, compression=scheme, **cut)
    again, resumed = small_model(), Synchronizer(comm, compression=scheme, **cut)
    for seed in range(200, 900, 100):
        set_gradients(model, comm.rank, seed)
        sync.sync_gradients(model)
        if seed == 500:
            state = {name: array.copy() for name, array in sync.state_dict(model).items()}
            resumed.load_state_dict(again, state)
        if seed > 500:
            set_gradients(again, comm.rank, seed)
            resumed.sync_gradients(again)
            assert again.gradient_bits() == model.gradient_bits()
    assert bool(state) == (scheme in FEEDBACK)


@pytest.mark.parametrize("scheme", FEEDBACK)
def test_two_models_have_residuals_of_their_own(comm, scheme):
    sync = Synchronizer(comm, compression=scheme)
    alone = Synchronizer(comm, compression=scheme)
    models = [small_model() for _ in range(3)]
    for seed in (100, 200, 300):
        for number, (model, one) in enumerate(zip(models, (sync, sync, alone), strict=True)):
            set_gradients(model, comm.rank, seed + 1000 * (number == 1))
            one.sync_gradients(model)
    assert models[0].gradient_bits() == models[2].gradient_bits()


def test_residuals_stay_with_their_elements_when_buckets_change():
    hook, flat = Int8(), np.zeros(LAYOUT.span, np.uint8)
    solo, none = Communicator(transport="solo"), np.empty(0, np.float32)
    (whole,), parts = LAYOUT.buckets(1 << 20), LAYOUT.buckets(None)

    def kept_of(bucket):
        return hook.kept_of(Task(flat[bucket.start : bucket.stop].view(np.float32), solo, none, bucket))

    for bucket in parts:
        kept_of(bucket)[:] = bucket.index + 1
    kept = kept_of(whole)
    assert [kept[place.start // 4] for place in LAYOUT.ranges] == [1, 2]


@pytest.mark.mpi(min_size=2)
def test_another_number_of_ranks_continues_without_residuals_and_warns(auto, tmp_path, caplog):
    path = auto.broadcast_object(str(tmp_path / "run.npz"))
    first = make_trainer(auto, 60 * auto.size, compression="int8")
    train(first, 3)
    save_snapshot(CheckpointSeries(auto, path), first, {})
    part = auto.comm.Split(auto.rank, 0)
    with Communicator(part) as alone:
        resumed = make_trainer(alone, 60 * auto.size, compression="int8")
        resumed.loader.sampler.load_state_dict = lambda state: None  # it has an opinion of its own on other ranks
        restore_snapshot(path, resumed, {})
        assert not resumed.sync.state_dict(resumed.model)["residual"].any()
    part.Free()
    assert [record.getMessage() for record in caplog.records] == [
        f"checkpoint: was written by {auto.size} ranks, this job has 1: what compression kept is left out"
    ]


def spoilt(state: dict[str, np.ndarray], entry: str, value: object) -> dict[str, np.ndarray]:
    """Return a state with another value at `entry`; None takes it out, a function makes it of the one that is there."""
    if value is None:
        return {name: array for name, array in state.items() if name != entry}
    return state | {entry: value(state[entry].copy()) if callable(value) else value}


def with_nan(array: np.ndarray) -> np.ndarray:
    array.view(np.float32).flat[0] = np.nan
    return array


def beyond_the_last_parameter(array: np.ndarray) -> np.ndarray:
    array[-1] = 1
    return array


SPOILT = [
    ("topk:0.1", "residual", None, r"\['residual'\]: expected uint8 \(\d+\), got nothing"),
    ("int8", "residual", lambda array: array[:-512], r"\['residual'\]: expected uint8 \(\d+\), got uint8 \(\d+,\)"),
    ("int8", "residual", lambda array: array.view(np.float32), r"\['residual'\]: expected uint8 \(\d+\), got float32"),
    ("int8", "residual", with_nan, r"\['residual'\]: expected finite numbers, got others for 'w2'"),
    ("int8", "residual", beyond_the_last_parameter, r"\['residual'\]: expected zeros between the parameters"),
    ("int8", "more", np.zeros(1), r": expected the entries \['residual'\], got 'more' too"),
    ("topk:0.1", "steps", None, r"\['steps'\]: expected int64 \(any, 2\), got nothing"),
    ("topk:0.1", "steps", np.zeros(2, np.int64), r"\['steps'\]: expected int64 \(any, 2\), got int64 \(2,\)"),
    ("topk:0.1", "steps", np.array([[0, -1]]), r"\['steps'\]: expected numbers from 0 up, got -1"),
    ("topk:0.1", "steps", np.array([[3, 1]]), r"\['steps'\]: expected the starts of different buckets"),
    ("topk:0.1", "steps", np.array([[0, 1], [0, 1]]), r"\['steps'\]: expected the starts of different buckets"),
    ("powersgd:1", "factor/w1", lambda array: array.T.copy(), r"\['factor/w1'\]: expected float32 \(\d+, 1\), got"),
    ("powersgd:1", "factor/w1", with_nan, r"\['factor/w1'\]: expected finite numbers, got others"),
    ("powersgd:1", "factor/w9", np.zeros((1, 1)), r": expected the entries .*, got 'factor/w9' too"),
]


@pytest.mark.parametrize(("scheme", "entry", "value", "message"), SPOILT)
def test_an_invalid_state_is_refused_and_changes_nothing(scheme, entry, value, message):
    with Communicator(transport="solo") as comm:
        model, sync = small_model(), Synchronizer(comm, compression=scheme)
        set_gradients(model, 0, 200)
        sync.sync_gradients(model)
        before = {name: array.copy() for name, array in sync.state_dict(model).items()}
        with pytest.raises(ArgumentError, match="^state_dict" + message):
            sync.load_state_dict(model, spoilt(before, entry, value))
        after = sync.state_dict(model)
        assert after.keys() == before.keys()
        assert all(after[name].tobytes() == array.tobytes() for name, array in before.items())


def test_a_checkpoint_with_invalid_residuals_is_refused_on_every_rank(comm, tmp_path):
    path = comm.broadcast_object(str(tmp_path / "run.npz"))
    first = make_trainer(comm, 60 * comm.size, compression="int8")
    train(first, 3)
    save_snapshot(CheckpointSeries(comm, path), first, {})
    last = comm.size - 1
    if comm.rank == 0:
        held = checkpoint.load(path)
        held.arrays[f"sync/{last}/residual"] = held.arrays[f"sync/{last}/residual"][:-4]
        checkpoint.save(path, held)
    comm.barrier()
    resumed = make_trainer(comm, 60 * comm.size, compression="int8")
    before = resumed.model.state_dict()
    with pytest.raises(CheckpointError) as caught:
        restore_snapshot(path, resumed, {})
    assert f"checkpoint: sync/{last}: state_dict['residual']: expected uint8 (" in one_line(caught)
    after = resumed.model.state_dict()
    assert all(after[name].tobytes() == array.tobytes() for name, array in before.items())
