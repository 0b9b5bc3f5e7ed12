"""A run's checkpoints: written in the background, kept in order, and the newest undamaged one loaded."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import training.checkpoint_series as series_module
from clcomm.base.errors import ArgumentError, CheckpointError
from clcomm.comm.communicator import Communicator
from clcomm.jobs.checkpoint import Checkpoint, earlier, load, save
from training.checkpoint_series import CheckpointSeries, load_newest


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint({"parameter/a": np.arange(1000, dtype=np.float32) + step}, {"step": step})


@pytest.fixture
def comm() -> Communicator:
    return Communicator(transport="solo")


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()  # not through the link that is the one before it
    path.write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize("background", [True, False])
def test_the_last_ones_are_kept(tmp_path: Path, comm: Communicator, background: bool) -> None:
    series = CheckpointSeries(comm, tmp_path / "run.npz", keep=2, background=background)
    for step in range(5):
        series.save(checkpoint(step))
    series.wait()
    series.close()
    assert sorted(os.listdir(tmp_path)) == ["run.npz", "run.npz.1"]
    assert [load(earlier(tmp_path / "run.npz", age)).facts["step"] for age in (0, 1)] == [4, 3]


def test_damaged_ones_are_passed_over(tmp_path: Path, comm: Communicator, caplog: pytest.LogCaptureFixture) -> None:
    series = CheckpointSeries(comm, tmp_path / "run.npz", keep=3)
    for step in range(3):
        series.save(checkpoint(step))
    cut(tmp_path / "run.npz")
    (tmp_path / "run.npz.1").write_bytes(b"")
    with caplog.at_level(logging.WARNING, "clcomm"):
        source, found = load_newest(comm, tmp_path / "run.npz")
    assert (source.name, found.facts["step"]) == ("run.npz.2", 0)
    assert "run.npz: damaged" in caplog.text and "going on from" in caplog.text


def test_an_earlier_one_serves_where_the_newest_is_gone(tmp_path: Path, comm: Communicator) -> None:
    series = CheckpointSeries(comm, tmp_path / "run.npz", keep=2)
    series.save(checkpoint(1))
    series.save(checkpoint(2))
    (tmp_path / "run.npz").unlink()
    assert load_newest(comm, tmp_path / "run.npz")[1].facts["step"] == 1


def test_the_newest_files_error_is_raised_where_all_are_damaged(tmp_path: Path, comm: Communicator) -> None:
    series = CheckpointSeries(comm, tmp_path / "run.npz", keep=2)
    series.save(checkpoint(1))
    series.save(checkpoint(2))
    for age in (0, 1):
        cut(earlier(tmp_path / "run.npz", age))
    with pytest.raises(CheckpointError, match=r"run\.npz: damaged"):
        load_newest(comm, tmp_path / "run.npz")


def test_training_continues_while_a_file_is_written(
    tmp_path: Path, comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    may_write, real = threading.Event(), series_module.save

    def slow_save(*args: object, **settings: object) -> None:
        assert may_write.wait(20)
        real(*args, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(series_module, "save", slow_save)
    series = CheckpointSeries(comm, tmp_path / "run.npz", background=True)
    series.save(checkpoint(1))  # returns although nothing can be written yet
    assert not (tmp_path / "run.npz").exists()
    may_write.set()
    series.wait()
    assert load(tmp_path / "run.npz").facts["step"] == 1


@pytest.mark.parametrize("keep", [0, -1, 1000, "2"])
def test_a_senseless_keep_is_refused(comm: Communicator, keep: object) -> None:
    with pytest.raises(ArgumentError, match="keep: expected"):
        CheckpointSeries(comm, "run.npz", keep=keep)  # type: ignore[arg-type]


@pytest.mark.mpi
def test_every_rank_gets_rank_0s_file_or_its_error(tmp_path: Path) -> None:
    comm = Communicator()
    path = comm.broadcast_object(str(tmp_path / "run.npz"))
    series = CheckpointSeries(comm, path, keep=2)
    for step in (1, 2):
        series.save(checkpoint(step) if comm.rank == 0 else None)
    comm.barrier()
    if comm.rank == 0:
        cut(Path(path))
    comm.barrier()
    source, found = load_newest(comm, path if comm.rank == 0 else "only rank 0 reads")
    assert (str(source), found.facts["step"]) == (path + ".1", 1)
    assert found.arrays["parameter/a"].tobytes() == checkpoint(1).arrays["parameter/a"].tobytes()
    with pytest.raises(CheckpointError, match="found none"):
        load_newest(comm, path + ".missing")
    comm.finalize()


@pytest.mark.mpi
@pytest.mark.parametrize("background", [True, False])
def test_a_failed_write_is_every_ranks_error(tmp_path: Path, background: bool) -> None:
    comm = Communicator()
    folder = Path(comm.broadcast_object(str(tmp_path / "folder")))
    series = CheckpointSeries(comm, folder / "run.npz", background=background)
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(folder)
        folder.write_text("not a directory")

    def save() -> None:
        series.save(checkpoint(1) if comm.rank == 0 else None)

    if background:
        save()
    with pytest.raises(CheckpointError, match="could not be written"):
        save()
    series.wait()  # raised once
    comm.finalize()


@pytest.mark.mpi
def test_a_place_that_cannot_be_written_is_every_ranks_error_at_once(tmp_path: Path) -> None:
    comm = Communicator()
    blocker = comm.broadcast_object(str(tmp_path / "file"))
    if comm.rank == 0:
        Path(blocker).write_text("not a directory")
    with pytest.raises(ArgumentError, match=r"^checkpoint: expected a file to write, got '.*run.npz': Not a directory"):
        CheckpointSeries(comm, f"{blocker}/run.npz" if comm.rank == 0 else "only rank 0 looks")
    comm.finalize()


def test_what_killed_jobs_left_is_cleared_away(tmp_path: Path, comm: Communicator) -> None:
    ours = [".run.npz.partial", ".run.npz.0123456789abcdef.partial"]
    others = [".run.npz.2.0123456789abcdef.partial", ".other.0123456789abcdef.partial", ".run.npz.partial.txt"]
    for name in (*ours, *others):
        (tmp_path / name).write_bytes(b"half a file")
    CheckpointSeries(comm, tmp_path / "run.npz").close()
    assert sorted(os.listdir(tmp_path)) == sorted(others)


@pytest.mark.parametrize("whole", [0, 1, 2, 3, 40, 99])
@pytest.mark.parametrize("damaged", [(), (0,), (0, 1), (1,), (0, 2)])
def test_whichever_is_whole_is_found(tmp_path: Path, comm: Communicator, whole: int, damaged: tuple[int, ...]) -> None:
    """The newest undamaged one, with newer files missing or damaged."""
    for age in damaged:
        earlier(tmp_path / "run.npz", age).write_bytes(b"damaged")
    save(earlier(tmp_path / "run.npz", whole), checkpoint(7))
    source, found = load_newest(comm, tmp_path / "run.npz")
    assert (source, found.facts["step"]) == (earlier(tmp_path / "run.npz", whole), 7)


def test_a_series_lies_beside_what_its_link_leads_to(tmp_path: Path, comm: Communicator) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "run.npz"
    link.symlink_to("disk/saved.npz")
    with contextlib.closing(CheckpointSeries(comm, link, keep=2)) as series:
        for step in (1, 2):
            series.save(checkpoint(step))
    assert link.is_symlink() and sorted(os.listdir(tmp_path / "disk")) == ["saved.npz", "saved.npz.1"]
    assert load_newest(comm, link)[1].facts["step"] == 2
    cut(tmp_path / "disk" / "saved.npz")
    assert load_newest(comm, link)[1].facts["step"] == 1
