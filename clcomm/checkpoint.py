"""Checkpoints: named arrays and plain facts in one file, written whole or not at all.

The file is NumPy's .npz (a zip of .npy, each member with a CRC) plus one member of JSON; reading it runs no code.
Rank 0 writes and reads; every rank learns how it went.
"""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from clcomm.communicator import Communicator
from clcomm.errors import CheckpointError
from clcomm.layout import ParameterSpec

FORMAT, VERSION = "clcomm-checkpoint", 1
_FACTS = "facts.json"


@dataclass
class Checkpoint:
    """What a checkpoint holds: arrays by name, and facts that JSON can say."""

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def group(self, prefix: str) -> dict[str, np.ndarray]:
        """Return the arrays whose names start with "prefix/", under the rest of their names."""
        start = prefix + "/"
        return {name[len(start) :]: array for name, array in self.arrays.items() if name.startswith(start)}

    def add_group(self, prefix: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Add arrays under "prefix/name"."""
        self.arrays.update({f"{prefix}/{name}": np.asarray(array) for name, array in arrays.items()})


def save(path: str | os.PathLike, checkpoint: Checkpoint) -> None:
    """Write a checkpoint: the file at `path` is the old one or the new one at every moment, never a part.

    Raises CheckpointError when it cannot be written; the old file is then still there.
    """
    target = Path(path)
    temporary = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            temporary = file.name
            _write(file, checkpoint)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        temporary = None
        _sync_directory(target.parent)
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"checkpoint {target}: could not be written ({reason}); the old file is kept") from None
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def load(path: str | os.PathLike) -> Checkpoint:
    """Read a checkpoint; CheckpointError when it is missing, damaged, or of another format or version."""
    target = Path(path)
    try:
        with zipfile.ZipFile(target) as archive:
            facts = json.loads(archive.read(_FACTS))
            members = [name for name in archive.namelist() if name.endswith(".npy")]
            arrays = {name.removesuffix(".npy"): _read_array(archive, name) for name in members}
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {target}: expected a file, found none") from None
    except OSError as error:
        raise CheckpointError(f"checkpoint {target}: could not be read ({error.strerror or error})") from None
    except (zipfile.BadZipFile, zlib.error, KeyError, ValueError, EOFError, MemoryError) as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"checkpoint {target}: damaged or not a checkpoint ({detail}); use an earlier one"
        ) from None
    _check_format(target, facts)
    return Checkpoint(arrays, facts)


def save_from_root(comm: Communicator, path: str | os.PathLike, checkpoint: Checkpoint | None) -> None:
    """Let rank 0 write its checkpoint; every rank raises the CheckpointError it may meet. Collective."""
    problem = ""
    if comm.rank == 0:
        assert checkpoint is not None
        try:
            save(path, checkpoint)
        except CheckpointError as error:
            problem = str(error)
    problem = comm.broadcast_object(problem, label="checkpoint")
    if problem:
        raise CheckpointError(problem)


def load_everywhere(comm: Communicator, path: str | os.PathLike) -> Checkpoint:
    """Let rank 0 read a checkpoint and give it to every rank; all raise the CheckpointError it may meet. Collective."""
    checkpoint, problem = Checkpoint(), ""
    if comm.rank == 0:
        try:
            checkpoint = load(path)
        except CheckpointError as error:
            problem = str(error)
    shapes = {name: (array.shape, array.dtype.str) for name, array in checkpoint.arrays.items()}
    problem, facts, shapes = comm.broadcast_object((problem, checkpoint.facts, shapes), label="checkpoint")
    if problem:
        raise CheckpointError(problem)
    if comm.rank != 0:
        arrays = {name: np.empty(shape, dtype) for name, (shape, dtype) in shapes.items()}
        checkpoint = Checkpoint(arrays, facts)
    for array in checkpoint.arrays.values():
        comm.broadcast(array, label="checkpoint")
    return checkpoint


def check_parameters(arrays: Mapping[str, np.ndarray], specs: Iterable[ParameterSpec]) -> None:
    """Raise CheckpointError, naming the first that differs, unless the arrays are those of these parameters."""
    expected = {spec.name: f"{spec.shape} {spec.dtype}" for spec in specs}
    found = {name: f"{array.shape} {array.dtype}" for name, array in arrays.items()}
    for name in dict.fromkeys([*expected, *found]):
        ours, theirs = expected.get(name, "no such parameter"), found.get(name, "no such parameter")
        if ours != theirs:
            raise CheckpointError(
                f"checkpoint: is of another model: parameter {name!r} is {ours} here and {theirs} in the file; "
                f"resume with the model and data it was trained with"
            )


def _write(file: Any, checkpoint: Checkpoint) -> None:
    facts = {"format": FORMAT, "version": VERSION, **checkpoint.facts}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(_FACTS, json.dumps(facts, indent=1, sort_keys=True))
        for name, array in checkpoint.arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)


def _read_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(name) as member:
        array = np.lib.format.read_array(member, allow_pickle=False)
        if member.read(1):  # reading on to the end also checks the CRC
            raise ValueError(f"{name} holds more than one array")
    return array


def _check_format(target: Path, facts: Any) -> None:
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint {target}: expected the format {FORMAT}, found another")
    if facts.get("version") != VERSION:
        raise CheckpointError(
            f"checkpoint {target}: expected version {VERSION}, found {facts.get('version')}; "
            f"use the release of clcomm that wrote it"
        )


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
