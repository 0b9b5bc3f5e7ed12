"""Copies of a state in memory: every host's newest complete one, on all ranks, and when the next one is due."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from clcomm.comm.communicator import Communicator
from clcomm.comm.watch import worlds
from clcomm.jobs.checkpoint import Checkpoint
from clcomm.jobs.checkpoint.memory import MemoryCopies, seconds_apart


def state(step: int) -> Checkpoint:
    array = np.arange(1000, dtype=np.float32) + step
    array.flags.writeable = False  # as a tensor's
    return Checkpoint({"parameter/a": array}, {"step": step})


@pytest.fixture
def folder(comm: Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory as `clcomm run` makes it, on one host."""
    shared = Path(comm.broadcast_object(str(tmp_path)))
    monkeypatch.setenv(worlds.MEMORY, str(shared))
    return shared


def save(copies: MemoryCopies, comm: Communicator, step: int) -> bool:
    ends = copies.save(state(step) if comm.rank == 0 else None, step, time.monotonic())
    copies.wait()
    comm.barrier()
    return ends


def step_of(copies: MemoryCopies) -> int | None:
    found = copies.newest()
    if found is None:
        return None
    assert np.array_equal(found.arrays["parameter/a"], state(found.facts["step"]).arrays["parameter/a"])
    return int(found.facts["step"])


def test_without_clcomm_run_there_are_none(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(worlds.MEMORY, raising=False)
    copies = MemoryCopies(comm)
    assert not copies.is_on and not copies.is_due(1) and copies.newest() is None


def test_the_newest_is_on_every_rank_and_a_damaged_one_is_none(comm: Communicator, folder: Path, monkeypatch) -> None:
    copies = MemoryCopies(comm, 3)
    assert step_of(copies) is None and copies.is_due(1)
    for step in (1, 4):
        assert not save(copies, comm, step) and step_of(copies) == step
    assert [copies.is_due(step) for step in (5, 6, 7)] == [False, False, True]
    (path,) = folder.glob("state-*.npz")
    comm.barrier()
    if comm.rank == 0:
        path.write_bytes(path.read_bytes()[:-200])
    comm.barrier()
    assert step_of(copies) is None


def test_ranks_end_together_when_they_are_asked_to(comm: Communicator, folder: Path) -> None:
    copies = MemoryCopies(comm, 1)
    assert not save(copies, comm, 1)
    if comm.rank == 0:
        worlds.stop_sign(folder, 0).touch()
    comm.barrier()
    assert save(copies, comm, 2) and step_of(copies) == 2


def test_copies_become_rare_where_they_take_more_than_their_share(comm: Communicator, folder: Path) -> None:
    """Each copy takes as long as a step: no more than one in 50 is made, and the distance at most doubles."""
    copies, made, step = MemoryCopies(comm), [], 0
    while len(made) < 8:
        step += 1
        time.sleep(0.001)
        if copies.is_due(step):
            began_s = time.monotonic()
            time.sleep(0.1)
            copies.save(state(step) if comm.rank == 0 else None, step, began_s)
            made.append(step)
    copies.wait()
    distances = np.diff(made)
    assert list(distances[:5]) == [1, 2, 4, 8, 16] and (distances <= 128).all()


@pytest.mark.parametrize(
    ("cost_s", "apart_s"), [(0.0, 0.0), (0.005, 0.25), (0.010, 0.5), (0.020, 0.5), (0.025, 0.5), (0.030, 1.5)]
)
def test_copies_take_more_where_that_keeps_them_near(cost_s: float, apart_s: float) -> None:
    assert seconds_apart(cost_s) == pytest.approx(apart_s)


def test_one_copy_that_was_held_up_does_not_put_off_the_next(comm: Communicator, folder: Path) -> None:
    copies, now_s, distances = MemoryCopies(comm), time.monotonic(), []
    for cost_s in [0.005] * 8 + [0.2] + [0.005] * 3:
        step, now_s = copies._next, now_s + 0.1 * (copies._between if distances else 1) + cost_s
        copies._written_s = cost_s  # of the copy before
        _, copies._next = copies._plan(step, now_s)
        distances.append(copies._next - step)
    assert distances[-4:] == [distances[-5]] * 4


def test_hosts_have_complete_copies_and_the_newest_counts(several: Communicator, tmp_path: Path, monkeypatch) -> None:
    """Each rank stands for a host, with a directory of its own; the first has lost its memory, another is late."""
    monkeypatch.setenv(worlds.MEMORY, str(tmp_path))
    monkeypatch.setattr(several, "hosts", several.size)
    monkeypatch.setattr(several, "local_rank", 0)
    copies = MemoryCopies(several, 1)
    copies._path = tmp_path / f"host-{several.rank}" / "state.npz"
    assert not save(copies, several, 1)
    old = copies._path.read_bytes()
    assert not save(copies, several, 2) and step_of(copies) == 2
    if several.rank == 0:
        copies._path.unlink()
    elif several.rank > 1:
        copies._path.write_bytes(old)
    several.barrier()
    assert step_of(copies) == 2
