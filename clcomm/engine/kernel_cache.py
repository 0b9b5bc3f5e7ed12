"""PoCL's cache of built kernels, held against what was in it when it was made.

PoCL loads what it finds there unseen, and ends the process when a file is cut short. A seal lists the files of the
programs that a run uses, with their digests: what differs is thrown away, and PoCL builds it anew.
"""

from __future__ import annotations

import json
import os
import shutil
from hashlib import blake2b
from pathlib import Path

#: More than the seal of any run has.
_MOST_BYTES = 1 << 22
#: PoCL touches this file of a program's folder at each use, by a clock that ticks every few milliseconds.
_TOUCHED, _TICK_S = "last_accessed", 1.0

#: Digests of a program folder's files by their names, of all folders by theirs; both relative to what they lie in.
Seal = dict[str, dict[str, str]]


def used_since(cache: Path, since: float) -> list[Path]:
    """Return the folders of the programs that were used since a time (seconds of the epoch) or shortly before it."""
    return [path.parent for path in cache.glob(f"*/*/{_TOUCHED}") if path.stat().st_mtime >= since - _TICK_S]


def seal(cache: Path, folders: list[Path]) -> str:
    """Return the seal of these program folders of the cache, as text."""
    return json.dumps({str(folder.relative_to(cache)): _digests(folder) for folder in sorted(folders)})


def damaged(cache: Path, text: str) -> list[Path]:
    """Return the folders that have lost or changed a file since they were sealed; ValueError for what is no seal."""
    sealed = _parse(text)
    return [cache / name for name, digests in sealed.items() if not digests.items() <= _digests(cache / name).items()]


def read_seal(path: Path) -> str:
    """Return a seal's text; ValueError or OSError for what cannot be one."""
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError("too long for a seal")
    return path.read_text(encoding="utf-8")


def clear(folders: list[Path]) -> None:
    """Throw program folders away, as far as that is allowed."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _digests(folder: Path) -> dict[str, str]:
    found = {}
    for directory, _, names in os.walk(folder):
        for name in names:
            path = Path(directory, name)
            if name != _TOUCHED:
                try:
                    found[str(path.relative_to(folder))] = blake2b(path.read_bytes(), digest_size=16).hexdigest()
                except OSError:
                    continue  # gone in the meantime, or not to be read: PoCL could not either
    return found


def _parse(text: str) -> Seal:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("expected folders by name")
    for name, digests in value.items():
        inside = not os.path.isabs(name) and ".." not in Path(name).parts and len(Path(name).parts) == 2
        if not inside or not isinstance(digests, dict) or not all(isinstance(d, str) for d in digests.values()):
            raise ValueError("expected the digests of a program folder's files")
    return value
