"""Which data a job trains on: rank 0 decides, every rank follows, and all of them raise the same error."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from clcomm.cache import cache_directory
from clcomm.errors import ClcommError, DataError
from training import download
from training.datasets import (
    MNIST_FILES,
    Splits,
    digits_available,
    find_mnist_files,
    load_digits,
    load_mnist,
    load_synthetic,
)
from training.shared_splits import adopt, publish

if TYPE_CHECKING:
    from clcomm.communicator import Communicator

CHOICES = ("auto", "mnist", "fashion-mnist", "digits", "synthetic")
_REMOTES = {"mnist": download.MNIST, "fashion-mnist": download.FASHION_MNIST}
_TORCHVISION = {"mnist": "MNIST/raw", "fashion-mnist": "FashionMNIST/raw"}


@dataclass(frozen=True)
class Choice:
    """What rank 0 chose: the dataset's name, the directory where it lies (if any), and a line that says so."""

    name: str
    directory: str | None
    note: str


def open_data(
    spec: str, comm: Communicator | None = None, say: Callable[[str], object] = print, *, with_test: bool = True
) -> Splits:
    """Return the training and test set that `spec` names; a collective call where `comm` is given.

    `spec` is "auto", "mnist", "fashion-mnist", "digits", "synthetic" or a directory with MNIST-named IDX files.
    Rank 0 alone looks and downloads, and tells in one line through `say` what it found. The first rank of each host
    reads, the others use its memory. Without `with_test` a test set in files of its own stays unread. DataError, the
    same on every rank, where the data is missing or damaged, or where a rank cannot read it or reads something else.
    """
    choice = _decided_by_rank_0(lambda: choose(spec, say), comm)
    splits = load(choice, with_test) if comm is None or comm.size == 1 else _load_everywhere(choice, comm, with_test)
    if comm is None or comm.rank == 0:
        say(choice.note)
    return splits


def choose(spec: str, say: Callable[[str], object] = print) -> Choice:
    """Decide from this process's files and network what `spec` stands for; download where needed."""
    if spec == "digits":
        return Choice("digits", None, "data: the 1,797 digits bundled with scikit-learn")
    if spec == "synthetic":
        return Choice("synthetic", None, "data: synthetic images")
    if spec not in CHOICES:
        return _choose_path(spec)
    name = "mnist" if spec == "auto" else spec
    found = _look_around(name, any_set=spec == "auto")
    if found is not None:
        return found
    try:
        return _downloaded(name, say)
    except DataError as error:
        failure = f"no {name} files in {_places(name)}, and {error}"
    if spec != "auto":
        raise DataError(f"data: {failure}; give their directory with --data or CLCOMM_DATA")
    if not digits_available():
        raise DataError(f"data: {failure}, and no scikit-learn with its digits; install it or take --data synthetic")
    return Choice("digits", None, f"data: {failure}; training on the digits bundled with scikit-learn")


def load(choice: Choice, with_test: bool = True) -> Splits:
    """Read what was chosen; DataError where this process cannot."""
    if choice.name == "digits":
        return load_digits()
    if choice.name == "synthetic":
        return load_synthetic()
    assert choice.directory is not None
    return load_mnist(choice.directory, choice.name, with_test=with_test)


def _choose_path(spec: str) -> Choice:
    directory = Path(spec).expanduser().absolute()
    if not directory.is_dir():
        raise DataError(f"data: expected {', '.join(CHOICES)} or a directory, got {spec!r}, which is neither")
    for candidate in (directory, directory / "mnist", directory / _TORCHVISION["mnist"]):
        choice = _in_directory(candidate)
        if choice is not None:
            return choice
    raise DataError(f"data: expected {MNIST_FILES[0]} and its like (or .gz) in {directory}, found none of them")


def _look_around(name: str, any_set: bool) -> Choice | None:
    """Return the first place that holds the set `name`, or with `any_set` any set of MNIST's file names."""
    candidates = []
    if os.environ.get("CLCOMM_DATA"):
        root = Path(os.environ["CLCOMM_DATA"]).expanduser().absolute()
        candidates += [root / name, root, root / _TORCHVISION[name]]
    candidates += [Path("data", name).absolute(), Path("data", _TORCHVISION[name]).absolute()]
    for candidate in candidates:
        choice = _in_directory(candidate)
        if choice is not None and (any_set or choice.name in (name, "own")):
            return choice
    cached = cache_directory() / name
    # An interrupted download may have left the cache incomplete: that is a reason to download, not to stop.
    return _in_directory(cached, name) if len(find_mnist_files(cached)) == len(MNIST_FILES) else None


def _in_directory(directory: Path, name: str | None = None) -> Choice | None:
    files = find_mnist_files(directory)
    if not files:
        return None
    missing = [file for file in MNIST_FILES if file not in files]
    if missing:
        raise DataError(f"{directory}: expected the file {missing[0]} or {missing[0]}.gz, found none; add it")
    name = name or _identify(files[MNIST_FILES[3]])
    return Choice(name, str(directory), f"data: {name} from {directory}")


def _identify(labels: Path) -> str:
    """Tell MNIST from Fashion-MNIST, which share their file names, by the test labels; else "own"."""
    try:
        content = labels.read_bytes()
    except OSError as error:
        raise DataError(f"{labels}: cannot be read ({error.strerror}); check the path and rights") from error
    for name, remote in _REMOTES.items():
        if download.matches(content, remote.md5[MNIST_FILES[3]]):
            return name
    return "fashion-mnist" if "fashion" in labels.parent.name.lower() else "own"


def _downloaded(name: str, say: Callable[[str], object]) -> Choice:
    if os.environ.get("CLCOMM_OFFLINE", "0") not in ("", "0"):
        raise DataError(f"{name}: download switched off by CLCOMM_OFFLINE")
    target = cache_directory() / name
    download.download(_REMOTES[name], target, say=say)
    return Choice(name, str(target), f"data: {name}, downloaded to {target}")


def _places(name: str) -> str:
    first = f"CLCOMM_DATA ({os.environ['CLCOMM_DATA']})" if os.environ.get("CLCOMM_DATA") else "CLCOMM_DATA (unset)"
    return f"{first}, {Path('data', name)}, {cache_directory() / name}"


def _decided_by_rank_0(decide: Callable[[], Choice], comm: Communicator | None) -> Choice:
    if comm is None:
        return decide()
    outcome: Choice | DataError | None = None
    if comm.rank == 0:
        try:
            outcome = decide()
        except (ClcommError, OSError) as error:
            outcome = DataError(str(error))  # without its cause, which may not pickle
    outcome = comm.broadcast_object(outcome, root=0)
    if isinstance(outcome, DataError):
        raise outcome
    assert isinstance(outcome, Choice)
    return outcome


@dataclass(frozen=True)
class _Attempt:
    """What came of loading on this rank: splits, or why there are none; neither where it was not tried."""

    splits: Splits | None = None
    failure: str | None = None

    @classmethod
    def at(cls, read: Callable[[], Splits]) -> _Attempt:
        try:
            return cls(read())
        except (ClcommError, OSError, MemoryError) as error:
            return cls(failure=str(error) or type(error).__name__)

    @property
    def fingerprint(self) -> tuple[object, ...] | None:
        """Shapes and a digest of every image and label."""
        if self.splits is None:
            return None
        parts: list[object] = []
        for split in (self.splits.train, self.splits.test):
            for array in () if split is None else (split.images, split.labels):
                parts += [
                    array.shape,
                    array.dtype.str,
                    hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=16).digest(),
                ]
        return tuple(parts)


def _load_everywhere(choice: Choice, comm: Communicator, with_test: bool) -> Splits:
    """Load on the first rank of each host, share that with its other ranks, and compare what every rank has.

    What one rank cannot read, or reads differently, stops all of them. A rank that cannot share reads as well.
    """
    attempt, publication, notice = _Attempt(), None, None
    has_read = comm.local_rank == 0
    if has_read:
        attempt = _Attempt.at(lambda: load(choice, with_test))
        if attempt.splits is not None and comm.local_size > 1:
            publication = publish(attempt.splits)
            notice = publication and publication.notice
    comm.rendezvous()
    tried = comm.all_gather_object((comm.local_rank == 0, attempt.failure, notice))
    _stop_at_failure({rank: failure for rank, (has_tried, failure, _) in enumerate(tried) if has_tried}, comm.size)
    if attempt.splits is None or publication is not None:
        shared = adopt([notice for *_, notice in tried if notice is not None])
        has_read = has_read or shared is None
        attempt = _Attempt.at(lambda: load(choice, with_test)) if shared is None else _Attempt(shared)
    reports = comm.all_gather_object((attempt.failure, has_read))
    if publication is not None:
        publication.close()
    _stop_at_failure({rank: failure for rank, (failure, _) in enumerate(reports)}, comm.size)
    readers = [rank for rank, (_, reads) in enumerate(reports) if reads]
    differing = _differing(comm, attempt, readers) if len(readers) > 1 else []
    if differing:
        raise DataError(
            f"data: {_name_ranks(differing, comm.size)} read other data than rank 0 from "
            f"{choice.directory or choice.name}; put the same files on every host"
        )
    assert attempt.splits is not None
    return attempt.splits


def _differing(comm: Communicator, attempt: _Attempt, readers: Sequence[int]) -> list[int]:
    """Return which ranks, of those that read the data themselves, have other data than the first of them; collective.

    All of the data is compared, on ranks that wait in no collective meanwhile.
    """
    own = attempt.fingerprint if comm.rank in readers else None
    comm.rendezvous()
    found = comm.all_gather_object(own)
    return [rank for rank in readers if found[rank] != found[readers[0]]]


def _stop_at_failure(outcomes: dict[int, str | None], size: int) -> None:
    """Raise DataError, the same on every rank, where any of the ranks that tried failed."""
    failed = [rank for rank, failure in outcomes.items() if failure is not None]
    if not failed:
        return
    text = str(outcomes[failed[0]])
    if len(set(outcomes.values())) == 1:
        raise DataError(text)
    raise DataError(
        f"data: {_name_ranks(failed, size)} cannot read what rank 0 chose: {text}; put the files at the "
        f"same path on every host"
    )


def _name_ranks(ranks: list[int], size: int) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown} of {size}"
