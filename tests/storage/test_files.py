"""What lies at a path decides what may happen there: every kind of file, for everything that reads or writes one."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clcomm.base.errors import ArgumentError, CheckpointError
from clcomm.base.storage import files
from clcomm.insight.trace.part_file import PartWriter, TracePart
from clcomm.jobs.checkpoint import Checkpoint, load, save
from tests import special_files
from tests.other_user import NOBODY, as_nobody, common_directory

#: Kinds of files that are never overwritten, and the reason in each error.
REFUSED = {
    "directory": "a directory", "named pipe": "a named pipe", "socket": "a socket", "null device": "a device",
    "endless device": "a device", "link in a circle": "a symbolic link that leads in a circle",
    "below a file": "Not a directory", "name too long": "File name too long",
    "partial name too long": "File name too long",
}  # fmt: skip
#: Kinds at which a file may be written.
TAKEN = ("missing", "missing directory", "file", "link to missing", "link to file", "link to link to file")


def make(kind: str, folder: Path) -> Path:
    """Return a path at which there is a file of this kind."""
    try:
        return special_files.make(kind, folder)
    except PermissionError:
        pytest.skip("the system lets this user make no devices")


def written(path: Path) -> None:
    files.write_whole(path, "new", "--option")


def saved(path: Path) -> None:
    save(path, Checkpoint(facts={"step": 1}), keep=2)


def replaced(path: Path) -> None:
    with files.replacing(path) as file:
        file.write(b"new")


def opened(path: Path) -> None:
    with files.open_locked(path, "w") as file:
        file.write("new")


def parted(path: Path) -> None:
    PartWriter(path, {"rank": 0}).close()


def state(folder: Path) -> list[tuple[str, int, int]]:
    """Return all that is in a folder, with what each is."""
    # os.walk: Path.rglob of Python 3.11.2 fails at a link to a name that is too long.
    found = [Path(where, name) for where, folders, names in os.walk(folder) for name in (*folders, *names)]
    return sorted((str(p), stat.S_IFMT(p.lstat().st_mode), p.lstat().st_ino) for p in found)


@pytest.mark.parametrize("linked", ["", "link to "])
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("write", [written, saved, replaced, opened, parted, files.check_writable])
def test_nothing_takes_the_place_of_what_is_no_file(
    tmp_path: Path, write: Callable[[Path], object], kind: str, linked: str
) -> None:
    if kind == "partial name too long" and write in (opened, parted):
        pytest.skip("nothing is written beside it")
    path = make(linked + kind, tmp_path)
    before = state(tmp_path)
    with pytest.raises((OSError, ArgumentError, CheckpointError)) as caught:
        write(path)
    assert REFUSED[kind] in str(caught.value)
    assert state(tmp_path) == before


@pytest.mark.parametrize("kind", TAKEN)
@pytest.mark.parametrize("write", [written, saved, replaced, opened, parted])
def test_a_file_is_written_where_one_may_be(tmp_path: Path, write: Callable[[Path], object], kind: str) -> None:
    path = make(kind, tmp_path)
    links = [p for p in tmp_path.rglob("*") if p.is_symlink()]
    assert files.check_writable(path) == files.destination(path)
    write(path)
    assert files.destination(path).read_bytes() not in (b"", b"old")
    assert all(link.is_symlink() for link in links)
    assert not [p for p in tmp_path.rglob("*") if p.name.endswith(files.PARTIAL)]


@pytest.mark.parametrize("write", [written, saved, replaced])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], object]
) -> None:
    path = make("file", tmp_path)

    def refuse(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(Exception, match="No space left on device"):
        write(path)
    assert os.listdir(tmp_path) == ["it"] and path.read_text() == "old"


READERS: dict[str, Callable[[Path], object]] = {
    "checkpoint": load, "part": TracePart, "file": lambda path: files.read_regular(path, 1000),
}  # fmt: skip


@pytest.mark.parametrize("linked", ["", "link to "])
@pytest.mark.parametrize("kind", [*REFUSED, "missing"])
@pytest.mark.parametrize("reader", READERS)
def test_reading_what_is_no_file_ends_at_once(tmp_path: Path, reader: str, kind: str, linked: str) -> None:
    path = make(linked + kind, tmp_path)
    with pytest.raises((OSError, ArgumentError, CheckpointError)):
        READERS[reader](path)


def test_a_file_longer_than_it_may_be_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "it").write_bytes(bytes(11))
    assert files.read_regular(tmp_path / "it", 11) == bytes(11)
    with pytest.raises(OSError, match="longer than 10 bytes"):
        files.read_regular(tmp_path / "it", 10)


def test_only_one_job_writes_a_file_in_place(tmp_path: Path) -> None:
    path = tmp_path / "log"
    program = f"from clcomm.base.storage.files import open_locked; open_locked({str(path)!r}, 'a')"
    with files.open_locked(path, "w") as file:
        file.write("ours")
        file.flush()
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert "another job writes it" in ended.stderr and path.read_text() == "ours"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def refusal(path: Path, in_place: bool = False) -> str:
    """Return why no file can be written there; "" where one can."""
    try:
        files.check_writable(path, in_place=in_place)
    except OSError as error:
        return error.strerror
    return ""


def test_another_users_files_are_left_alone() -> None:
    with common_directory() as common:
        for name, mode in (("theirs", 0o644), ("open", 0o666), ("own", 0o644)):
            (common / name).write_text("content")
            (common / name).chmod(mode)
        os.chown(common / "own", NOBODY, NOBODY)
        (common / "link").symlink_to("new")
        os.lchown(common / "link", 1, 1)
        (common / "closed").mkdir(mode=0o755)
        (common / "closed" / "open").touch()
        (common / "closed" / "open").chmod(0o666)
        expected = {
            "theirs": "Permission denied", "open": "a file of another user", "link": "a symbolic link of another user",
            "closed/new": "Permission denied", "new": "", "own": "",
        }  # fmt: skip
        assert {name: as_nobody(refusal, common / name) for name in expected} == expected
        assert as_nobody(refusal, common / "theirs", True) == "Permission denied"
        assert as_nobody(refusal, common / "closed" / "open", True) == ""
        assert refusal(common / "link") == "a symbolic link of another user"  # root is not led by others either


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        (stat.S_IFDIR, "a directory"), (stat.S_IFIFO, "a named pipe"), (stat.S_IFSOCK, "a socket"),
        (stat.S_IFCHR, "a device"), (stat.S_IFBLK, "a device"), (0, "not a regular file"),
    ],
)  # fmt: skip
def test_each_kind_of_file_has_its_name(mode, name):
    assert files.kind_of(mode | 0o600) == name
