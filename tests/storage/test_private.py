"""Nothing of another user's is trusted, run or removed, and nothing is kept where others could change it."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from pathlib import Path

import pytest

from clcomm.base.errors import ArgumentError, DeviceError
from clcomm.base.storage import private, scratch
from clcomm.base.storage.private import cache_directory, exposure, private_temporary
from clcomm.engine import pocl as sealed_programs
from tests.other_user import NOBODY, as_nobody, common_directory

HOMES = ("XDG_CACHE_HOME", "HOME", "POCL_CACHE_DIR", "CLCOMM_CACHE_DIR", "POCL_KERNEL_CACHE")


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch):
    """A temporary directory that all users share, and an environment that names no other place for files."""
    for name in HOMES:
        monkeypatch.delenv(name, raising=False)
    private._fallback_for.cache_clear()
    with common_directory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        yield folder
    private._fallback_for.cache_clear()


@pytest.mark.parametrize(
    ("mode", "owner", "above", "reason"),
    [
        (0o700, 0, 0o755, ""),
        (0o755, 0, 0o755, ""),
        (0o755, 0, 0o1777, ""),
        (0o775, 0, 0o755, "others may write to it (mode 0775)"),
        (0o757, 0, 0o755, "others may write to it (mode 0757)"),
        (0o1777, 0, 0o755, "others may write to it (mode 1777)"),
        (0o700, NOBODY, 0o755, f"it belongs to user {NOBODY}"),
        (0o700, 0, 0o777, "others may write to "),
    ],
)
def test_users_that_could_change_a_directory(tmp_path: Path, mode: int, owner: int, above: int, reason: str) -> None:
    parent = tmp_path / "above"
    directory = parent / "it"
    directory.mkdir(parents=True)
    parent.chmod(above)
    directory.chmod(mode)
    if owner:
        if os.geteuid() != 0:
            pytest.skip("only root can give files away")
        os.chown(directory, owner, owner)
    assert exposure(directory).startswith(reason) and bool(exposure(directory)) == bool(reason)


def test_a_directory_below_another_users_is_not_private(temporary: Path) -> None:
    (temporary / "theirs").mkdir()
    (temporary / "theirs" / "ours").mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(temporary / "theirs", NOBODY, NOBODY)
        assert f"belongs to user {NOBODY}" in exposure(temporary / "theirs" / "ours")
        assert exposure(temporary / "theirs" / "ours", chosen=True) == ""
    (temporary / "link").symlink_to("theirs")
    assert exposure(temporary / "link") == "it is not a directory"


def prepared(temporary: Path, **environment: str) -> tuple[str, str]:
    """Return POCL_CACHE_DIR as PoCL finds it, and what was refused, for a user with this environment."""
    os.environ.update(environment)
    tempfile.tempdir = str(temporary)
    try:
        sealed_programs.prepare()
    except (ArgumentError, DeviceError) as error:
        return "", str(error)
    found = os.environ["POCL_CACHE_DIR"]
    assert exposure(Path(found)) == ""
    return found, ""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("home", ["", "/nonexistent", "/proc", "/dev/null"])
@pytest.mark.parametrize("planted", ["", "pocl/kcache"])
def test_pocl_runs_nothing_that_another_user_planted(temporary: Path, home: str, planted: str) -> None:
    if planted:
        (temporary / planted).mkdir(parents=True)
    found, _ = as_nobody(prepared, temporary, *[]) if not home else as_nobody(_with_home, temporary, home)
    assert found == str(temporary.resolve() / f"clcomm-{NOBODY}" / "pocl" / "kcache")
    assert Path(found).stat().st_mode & 0o777 == 0o700 and Path(found).stat().st_uid == NOBODY


def _with_home(temporary: Path, home: str) -> tuple[str, str]:
    return prepared(temporary, HOME=home)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["directory", "link", "file", "open directory"])
def test_a_squatted_place_is_refused_in_a_line(temporary: Path, kind: str) -> None:
    place = temporary / f"clcomm-{NOBODY}"
    if kind == "link":
        (temporary / "theirs").mkdir()
        place.symlink_to("theirs")
    elif kind == "file":
        place.touch()
    else:
        place.mkdir()
        place.chmod(0o777 if kind == "open directory" else 0o755)
    found, refused = as_nobody(prepared, temporary)
    assert found == "" and "\n" not in refused
    assert str(place) in refused and "set TMPDIR" in refused


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o770, 0o777, 0o1777])
def test_a_directory_of_the_users_choice_is_accepted_where_no_other_user_can_write(temporary: Path, mode: int) -> None:
    chosen = temporary / "chosen"
    chosen.mkdir()
    chosen.chmod(mode)
    (temporary / "link").symlink_to("chosen")
    for name in ("chosen", "link"):
        found, refused = prepared(temporary, POCL_CACHE_DIR=str(temporary / name))
        assert found == ("" if mode & 0o022 else str(chosen.resolve()))
        assert refused.startswith("POCL_CACHE_DIR: expected a directory") == bool(mode & 0o022)
    if os.geteuid() == 0:
        os.chown(chosen, NOBODY, NOBODY)
        assert "belongs to user" in prepared(temporary, POCL_CACHE_DIR=str(chosen))[1]


def test_without_a_home_a_temporary_directory_is_used_with_one_warning(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", "/proc/none")
    with caplog.at_level(logging.WARNING, "clcomm"):
        places = {cache_directory() for _ in range(3)}
    assert places == {temporary.resolve() / f"clcomm-{os.geteuid()}" / "clcomm"}
    assert len(caplog.records) == 1 and "caches are kept in" in caplog.text


def test_without_any_place_it_is_one_line(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    monkeypatch.setenv("HOME", "/proc/none")
    for use in (cache_directory, private_temporary, sealed_programs.prepare):
        with pytest.raises(ArgumentError, match=r"^TMPDIR: expected a directory that can be written to") as caught:
            use()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["run", "build"])
def test_only_files_of_killed_jobs_are_removed(temporary: Path, kind: str) -> None:
    def aged(path: Path, owner: int = os.geteuid()) -> Path:
        os.chown(path, owner, owner, follow_symlinks=False)
        os.utime(path, (1, 1), follow_symlinks=False)
        return path

    def left(name: str) -> Path:
        path = temporary / name
        if kind == "build":
            path.mkdir()
            (path / "0").touch()
        else:
            path.write_bytes(bytes(16))
        return path

    precious = temporary / "precious"
    precious.mkdir()
    (precious / "file").touch()
    dead, young = aged(left(f"clcomm-{kind}-dead")), left(f"clcomm-{kind}-young")
    kept = [young, aged(left(f"clcomm-{kind}")), aged(left("clcomm-dump-x")), aged(left(f"other-{kind}-x"))]
    (temporary / f"clcomm-{kind}-link").symlink_to(precious)
    kept.append(aged(temporary / f"clcomm-{kind}-link"))
    if kind == "build":
        (dead / "link").symlink_to(precious)
        aged(dead)
    if os.geteuid() == 0:
        kept.append(aged(left(f"clcomm-{kind}-theirs"), NOBODY))
    locked = aged(left(f"clcomm-{kind}-alive"))
    descriptor = os.open(locked, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    scratch.remove_stale()
    assert not dead.exists() and locked.exists() and all(map(os.path.lexists, kept))
    assert (precious / "file").exists()
    os.close(descriptor)
    scratch.remove_stale()
    assert not locked.exists()


def test_files_in_use_are_not_removed(temporary: Path) -> None:
    with scratch.scratch_directory("build") as folder:
        file = scratch.scratch_file(folder / "file", b"content")
        for path in (folder, file):
            os.utime(path, (1, 1))
        scratch.remove_stale()
        assert Path(file).read_bytes() == b"content" and folder.stat().st_mode & 0o077 == 0
    assert list(temporary.iterdir()) == []
