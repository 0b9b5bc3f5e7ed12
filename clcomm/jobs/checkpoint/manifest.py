"""The manifest of a checkpoint: a SHA-256 of each member of its file, and of the manifest of the checkpoint before it.

A last member seals the manifest: with its SHA-256, or with an HMAC-SHA256 where CLCOMM_CHECKPOINT_KEY names a file with
a key. Hashes find what was damaged or exchanged; only with a key can nobody else write a checkpoint that is accepted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import zipfile
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol

from clcomm.base.errors import ArgumentError, CheckpointError
from clcomm.base.host import variables
from clcomm.base.storage.files import read_regular

_MANIFEST, _SEAL = "manifest.json", "seal"
_KEY = "CLCOMM_CHECKPOINT_KEY"
#: Bytes of a key: fewer can be guessed, and a longer file is none.
_LEAST_KEY, _MOST_KEY = 16, 4096
_HASHED, _SIGNED = "sha256", "hmac-sha256"


class _Stream(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...

    def write(self, data: bytes, /) -> int: ...


class Hashed:
    """A member that is read or written, and the SHA-256 of all bytes so far."""

    def __init__(self, member: Any):
        self._member: _Stream = member
        self._hash = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._member.read(size)
        self._hash.update(data)
        return data

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        return self._member.write(data)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


class Manifest(NamedTuple):
    """What a file's seal stands for.

    members: the hash of each member by its name, in the order in which they were saved.
    before: the hash of the manifest of the checkpoint before this one; None: there was none, or a damaged one.
    keep: the number of files that the series had when this one was saved.
    digest: the hash of this manifest.
    """

    members: dict[str, str]
    before: str | None
    keep: int
    digest: str

    def check(self, found: Mapping[str, str]) -> None:
        """Raise ValueError, which names the first difference, unless these members have been read."""
        for name in dict.fromkeys([*self.members, *found]):
            if name not in found:
                raise ValueError(f"{name} is missing")
            if name not in self.members:
                raise ValueError(f"{name} was added")
            if found[name] != self.members[name]:
                raise ValueError(f"{name} is not what was saved there")


def write_manifest(archive: zipfile.ZipFile, members: Mapping[str, str], before: str | None, keep: int) -> None:
    """Add the manifest of the members that were written, and its seal; CheckpointError for an unusable key."""
    text = json.dumps({"members": members, "before": before, "keep": keep}, indent=1).encode()
    archive.writestr(_MANIFEST, text)
    archive.writestr(_SEAL, _seal_of(text, signing_key()))


def read_manifest(archive: zipfile.ZipFile) -> Manifest:
    """Return an archive's manifest after checking its seal; CheckpointError without the key, ValueError if changed."""
    text, sealed, own = archive.read(_MANIFEST), archive.read(_SEAL), signing_key()
    if not hmac.compare_digest(sealed, _seal_of(text, own)):
        _refuse(is_signed=sealed.startswith(_SIGNED.encode()), has_key=own is not None)
    content = json.loads(text)
    members, before, keep = content["members"], content["before"], content["keep"]
    if not isinstance(members, dict) or not isinstance(keep, int):
        raise ValueError("its manifest is none")
    return Manifest(members, before, keep, hashlib.sha256(text).hexdigest())


def other_members(names: Collection[str]) -> list[str]:
    """Return the members' names without those of the manifest and its seal."""
    return [name for name in names if name not in (_MANIFEST, _SEAL)]


def signing_key() -> bytes | None:
    """Return the key for signing, None where CLCOMM_CHECKPOINT_KEY is not set; CheckpointError for an unusable one."""
    try:
        path = variables.file(_KEY)
        if not path:
            return None
        found = read_regular(path, _MOST_KEY).strip()
    except ArgumentError as error:
        raise CheckpointError(str(error)) from None
    except OSError as error:
        raise CheckpointError(f"{_KEY}: expected a file with a key, got {path!r}: {error.strerror}") from None
    if len(found) < _LEAST_KEY:
        raise CheckpointError(
            f"{_KEY}: expected a key of {_LEAST_KEY} bytes or more, got {len(found)} in {path!r}; "
            f"make one with: openssl rand -hex 32"
        )
    return found


def _seal_of(text: bytes, own: bytes | None) -> bytes:
    if own is None:
        return f"{_HASHED} {hashlib.sha256(text).hexdigest()}".encode()
    return f"{_SIGNED} {hmac.new(own, text, 'sha256').hexdigest()}".encode()


def _refuse(is_signed: bool, has_key: bool) -> None:
    if is_signed and not has_key:
        raise CheckpointError(f"expected its key, as it is signed, got none; name the key's file in {_KEY}")
    if has_key and not is_signed:
        raise CheckpointError(f"expected a signature, as {_KEY} is set, found none; use one that this key signed")
    if has_key:
        raise CheckpointError(f"expected the signature of {_KEY}'s key, found another; use one that this key signed")
    raise ValueError("its manifest was changed")
