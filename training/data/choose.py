"""Which dataset --data stands for on this machine, where its files are, and how they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from clcomm.base.errors import DataError
from clcomm.base.host import variables
from clcomm.base.host.arrays import aligned_empty
from clcomm.base.storage.private import cache_directory
from training.data import cifar, download
from training.data.datasets import (
    MNIST_FILES,
    Splits,
    digits_available,
    find_mnist_files,
    load_digits,
    load_mnist,
    load_synthetic,
)
from training.data.idx import Allocate

CHOICES = ("auto", "mnist", "fashion-mnist", "digits", "synthetic", "cifar10", "cifar")
_REMOTES = {"mnist": download.MNIST, "fashion-mnist": download.FASHION_MNIST}
_TORCHVISION = {"mnist": "MNIST/raw", "fashion-mnist": "FashionMNIST/raw"}


@dataclass(frozen=True)
class Choice:
    """A dataset by name, the directory of its files (None: it has none), and a line of output that names both.

    as_cifar: whether grey images are brought to CIFAR-10's shape.
    """

    name: str
    directory: str | None
    note: str
    as_cifar: bool = False


def choose(spec: str, report: Callable[[str], object] = print) -> Choice:
    """Return the dataset that `spec` names, found in this machine's files or downloaded.

    "cifar" is CIFAR-10, or where it is neither found nor downloaded another set in its shape.

    Args:
        spec: one of CHOICES, or a directory of IDX files.
        report: receives a line when a download begins.

    Raises DataError if it is neither found nor downloaded.
    """
    if spec == "digits":
        return Choice("digits", None, "data: the 1,797 digits bundled with scikit-learn")
    if spec == "synthetic":
        return Choice("synthetic", None, "data: synthetic images")
    if spec in ("cifar10", "cifar"):
        return _choose_cifar(spec, report)
    if spec not in CHOICES:
        return _choose_path(spec)
    name = "mnist" if spec == "auto" else spec
    found = _find_locally(name, any_set=spec == "auto")
    if found is not None:
        return found
    try:
        return _downloaded(name, report)
    except DataError as error:
        failure = f"no {name} files in {_places(name)}, and {error}"
    if spec != "auto":
        raise DataError(f"data: {failure}; give their directory with --data or CLCOMM_DATA")
    if not digits_available():
        raise DataError(f"data: {failure}, and no scikit-learn with its digits; install it or take --data synthetic")
    return Choice("digits", None, f"data: {failure}; training on the digits bundled with scikit-learn")


def load(choice: Choice, with_test: bool = True, allocate: Allocate = aligned_empty) -> Splits:
    """Read the chosen dataset; raises DataError if its files cannot be read.

    allocate: returns memory for images that take no other form, by shape and type.
    """
    if choice.as_cifar:
        return cifar.as_cifar(load(replace(choice, as_cifar=False), with_test))
    if choice.name == "cifar10":
        assert choice.directory is not None
        return cifar.load_cifar10(choice.directory, with_test=with_test)
    if choice.name == "digits":
        return load_digits()
    if choice.name == "synthetic":
        return load_synthetic()
    assert choice.directory is not None
    return load_mnist(choice.directory, choice.name, with_test=with_test, allocate=allocate)


def _choose_cifar(spec: str, report: Callable[[str], object]) -> Choice:
    cached = cache_directory() / "cifar10"
    root = Path(variables.directory("CLCOMM_DATA") or "data").expanduser().absolute()
    for place in (root / "cifar10", root, Path("data", "cifar10").absolute(), cached):
        found = cifar.find_cifar10(place)
        if found is not None:
            return Choice("cifar10", str(found), f"data: cifar10 from {found}")
    try:
        if _is_offline():
            raise DataError("cifar10: download switched off by CLCOMM_OFFLINE")
        cifar.download_cifar10(cached, report=report)
        return Choice("cifar10", str(cached), f"data: cifar10, downloaded to {cached}")
    except DataError as error:
        failure = f"no cifar10 files in {root} or {cached}, and {error}"
    if spec == "cifar10":
        raise DataError(f"data: {failure}; give their directory with CLCOMM_DATA")
    other = _find_locally("fashion-mnist", any_set=False) or choose("auto", report)
    return replace(other, note=f"data: {failure}; training on {other.name} at 3x32x32", as_cifar=True)


def _choose_path(spec: str) -> Choice:
    directory = Path(spec).expanduser().absolute()
    if not directory.is_dir():
        raise DataError(f"data: expected {', '.join(CHOICES)} or a directory, got {spec!r}, which is neither")
    for candidate in (directory, directory / "mnist", directory / _TORCHVISION["mnist"]):
        choice = _in_directory(candidate)
        if choice is not None:
            return choice
    raise DataError(f"data: expected {MNIST_FILES[0]} and its like (or .gz) in {directory}, found none of them")


def _find_locally(name: str, any_set: bool) -> Choice | None:
    """Return the set `name` from the first directory that holds it; with `any_set` any set with MNIST's file names."""
    candidates = []
    named = variables.directory("CLCOMM_DATA")
    if named:
        root = Path(named).expanduser().absolute()
        candidates += [root / name, root, root / _TORCHVISION[name]]
    candidates += [Path("data", name).absolute(), Path("data", _TORCHVISION[name]).absolute()]
    for candidate in candidates:
        choice = _in_directory(candidate)
        if choice is not None and (any_set or choice.name in (name, "own")):
            return choice
    cached = cache_directory() / name
    # After an interrupted download the cache is incomplete, and the files are downloaded again.
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
    """Distinguish MNIST from Fashion-MNIST, which share their file names, by the test labels; else "own"."""
    try:
        content = labels.read_bytes()
    except OSError as error:
        raise DataError(f"{labels}: cannot be read ({error.strerror}); check the path and rights") from error
    for name, remote in _REMOTES.items():
        if download.matches(content, remote.md5[MNIST_FILES[3]]):
            return name
    return "fashion-mnist" if "fashion" in labels.parent.name.lower() else "own"


def _downloaded(name: str, report: Callable[[str], object]) -> Choice:
    if _is_offline():
        raise DataError(f"{name}: download switched off by CLCOMM_OFFLINE")
    target = cache_directory() / name
    download.download(_REMOTES[name], target, report=report)
    return Choice(name, str(target), f"data: {name}, downloaded to {target}")


def _is_offline() -> bool:
    return variables.is_on("CLCOMM_OFFLINE")


def _places(name: str) -> str:
    first = f"CLCOMM_DATA ({variables.text('CLCOMM_DATA') or 'unset'})"
    return f"{first}, {Path('data', name)}, {cache_directory() / name}"
