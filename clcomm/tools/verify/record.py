"""A rank's records: of each optimizer step the hashes of parameters and batches, and sketches of gradients."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

#: The most numbers of a sketch, and the most samples of a batch that have a hash of their own.
SKETCH, SAMPLES = 1024, 512
#: What a rank does, in order, as far as it is known: events of a step.
FORWARD, BACKWARD, SYNC, CLIP, STEP = "forward", "backward", "sync", "clip", "step"

#: The one key of an array in a record's file.
_FLOAT64 = "<f8"

Hashes = dict[str, str]
Sketches = dict[str, np.ndarray]


def hash_of(array: np.ndarray) -> str:
    """Return a hash of an array's bytes, shape and dtype."""
    made = blake2b(f"{array.shape} {array.dtype}".encode(), digest_size=8)
    made.update(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
    return made.hexdigest()


def sketch_of(array: np.ndarray) -> np.ndarray:
    """Return at most SKETCH numbers that are linear in an array's: these, or sums of them with random signs."""
    values = np.asarray(array, np.float64).reshape(-1)
    if values.size <= SKETCH:
        return values.copy()
    signs = np.random.default_rng(values.size).integers(0, 2, values.size) * 2.0 - 1.0
    padded = np.zeros(-(-values.size // SKETCH) * SKETCH)
    padded[: values.size] = values * signs
    return np.asarray(padded.reshape(-1, SKETCH).sum(0))


@dataclass
class Batch:
    """The input of a model's forward: its hash, its number of samples, and the hashes of these."""

    hash: str
    size: int
    samples: tuple[str, ...]

    @classmethod
    def of(cls, arrays: list[np.ndarray]) -> Batch:
        first = arrays[0]
        size = int(first.shape[0]) if first.ndim else 1
        rows = tuple(map(hash_of, first[:SAMPLES])) if first.ndim else ()
        return cls("".join(map(hash_of, arrays)), size, rows)


@dataclass
class Step:
    """What a rank did from one optimizer step to the next; arrays and hashes are by the parameter's name."""

    optimizer: int = 0
    batches: list[Batch] = field(default_factory=list)
    #: This rank's own gradients, before any synchronisation, and those with which it steps.
    local: Sketches = field(default_factory=dict)
    seen: Sketches = field(default_factory=dict)
    #: The gradients at the first clipping, if there was one.
    clipped: Sketches = field(default_factory=dict)
    #: Parameters whose gradient still held that of an earlier step.
    carried: list[str] = field(default_factory=list)
    before: Hashes = field(default_factory=dict)
    after: Hashes = field(default_factory=dict)
    #: The optimizer's state before the step, and the model's buffers before forward.
    state: Hashes = field(default_factory=dict)
    buffers: Hashes = field(default_factory=dict)
    options: dict[str, object] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    #: By what the loss was multiplied last, such as 1/2 for `(loss / 2).backward()`.
    factor: float = 1.0
    is_complete: bool = False

    @property
    def samples(self) -> int:
        return sum(batch.size for batch in self.batches)


@dataclass
class RankRecord:
    """One rank's steps, of which the last may be incomplete, and how its script ended."""

    rank: int
    steps: list[Step] = field(default_factory=list)
    #: Hashes of the parameters at their first forward.
    start: Hashes = field(default_factory=dict)
    #: The number of values of each parameter, in the model's order.
    sizes: dict[str, int] = field(default_factory=dict)
    #: Why this script cannot be judged; "": nothing stands against it.
    refusal: str = ""
    #: Whether gradients are reduced within the optimizer's step or apart for each logical shard, so that none is seen.
    hides_gradients: bool = False
    #: Whether the program exchanges parameters in place of gradients, as local SGD and policies do.
    averages_parameters: bool = False
    #: Whether the program lets ranks run out of batches at different steps, by PyTorch's Join or Horovod's join.
    joins: bool = False
    #: "steps": all that were asked for; "end": the script's; "error"; "": it was still running.
    ended: str = ""
    error: str = ""

    @property
    def complete(self) -> list[Step]:
        return [step for step in self.steps if step.is_complete]

    def write(self, folder: Path) -> None:
        """Replace this rank's file in a folder."""
        _replace(folder / f"rank-{self.rank}", self)

    def write_progress(self, folder: Path) -> None:
        """Replace this rank's file of progress, which is small; its time says when the rank went on last."""
        has_begun = bool(self.start or self.steps)
        progress = Progress(has_begun, self.ended, len(self.complete), bool(self.error))
        _replace(folder / f"progress-{self.rank}", progress)


class Progress(NamedTuple):
    """How far a rank is: as its record says."""

    has_begun: bool = False
    ended: str = ""
    steps: int = 0
    failed: bool = False


def _replace(path: Path, content: object) -> None:
    path.with_suffix(".new").write_text(json.dumps(content, default=_plain))
    os.replace(path.with_suffix(".new"), path)


def read_progress(folder: Path, ranks: int) -> list[Progress]:
    paths = [folder / f"progress-{rank}" for rank in range(ranks)]
    return [Progress(*json.loads(path.read_text())) if path.exists() else Progress() for path in paths]


def read(folder: Path, ranks: int) -> list[RankRecord]:
    """Return the ranks' records; an empty one for a rank that wrote none."""
    paths = [folder / f"rank-{rank}" for rank in range(ranks)]
    return [_record(path.read_text()) if path.exists() else RankRecord(rank) for rank, path in enumerate(paths)]


def _record(text: str) -> RankRecord:
    record = RankRecord(**json.loads(text, object_hook=_array))
    for step in (steps := [Step(**each) for each in record.steps]):  # type: ignore[arg-type]
        step.batches = [Batch(each["hash"], each["size"], tuple(each["samples"])) for each in step.batches]  # type: ignore[index]
    record.steps = steps
    return record


def _plain(value: object) -> object:
    """Return what JSON has of a record, of an array's float64 and, in words, of an optimizer's other options."""
    if isinstance(value, np.ndarray):
        return {_FLOAT64: np.asarray(value, np.float64).tobytes().hex()}
    is_record = isinstance(value, (RankRecord, Step, Batch))
    return vars(value) if is_record else re.sub(r" at 0x[0-9a-f]+", "", repr(value))  # addresses differ between ranks


def _array(found: dict[str, Any]) -> object:
    return np.frombuffer(bytes.fromhex(found[_FLOAT64]), np.float64).copy() if found.keys() == {_FLOAT64} else found
