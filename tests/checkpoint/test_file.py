"""Checkpoints: whole or not at all, and nothing but checkpoints is taken for one."""

from __future__ import annotations

import os
import re
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.base.errors import CheckpointError
from clcomm.base.flat_space.parameters import ParameterSpec
from clcomm.jobs.checkpoint import Checkpoint, check_parameters, earlier, load, save


def example() -> Checkpoint:
    checkpoint = Checkpoint(facts={"progress": {"step": 3}})
    checkpoint.add_group("parameter", {"fc.weight": np.arange(12, dtype=np.float32).reshape(3, 4)})
    checkpoint.add_group("optimizer", {"step": np.int64(7), "momentum": np.array([np.nan, -0.0, 1e-45], np.float32)})
    return checkpoint


def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    save(tmp_path / "deep" / "run.npz", example())
    loaded = load(tmp_path / "deep" / "run.npz")
    assert loaded.facts["progress"] == {"step": 3}
    assert list(loaded.arrays) == list(example().arrays)
    for name, array in example().arrays.items():
        assert loaded.arrays[name].tobytes() == array.tobytes()
        assert (loaded.arrays[name].dtype, loaded.arrays[name].shape) == (array.dtype, array.shape)
    assert list(loaded.group("optimizer")) == ["step", "momentum"]


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.npz: expected a file, found none"):
        load(tmp_path / "none.npz")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "run.npz", example())
    whole = (tmp_path / "run.npz").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "cut.npz").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.npz"):
            load(tmp_path / "cut.npz")


@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, position: int, bit: int
) -> None:
    directory = tmp_path_factory.mktemp("flip")
    save(directory / "run.npz", example())
    data = bytearray((directory / "run.npz").read_bytes())
    data[position % len(data)] ^= 1 << bit
    (directory / "run.npz").write_bytes(data)
    try:
        loaded = load(directory / "run.npz")
    except CheckpointError as error:
        assert "\n" not in str(error)
    else:  # the zip format has bytes without meaning, e.g. times; the content must then be the same
        for name, array in loaded.arrays.items():
            assert array.tobytes() == example().arrays[name].tobytes()


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    np.savez(tmp_path / "evil.npz", evil=np.array([object()], dtype=object))
    with pytest.raises(CheckpointError):
        load(tmp_path / "evil.npz")
    save(tmp_path / "run.npz", example())
    with zipfile.ZipFile(tmp_path / "run.npz", "a") as archive, archive.open("x.npy", "w") as member:
        np.lib.format.write_array(member, np.array([object()], dtype=object), allow_pickle=True)
    with pytest.raises(CheckpointError, match="damaged"):
        load(tmp_path / "run.npz")


def test_other_formats_and_versions_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "a.npz", Checkpoint(facts={"format": "other"}))
    with pytest.raises(CheckpointError, match="expected the format clcomm-checkpoint"):
        load(tmp_path / "a.npz")
    save(tmp_path / "b.npz", Checkpoint(facts={"version": 99}))
    with pytest.raises(CheckpointError, match="expected version 2, found 99"):
        load(tmp_path / "b.npz")


def test_a_failed_save_keeps_the_old_file_and_leaves_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "run.npz", example())
    before = (tmp_path / "run.npz").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        CheckpointError, match=r"could not be written \(No space left on device\); the old file is kept"
    ):
        save(tmp_path / "run.npz", Checkpoint())
    assert (tmp_path / "run.npz").read_bytes() == before
    assert os.listdir(tmp_path) == ["run.npz"]


def test_another_models_parameters_are_named() -> None:
    specs = [ParameterSpec("a", (2, 3)), ParameterSpec("b", (4,))]
    check_parameters({"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float32)}, specs)
    with pytest.raises(CheckpointError, match=r"parameter 'b' is \(4,\) float32 here and \(5,\) float32 in the file"):
        check_parameters({"a": np.zeros((2, 3), np.float32), "b": np.zeros(5, np.float32)}, specs)
    with pytest.raises(
        CheckpointError, match=r"parameter 'c' is no such parameter here and \(1,\) float64 in the file"
    ):
        check_parameters({"a": np.zeros((2, 3), "f4"), "b": np.zeros(4, "f4"), "c": np.zeros(1)}, specs)


@pytest.mark.parametrize("has_links", [True, False])
def test_earlier_files_stay_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool) -> None:
    if not has_links:

        def refuse(source: object, target: object) -> None:
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "run.npz"
    for step in range(6):
        save(path, Checkpoint(facts={"step": step}), keep=3)
    assert sorted(os.listdir(tmp_path)) == ["run.npz", "run.npz.1", "run.npz.2"]
    assert [load(earlier(path, age)).facts["step"] for age in range(3)] == [5, 4, 3]


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    save(tmp_path / "run.npz", example())
    assert (tmp_path / "run.npz").stat().st_mode & 0o077 == 0


def write_member(path: Path, name: str, data: bytes, compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, data, compression)


def npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


@pytest.mark.parametrize(
    ("name", "data", "compression"),
    [
        ("huge.npy", npy("{'descr': '<f8', 'fortran_order': False, 'shape': (10**15,)}"), zipfile.ZIP_STORED),
        (
            "huge.npy",
            npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,)}", bytes(8)),
            zipfile.ZIP_STORED,
        ),
        (
            "short.npy",
            npy("{'descr': '<f8', 'fortran_order': False, 'shape': (2,)}", bytes(8)),
            zipfile.ZIP_STORED,
        ),
        ("bomb.npy", bytes(10_000_000), zipfile.ZIP_DEFLATED),
        ("code.npy", npy("__import__('os').abort()"), zipfile.ZIP_STORED),
        ("facts.json", b"{}", zipfile.ZIP_STORED),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_hostile_members_are_refused_before_memory_is_taken(
    tmp_path: Path, name: str, data: bytes, compression: int
) -> None:
    save(tmp_path / "run.npz", example())
    write_member(tmp_path / "run.npz", name, data, compression)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="damaged or not a checkpoint"):
            load(tmp_path / "run.npz")
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("facts.json", b"{}", "two members have the same name"),
        ("x.npy", npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", bytes(8)),
         "x.npy holds object, which a checkpoint cannot contain"),
        ("x.npy", npy("{'descr': '<M8[s]', 'fortran_order': False, 'shape': (1,)}", bytes(8)),
         "x.npy holds datetime64[s], which a checkpoint cannot contain"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_the_reason_why_a_member_is_refused_is_given(tmp_path: Path, name: str, data: bytes, reason: str) -> None:
    save(tmp_path / "run.npz", example())
    write_member(tmp_path / "run.npz", name, data)
    with pytest.raises(CheckpointError, match=re.escape(reason)):
        load(tmp_path / "run.npz")
