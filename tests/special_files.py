"""Files of every kind that a program may find where it wants to read or write an ordinary one."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

#: Minor numbers of the character devices with major number 1.
DEVICES = {"null device": 3, "a device": 3, "endless device": 5, "full device": 7}
_LINK = "link to "


def make(kind: str, folder: Path) -> Path:
    """Return a path in a folder, which is made if need be, at which there is a file of this kind.

    "link to KIND" is a symbolic link to a file of that kind, in a folder beside it. Raises PermissionError for devices
    where the system lets this user make none.
    """
    folder.mkdir(exist_ok=True)
    path = folder / "it"
    if kind in DEVICES:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, DEVICES[kind]))
    elif kind.startswith(_LINK):
        path.symlink_to(os.path.relpath(make(kind.removeprefix(_LINK), folder / "far"), folder))
    elif kind == "file":
        path.write_text("old")
    elif kind == "directory":
        path.mkdir()
        (path / "kept").touch()
    elif kind == "named pipe":
        os.mkfifo(path)
    elif kind == "socket":
        _bind(folder)
    elif kind == "link in a circle":
        path.symlink_to("it")
    elif kind == "below a file":
        path.touch()
    return _NOTHING_THERE.get(kind, lambda folder: path)(folder)


#: Kinds whose path leads to nothing.
_NOTHING_THERE = {
    "below a file": lambda folder: folder / "it" / "it",
    "missing directory": lambda folder: folder / "none" / "at all" / "it",
    "name too long": lambda folder: folder / ("n" * 256),
    "partial name too long": lambda folder: folder / ("n" * 250),
    "in /proc": lambda folder: Path("/proc/none"),
}


def _bind(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(f"/proc/self/fd/{handle}/it")  # a socket's path has no more than 107 bytes
    finally:
        os.close(handle)
