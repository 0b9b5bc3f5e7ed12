"""The errors that clcomm raises; each message is one line that says what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress


class ClcommError(Exception):
    """Base of all of clcomm's errors; its text is one line."""

    #: Exit code of a program that it ends: 2 if a restart would fail again, 1 if a restart may help.
    exit_code = 2
    #: Ends the job, with the right message, where the program does not catch the error; None: as for any error.
    end_job: Callable[[], None] | None = None


class ArgumentError(ClcommError, ValueError):
    """An argument that the call does not accept."""


class DeviceError(ClcommError, RuntimeError):
    """No OpenCL device fits, or the device rejected a program."""


class ResourceError(ClcommError, RuntimeError):
    """MPI has run out of a resource, such as communicators."""


class ShortageError(DeviceError):
    """The device's driver lacks disk space or file descriptors."""

    exit_code = 1


class LaunchError(ClcommError, RuntimeError):
    """The job was started in a way that cannot work, such as by another MPI's mpiexec."""


class MismatchError(ClcommError, RuntimeError):
    """Ranks disagree on something that must be the same on all of them."""


class DivergenceError(MismatchError):
    """Replicas that were equal differ, for example by a flipped bit; a restart from a checkpoint may help."""

    exit_code = 1


class ReplayError(ClcommError, RuntimeError):
    """A replayed function no longer queues the launches that were recorded."""


class DataError(ClcommError, ValueError):
    """A dataset is missing, damaged or of another format."""


class CheckpointError(ClcommError, ValueError):
    """A checkpoint is damaged or belongs to another job."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint could not be written; the previous one still exists."""

    exit_code = 1


class OutputError(ClcommError):
    """A file could not be written, for lack of disk space or file descriptors."""

    exit_code = 1


class NonFiniteError(ClcommError, ArithmeticError):
    """A gradient or loss holds NaN or Inf."""

    exit_code = 1


#: The packages that an extra of this one brings, by the name that is imported: as messages call them, and the extra.
_OPTIONAL = {
    "jax": ("JAX", "jax"), "netcl": ("netcl", "netcl"),
    "shtab": ("shtab", "completion"), "safetensors": ("safetensors", "safetensors"),
    "tinygrad": ("tinygrad", "tinygrad"), "torch": ("PyTorch", "torch"),
}  # fmt: skip


def pip_install(extra: str) -> str:
    """Return the command that installs an extra from this checkout, this wheel, or the index."""
    import json  # these here, as they take long
    import shlex
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote

    root = os.path.abspath(os.path.join(__file__, *[os.pardir] * 3))
    if os.path.isfile(os.path.join(root, "pyproject.toml")):
        return f"pip install -e {shlex.quote(f'{root}[{extra}]')}"
    with suppress(PackageNotFoundError, ValueError):
        # PEP 610: pip writes it for whatever was not from an index.
        url = str(json.loads(distribution("clcomm").read_text("direct_url.json") or "{}").get("url", ""))
        place = unquote(url.removeprefix("file://"))
        if url.startswith("file://") and os.path.exists(place):
            return f"pip install {shlex.quote(f'{place}[{extra}]')}"
    return f"pip install 'clcomm[{extra}]'"


@contextmanager
def needed(package: str) -> Iterator[None]:
    """Raise ArgumentError with the command that installs a package if the block's imports do not find it.

    What a package that is there raises while it is imported is its own error, and stays as it is.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        name, extra = _OPTIONAL[package]
        raise ArgumentError(f"{name} is not installed; do: {pip_install(extra)}") from None


def require_version(package: str, wanted: str) -> None:
    """Raise ArgumentError where the installed package is another version than `wanted`, such as "0.10", begins with."""
    from importlib.metadata import PackageNotFoundError, version  # here, as it takes long

    try:
        found = version(package)
    except PackageNotFoundError:
        return  # a checkout on the path, whose version is unknown
    if found.split(".")[:2] != wanted.split("."):
        extra = _OPTIONAL[package][1]
        raise ArgumentError(f"{package}: expected version {wanted}, got {found}; do: {pip_install(extra)} --upgrade")


def no_copy(kind: str, instead: str) -> ArgumentError:
    """Return the error for an object that cannot be copied or pickled."""
    return ArgumentError(f"{kind}: expected to stay in its process, got one to be copied or pickled; {instead}")


#: What could move a terminal's cursor, ring its bell or turn its text around; lines and tabs stay.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def escaped(text: str) -> str:
    """Return text of any origin, such as another process, with control characters as in "\\x1b"."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def name_ranks(ranks: Sequence[int | str], most: int = 8) -> str:
    """Return ranks in words: "rank 3", "ranks 0 and 2" or, of more than `most`, "ranks 0, 1, 2 and 30 more"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    last = ranks[-1] if len(ranks) <= most else f"{len(ranks) - most} more"
    return f"ranks {', '.join(map(str, ranks[: min(len(ranks) - 1, most)]))} and {last}"


class RankNames:
    """Names a Communicator's ranks in messages: "rank 1", or with a name of its own "dp rank 1 (world rank 3)".

    Args:
        name: the Communicator's, such as a mesh's axis; "": its ranks are named by number alone.
        members: its ranks' numbers in the world; empty where they are not known.
    """

    def __init__(self, name: str = "", members: Sequence[int] = ()):
        self.name, self._members = name, tuple(members)

    def __call__(self, ranks: Sequence[int]) -> str:
        if not self.name:
            return name_ranks(ranks)
        world = f" (world {name_ranks([self._members[rank] for rank in ranks])})" if self._members else ""
        return f"{self.name} {name_ranks(ranks)}{world}"

    def in_world(self, rank: int) -> int:
        """Return a rank's number in the world, where it is known."""
        return self._members[rank] if self._members else rank
