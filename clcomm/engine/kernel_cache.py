"""Verification of PoCL's cache of built kernels by digests taken at build time.

PoCL loads cached files unchecked, and crashes on truncated ones. A seal lists the files of the programs that a run
uses, with their digests: programs whose files differ are deleted, and PoCL builds them again.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from clcomm.storage.files import open_regular, read_regular, remove_tree

#: The most bytes of a seal.
_MOST_BYTES = 1 << 22
#: PoCL touches this file of a program's folder at each use. File times may be a clock tick, a few milliseconds, too
#: early, for which _TICK_S is ample.
TOUCHED, _TICK_S = "last_accessed", 1.0
_PIECE_BYTES = 1 << 20

#: Folders by relative name; in each, [length, digest] of its files by relative name.
Seal = dict[str, dict[str, tuple[int, str]]]


def used_since(cache: Path, since: float) -> list[Path]:
    """Return the folders of programs used since a time (seconds of the epoch) or shortly before it."""
    folders = [path.parent for path in cache.glob(f"*/*/{TOUCHED}") if path.lstat().st_mtime >= since - _TICK_S]
    return [folder for folder in folders if _is_inside(cache, folder)]


def seal(cache: Path, folders: list[Path]) -> str:
    return json.dumps({str(folder.relative_to(cache)): digests_of(folder) for folder in sorted(folders)})


def damaged(cache: Path, text: str, sealed_s: float) -> list[Path]:
    """Return the folders of which a file is missing or has changed since they were sealed.

    A file that is newer than `sealed_s` (seconds of the epoch) and not shorter was built again, so it is valid: PoCL
    writes each file atomically. Raises ValueError for text that is no seal.
    """
    folders = []
    for name, sealed in _parse(text).items():
        if not _is_inside(cache, cache / name):
            continue
        found = digests_of(cache / name)
        for file, (length, digest) in sealed.items():
            now = found.get(file)
            if now is None or now[0] < length or (now[1] != digest and _changed_s(cache / name / file) <= sealed_s):
                folders.append(cache / name)
                break
    return folders


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def read_seal(path: Path) -> str:
    """Return a seal's text; raises ValueError or OSError for a file that cannot be one."""
    return read_regular(path, _MOST_BYTES).decode("utf-8")


def clear(folders: list[Path]) -> None:
    """Delete program folders where permitted, without following links."""
    for folder in folders:
        with suppress(OSError):
            above = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                remove_tree(folder.name, above)
            finally:
                os.close(above)


def _is_inside(cache: Path, folder: Path) -> bool:
    """Return whether a program's folder lies in the cache without any symbolic link on the way."""
    return not any(map(os.path.islink, (folder, folder.parent))) and folder.parent.parent == cache


def digests_of(folder: Path) -> dict[str, tuple[int, str]]:
    found: dict[str, tuple[int, str]] = {}
    for directory, _, names in os.walk(folder):
        for name in names:
            path = Path(directory, name)
            if name != TOUCHED:
                with suppress(OSError):  # deleted meanwhile, or unreadable for PoCL too
                    found[str(path.relative_to(folder))] = _digest(path)
    return found


def _digest(path: Path) -> tuple[int, str]:
    digest = blake2b(digest_size=16)
    with open_regular(path) as file:
        length = 0
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            length += len(piece)
    return length, digest.hexdigest()


def _parse(text: str) -> Seal:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("expected folders by name")
    for name, digests in value.items():
        inside = not os.path.isabs(name) and ".." not in Path(name).parts and len(Path(name).parts) == 2
        if not inside or not isinstance(digests, dict) or not all(map(_is_digest, digests.values())):
            raise ValueError("expected lengths and digests of a program folder's files")
    return value


def _is_digest(value: object) -> bool:
    return isinstance(value, list) and [type(each) for each in value] == [int, str]
