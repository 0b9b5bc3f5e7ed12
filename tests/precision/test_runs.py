"""Whole runs: they learn what float32 learns, go on from checkpoints with the same bits, and replay."""

from __future__ import annotations

from pathlib import Path

import pytest

from clcomm import GradScaler
from clcomm.base.errors import ArgumentError, CheckpointError
from tests.helpers import one_line
from tests.training.trainers import assert_same_bits, make_trainer, train
from training.checkpoint_series import CheckpointSeries
from training.options import TrainingOptions
from training.snapshot import restore_snapshot, save_snapshot


def made(comm, precision="bf16", scaling=None, **options):
    trainer = make_trainer(comm, 60 * comm.size, precision=precision, **options)
    if scaling is not None:
        trainer.scaler = GradScaler(trainer.sync, **scaling)
    return trainer


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("precision", "options"),
    [("bf16", {"compression": "fp16"}), ("bf16", {}), ("fp16", {"sharded": True}),
     ("bf16", {"sharded": True, "zero": 2, "accumulation": 2}),
     ("fp16", {"sharded": True, "zero": 3, "clip_norm": 0.5})],
)  # fmt: skip
def test_resuming_has_the_bits_of_an_uninterrupted_run(comm, tmp_path: Path, precision, options):
    path = comm.broadcast_object(str(tmp_path / "run.npz"))
    scaling = {"init_scale": 2.0**24, "growth_interval": 3}
    runs = [made(comm, precision, scaling, optimizer="adam", **options) for _ in range(3)]
    whole, first, resumed = runs
    expected = train(whole, 12)
    train(first, 5)
    save_snapshot(CheckpointSeries(comm, path), first, {})
    restore_snapshot(path, resumed, {})
    assert resumed.scaler.get_scale() == first.scaler.get_scale() != 2.0**24
    assert_same_bits(train(resumed, 12), expected)
    assert resumed.scaler.state_dict() == whole.scaler.state_dict()
    assert (whole.optimizer.steps < 12) == ("compression" in options), "halves overflow at such a scale"


def test_a_checkpoint_of_another_precision_or_without_a_scale_is_refused(comm, tmp_path: Path):
    path = comm.broadcast_object(str(tmp_path / "run.npz"))
    first = made(comm)
    train(first, 2)
    save_snapshot(CheckpointSeries(comm, path), first, {"precision": "bf16"})
    with pytest.raises(CheckpointError, match="was written with --precision bf16, this job has float32") as caught:
        restore_snapshot(path, made(comm, "float32"), {"precision": "float32"})
    one_line(caught)
    with pytest.raises(CheckpointError, match="scaler") as caught:
        restore_snapshot(path, made(comm, scaling={}), {"precision": "bf16"})
    one_line(caught)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"precision": "bf16", "engine": "torch"}, "--precision bf16: needs --engine native, got torch"),
     ({"loss_scaling": True, "engine": "torch"}, "--loss-scaling: needs --engine native, got torch"),
     ({"precision": "fp16", "check_finite": True}, "--precision fp16: expected no --check-finite"),
     ({"loss_scaling": True, "compression": "topk:0.1"}, "--loss-scaling: expected --compression none, fp16 or bf16"),
     ({"precision": "half"}, "--precision: expected one of float32, bf16, fp16, got 'half'")],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ArgumentError, match=f"^{message}") as caught:
        TrainingOptions(**options)
    one_line(caught)
