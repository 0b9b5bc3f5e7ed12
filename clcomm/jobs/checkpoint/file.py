"""Checkpoints: named arrays and JSON facts in one file, written atomically.

The file is NumPy's .npz (an uncompressed zip of .npy, each member with a CRC) plus one member of JSON, and a manifest
of all members' hashes (manifest.py). Reading it runs no code and takes no more memory than the file's size.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import reprlib
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from clcomm.base.errors import CheckpointError
from clcomm.base.flat_space.parameters import ParameterSpec
from clcomm.base.storage.files import FilePath, destination, open_regular, replacing, saving, unused_name
from clcomm.jobs.checkpoint.manifest import Hashed, other_members, read_manifest, write_manifest

FORMAT, VERSION = "clcomm-checkpoint", 2
_FACTS = "facts.json"
#: Kinds of dtypes in a checkpoint: booleans, integers, floats, complex numbers and text.
_KINDS = "biufcU"
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
#: Errors of reading a damaged file: the zip's structure, a CRC, JSON, a header that does not parse.
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, KeyError, ValueError, TypeError, EOFError, MemoryError, SyntaxError, OverflowError,
    struct.error, RuntimeError, tokenize.TokenError,
)  # fmt: skip


@dataclass
class Checkpoint:
    """A checkpoint's content: arrays by name, and JSON-compatible facts."""

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def group(self, prefix: str) -> dict[str, np.ndarray]:
        """Return the arrays whose names start with "prefix/", with the prefix removed."""
        start = prefix + "/"
        return {name[len(start) :]: array for name, array in self.arrays.items() if name.startswith(start)}

    def add_group(self, prefix: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Add arrays under "prefix/name"."""
        self.arrays.update({f"{prefix}/{name}": np.asarray(array) for name, array in arrays.items()})


def save(path: FilePath, checkpoint: Checkpoint, *, keep: int = 1) -> None:
    """Write a checkpoint atomically: at every moment `path` is the complete old file or the complete new one.

    keep: number of files to keep: `path`, then path.1 (the one before), path.2, … A symbolic link is followed; only
    regular files are replaced. Raises CheckpointWriteError where it cannot be written; the old file is kept.
    """
    with saving("checkpoint", path):
        target = destination(path)
        for age in range(1, keep):
            destination(earlier(target, age))
        with replacing(target, mode=0o600) as file:
            _write(file, checkpoint, _digest_before(target), keep)
            if keep > 1 and target.exists():
                file.flush()
                os.fsync(file.fileno())  # on disk before any older file is removed
                _rotate(target, keep)
        _sync_directory(target.parent)


def earlier(path: FilePath, age: int) -> Path:
    """Return the path of the checkpoint that was at `path` `age` saves ago; 0: `path` itself."""
    target = Path(path)
    return target.with_name(f"{target.name}.{age}") if age else target


def _rotate(target: Path, keep: int) -> None:
    """Rename each file to the next older name; `target` keeps its name too, where the file system has links.

    Files that another writer has moved in the meantime are skipped.
    """
    for age in range(keep - 1, 1, -1):
        with suppress(FileNotFoundError):
            os.replace(earlier(target, age - 1), earlier(target, age))
    link = unused_name(target)
    try:
        os.link(target, link)
    except OSError:
        os.replace(target, earlier(target, 1))
        return
    os.replace(link, earlier(target, 1))
    link.unlink(missing_ok=True)  # os.replace does nothing where both are names of one file


def load(path: FilePath) -> Checkpoint:
    """Read a checkpoint; CheckpointError if it is missing, damaged, altered, or of another format, version or key."""
    with _opened(Path(path)) as archive:
        facts, digest = _read_facts(archive)
        _check_format(facts)
        arrays, digests = {}, {_FACTS: digest}
        for member in archive.infolist():
            if member.filename.endswith(".npy"):
                arrays[member.filename], digests[member.filename] = _read_array(archive, member)
        expected = read_manifest(archive)
        expected.check(dict.fromkeys(other_members(archive.namelist()), "") | digests)
    names = [name for name in expected.members if name in arrays]
    return Checkpoint({name.removesuffix(".npy"): arrays[name] for name in names}, facts)


def check_place(series: Sequence[Path], age: int) -> None:
    """Raise CheckpointError where the undamaged checkpoint at an age is not the one that was saved after the next.

    series: the paths by age. An older file under a newer name is found by the files that are older still; a file on
    its own is the newest that there is.
    """
    with _opened(series[age]) as archive:
        own = read_manifest(archive)
    for other in range(age + 1, min(own.keep, len(series))):
        found = _digest_of(series[other])
        if found is None:
            continue
        if (own.before == found) != (other == age + 1) and not os.path.samefile(series[age], series[other]):
            raise CheckpointError(
                f"checkpoint {series[age]}: expected the one of this place in the series of {series[other].name}, "
                f"found another; use an earlier one"
            )
        return


def _digest_before(target: Path) -> str | None:
    """Return the hash of the manifest of the checkpoint that becomes the one before `target`'s next."""
    return _digest_of(target if target.exists() else earlier(target, 1))


def _digest_of(path: Path) -> str | None:
    """Return the hash of a file's manifest; None: it is missing, damaged, or was not signed with this key."""
    try:
        with _opened(path) as archive:
            return read_manifest(archive).digest
    except CheckpointError:
        return None


@contextmanager
def _opened(target: Path) -> Iterator[zipfile.ZipFile]:
    """Open a checkpoint's archive; errors within the block become CheckpointErrors that name the file."""
    try:
        with _BoundedReader(open_regular(target)) as file, zipfile.ZipFile(file) as archive:
            _check_sizes(archive, file.size)
            yield archive
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {target}: expected a file, found none") from None
    except OSError as error:
        raise CheckpointError(f"checkpoint {target}: could not be read ({error.strerror or error})") from None
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {target}: {error}") from None
    except _DAMAGE as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"checkpoint {target}: damaged or not a checkpoint ({detail}); use an earlier one"
        ) from None


def check_parameters(arrays: Mapping[str, np.ndarray], specs: Iterable[ParameterSpec]) -> None:
    """Raise CheckpointError, naming the first difference, unless the arrays match these parameters."""
    expected = {spec.name: f"{spec.shape} {spec.dtype}" for spec in specs}
    found = {name: f"{array.shape} {array.dtype}" for name, array in arrays.items()}
    for name in dict.fromkeys([*expected, *found]):
        ours, theirs = expected.get(name, "no such parameter"), found.get(name, "no such parameter")
        if ours != theirs:
            raise CheckpointError(
                f"checkpoint: is of another model: parameter {name!r} is {ours} here and {theirs} in the file; "
                f"resume with the model and data it was trained with"
            )


def whole_number(entry: str, value: Any, least: int, most: int) -> int:
    """Return a checkpoint's value at `entry`; CheckpointError unless it is a whole number in [least, most]."""
    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_whole or not least <= value <= most:
        raise invalid_entry(entry, f"a whole number from {least} to {most}", value)
    return int(value)


def invalid_entry(entry: str, expected: str, value: object) -> CheckpointError:
    """Return the error for an undamaged checkpoint with an invalid value at `entry`."""
    found = "nothing" if value is None else reprlib.repr(value)
    if isinstance(value, np.ndarray):
        found = reprlib.repr(value.item()) if value.shape == () else f"{value.dtype} {value.shape}"
    return CheckpointError(f"checkpoint: {entry}: expected {expected}, got {found}; use an earlier checkpoint")


def _write(file: BinaryIO, checkpoint: Checkpoint, before: str | None, keep: int) -> None:
    facts = json.dumps({"format": FORMAT, "version": VERSION, **checkpoint.facts}, indent=1, sort_keys=True).encode()
    digests = {_FACTS: hashlib.sha256(facts).hexdigest()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(_FACTS, facts)
        for name, array in checkpoint.arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                hashed = Hashed(member)
                np.lib.format.write_array(hashed, np.asarray(array), allow_pickle=False)
            digests[f"{name}.npy"] = hashed.digest
        write_manifest(archive, digests, before, keep)


class _BoundedReader(io.BufferedReader):
    """A file whose `read` allocates at most the file's size, whatever lengths the file claims."""

    def __init__(self, opened: io.BufferedReader):
        super().__init__(opened.detach())
        self.size = os.fstat(self.fileno()).st_size

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(size if size is None else min(size, self.size))


def _check_sizes(archive: zipfile.ZipFile, file_size: int) -> None:
    """Raise ValueError for members that would be larger in memory than the file, and for duplicate names."""
    members = archive.infolist()
    if len({member.filename for member in members}) != len(members):
        raise ValueError("two members have the same name")
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ValueError("a member is compressed")
    if sum(member.file_size for member in members) > file_size:
        raise ValueError("its members are larger than the file")


def _read_facts(archive: zipfile.ZipFile) -> tuple[Any, str]:
    """Return the facts, and their hash."""
    text = archive.read(_FACTS)
    return json.loads(text), hashlib.sha256(text).hexdigest()


def _read_array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> tuple[np.ndarray, str]:
    """Return a member's array, and its hash."""
    with archive.open(info) as member:
        hashed = Hashed(member)
        version = np.lib.format.read_magic(hashed)
        if version not in _HEADERS:
            raise ValueError(f"{info.filename} is of version {version}")
        shape, is_fortran, dtype = _HEADERS[version](hashed)
        if dtype.hasobject or dtype.kind not in _KINDS or any(size < 0 for size in shape):
            raise ValueError(f"{info.filename} holds {dtype}, which a checkpoint cannot contain")
        if math.prod(shape) * dtype.itemsize != info.file_size - member.tell():
            raise ValueError(f"{info.filename} is not as long as {dtype} of shape {shape}")
        data = bytearray(hashed.read())  # reading to the end checks the CRC
    return np.frombuffer(data, dtype).reshape(shape, order="F" if is_fortran else "C"), hashed.digest


def _check_format(facts: object) -> None:
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise CheckpointError(f"expected the format {FORMAT}, found another")
    if facts.get("version") != VERSION:
        raise CheckpointError(
            f"expected version {VERSION}, found {facts.get('version')}; use the release of clcomm that wrote it"
        )


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
