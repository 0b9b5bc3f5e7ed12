"""Checkpoints that were altered with right CRCs: each is refused in one line that names the file and the member."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from clcomm.base.errors import CheckpointError
from clcomm.comm.communicator import Communicator
from clcomm.jobs.checkpoint import Checkpoint, earlier, load, save
from tests.helpers import one_line
from tests.proofs import altered_checkpoints as altered
from tests.proofs.altered_checkpoints import KEY, members_of, zipped
from training.checkpoint_series import CheckpointSeries, load_newest


def checkpoint(step: int) -> Checkpoint:
    values = np.arange(6, dtype=np.float32).reshape(2, 3) + step
    return Checkpoint({"parameter/a": values, "parameter/b": values + 1}, {"step": step})


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY, raising=False)


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "key"
    file.write_text("0123456789abcdef\n")
    monkeypatch.setenv(KEY, str(file))
    return file


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(path)
    line = one_line(caught)
    assert line.startswith(f"checkpoint {path}: ")
    return line


def test_no_drawn_alteration_is_loaded_with_other_values() -> None:
    refused, same, wrong = altered.prove(200, 1)
    assert wrong == []
    assert sum(refused.values()) > 80 and set(refused) | set(same) == {each.__name__ for each in ALL}


ALL = (*altered.ALTERATIONS, altered.sealed_anew)


def test_the_line_names_the_member(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    save(path, checkpoint(1))
    members = members_of(path.read_bytes())
    a, b = "parameter/a.npy", "parameter/b.npy"
    changed = members[a][:-1] + b"\x00"
    for new, reason in (
        ({**members, a: changed}, f"{a} is not what was saved there"),
        ({**members, a: members[b], b: members[a]}, f"{a} is not what was saved there"),
        ({**members, "facts.json": members["facts.json"].replace(b'"step": 1', b'"step": 2')},
         "facts.json is not what was saved there"),
        ({name: members[name] for name in members if name != b}, f"{b} is missing"),
        ({**members, "parameter/c.npy": members[b]}, "parameter/c.npy was added"),
        ({**members, "manifest.json": members["manifest.json"] + b" "}, "its manifest was changed"),
    ):  # fmt: skip
        path.write_bytes(zipped(new))
        assert refusal(path).endswith(f"damaged or not a checkpoint ({reason}); use an earlier one")


def test_a_checkpoint_of_the_format_without_hashes_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "run.npz", Checkpoint(facts={"version": 1}))
    assert "expected version 2, found 1" in refusal(tmp_path / "run.npz")


@pytest.mark.parametrize(("source", "target"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("is_moved", [False, True])
def test_an_older_file_under_a_newer_name_is_passed_over(
    tmp_path: Path, source: int, target: int, is_moved: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path, comm = tmp_path / "run.npz", Communicator(transport="solo")
    for step in range(4):
        save(path, checkpoint(step), keep=4)
    data = earlier(path, source).read_bytes()
    if is_moved:
        earlier(path, source).unlink()
    earlier(path, target).unlink()
    earlier(path, target).write_bytes(data)
    found, loaded = load_newest(comm, path)
    age = 0 if found == path else int(found.suffix[1:])
    assert loaded.facts["step"] == 3 - age
    assert age > 0 and "run.npz: expected the one of this place in the series of run.npz." in caplog.text


def test_a_run_goes_on_after_each_way_to_lose_files(tmp_path: Path) -> None:
    """The chain begins anew, or goes on, where files are missing, damaged, or left by a longer or shorter series."""
    path, comm = tmp_path / "run.npz", Communicator(transport="solo")
    for step, (keep, lost, damaged) in enumerate(
        [(3, (), ()), (3, (), ()), (3, (0,), ()), (3, (0, 1), ()), (2, (), (0,)), (1, (), ()), (3, (), ()),
         (3, (1,), ()), (3, (), (1,)), (2, (), ()), (4, (), ()), (4, (), ())]
    ):  # fmt: skip
        for age in lost:
            earlier(path, age).unlink(missing_ok=True)
        for age in damaged:
            earlier(path, age).unlink()
            earlier(path, age).write_bytes(b"damaged")
        save(path, checkpoint(step), keep=keep)
        source, found = load_newest(comm, path)
        assert (source, found.facts["step"]) == (path, step)


def test_a_job_that_was_killed_between_two_renames_leaves_one_that_is_found(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    for step in range(3):
        save(path, checkpoint(step), keep=3)
    earlier(path, 1).rename(earlier(path, 2))
    earlier(path, 1).hardlink_to(path)
    assert load_newest(Communicator(transport="solo"), path)[0] == path


def test_a_signed_one_needs_its_key(tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.npz"
    save(path, checkpoint(1))
    assert load(path).facts["step"] == 1
    monkeypatch.delenv(KEY)
    assert refusal(path).endswith(f"expected its key, as it is signed, got none; name the key's file in {KEY}")
    monkeypatch.setenv(KEY, str(key))
    key.write_text("another key of 16 bytes")
    assert f"expected the signature of {KEY}'s key, found another" in refusal(path)
    monkeypatch.delenv(KEY)
    save(path, checkpoint(2))
    monkeypatch.setenv(KEY, str(key))
    assert f"expected a signature, as {KEY} is set, found none" in refusal(path)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda key: key.write_text("short"), "expected a key of 16 bytes or more, got 5 in "),
        (lambda key: key.write_bytes(bytes(5000)), "longer than 4096 bytes"),
        (lambda key: key.unlink(), "expected a file that is there"),
    ],
)
def test_an_unusable_key_is_every_ranks_error_at_once(tmp_path: Path, key: Path, make, reason: str) -> None:
    make(key)
    with pytest.raises(Exception, match=re.escape(reason)) as caught:
        CheckpointSeries(Communicator(transport="solo"), tmp_path / "run.npz")
    assert one_line(caught).startswith(KEY)


@pytest.mark.mpi
def test_every_rank_gets_the_line(tmp_path: Path) -> None:
    comm = Communicator()
    path = Path(comm.broadcast_object(str(tmp_path / "run.npz")))
    if comm.rank == 0:
        save(path, checkpoint(1))
        members = members_of(path.read_bytes())
        path.write_bytes(zipped({**members, "parameter/b.npy": members["parameter/a.npy"]}))
    comm.barrier()
    with pytest.raises(CheckpointError) as caught:
        load_newest(comm, path)
    assert f"checkpoint {path}: damaged or not a checkpoint (parameter/b.npy is not what" in one_line(caught)
    comm.finalize()
