"""Comparison of the ranks' versions, options and environment at start, so that a mismatch is an error, not a hang.

A Communicator's ranks exchange 32 bytes before they use any of these: a digest of the facts that have to be equal, and
one of those whose difference is only suspicious. If digests differ, they exchange the facts themselves.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import metadata
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from clcomm._version import __version__
from clcomm.base.errors import MismatchError, name_ranks
from clcomm.comm.transport import mpi_communicators, mpi_runtime
from clcomm.comm.transport.mpi_runtime import Intracomm
from clcomm.comm.watch.job import Limits, this_job

#: Options that may differ: each rank computes on a device of its own.
OF_EACH_RANK = ("device",)
#: Variables that each rank reads, and whose difference is not detected later.
_VARIABLES = (
    "CLCOMM_CHECKS", "CLCOMM_STALL_WARNING_S", "CLCOMM_TIMEOUT_S", "PYOPENCL_BUILD_OPTIONS", "POCL_EXTRA_BUILD_FLAGS",
)  # fmt: skip
#: How many different values a message names.
_MOST_VALUES = 4
#: The characters of a long value that a message shows before the first difference, and from it on.
_BEFORE, _FROM = 20, 40
_DIGEST_BYTES = 16
_VERSIONS, _OPTIONS = "install the same versions for all ranks", "start all ranks with the same options"
_ARGUMENTS = "create the Communicator with the same arguments on all ranks"
_ENVIRONMENT = "give all ranks the same environment, as with `mpiexec -x NAME` of Open MPI"

_log = logging.getLogger("clcomm")


class Fact(NamedTuple):
    """A version, option or variable of a rank; remedy: the advice if ranks differ in it."""

    name: str
    value: str
    remedy: str


def declare(program: str, options: object) -> None:
    """Register a program's name and parsed options for comparison between ranks, without those in OF_EACH_RANK."""
    given = {name: value for name, value in vars(options).items() if name not in OF_EACH_RANK and not callable(value)}
    this_job().declared = (
        Fact("program", program, "start the same program on all ranks"),
        *(Fact(f"--{name.replace('_', '-')}", _shown(value), _OPTIONS) for name, value in given.items()),
    )


@contextmanager
def declared(program: str, options: object) -> Iterator[None]:
    """Declare a program and its options within this context."""
    job = this_job()
    before = job.declared
    declare(program, options)
    try:
        yield
    finally:
        job.declared = before


def require_same_start(comm: Intracomm, arguments: Mapping[str, object], limits: Limits) -> None:
    """Raise the same MismatchError on every rank unless all were started alike; log suspicious differences once.

    comm: an mpi4py communicator. arguments: its Communicator's arguments. Collective.
    """
    if comm.Get_size() == 1:
        return
    required = [*_required_versions(), *this_job().declared, *_arguments(arguments)]
    suspicious = [*_suspicious_versions(), *_environment(limits)]
    own = np.frombuffer(_digest(required) + _digest(suspicious), np.uint8)
    everyone = np.empty((comm.Get_size(), own.size), np.uint8)
    mpi_communicators.wait_patiently(comm.Iallgather(own, everyone))
    alike = (everyone == everyone[0]).all(0)
    if not alike[:_DIGEST_BYTES].all():
        raise MismatchError(difference(comm.allgather(required)))
    if not alike[_DIGEST_BYTES:].all():
        _warn(difference(comm.allgather(suspicious)), comm.Get_rank())


def difference(everyone: Sequence[Sequence[Fact]]) -> str:
    """Return a message on the first fact that differs, with its values and their ranks, and the names of others."""
    tables = [{fact.name: fact for fact in facts} for facts in everyone]
    facts = {fact.name: fact for table in tables for fact in table.values()}
    differing = [name for name in facts if len({table.get(name) for table in tables}) > 1]
    name = differing[0]
    ranks: dict[str, list[int]] = {}
    for rank, table in enumerate(tables):
        ranks.setdefault(table[name].value if name in table else "nothing", []).append(rank)
    values = [f"{text} on {name_ranks(held)}" for text, held in zip(_cut(list(ranks)), ranks.values(), strict=True)]
    values[_MOST_VALUES:] = [f"{len(values) - _MOST_VALUES} others"] if len(values) > _MOST_VALUES else []
    others = [other for other in differing[1:] if facts[other].remedy == facts[name].remedy]
    too = f"; {', '.join(others[:_MOST_VALUES])} differ{'s' if len(others) == 1 else ''} too" if others else ""
    return f"{name}: expected the same on every rank, got {', '.join(values)}{too}; {facts[name].remedy}"


def _cut(values: list[str]) -> list[str]:
    """Return values, long ones shortened around the first character that differs."""
    first = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*values, strict=False)))
    start = first - _BEFORE if first > 2 * _BEFORE else 0
    stop = first + _FROM
    return [f"{'…' * (start > 0)}{value[start:stop]}{'…' * (len(value) > stop)}" for value in values]


def _warn(text: str, rank: int) -> None:
    warned = this_job().warned
    if rank == 0 and text not in warned:
        _log.warning("%s", text)
    warned.add(text)


def _required_versions() -> list[Fact]:
    """Return the versions that have to be equal for communication and for the same random numbers."""
    return _versions({
        "clcomm": __version__,
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "byte order": sys.byteorder,
        "NumPy": ".".join(np.__version__.split(".")[:2]),
        "mpi4py": mpi_runtime.bindings_version().partition(".")[0],
    })  # fmt: skip


def _suspicious_versions() -> list[Fact]:
    return _versions({
        "Python": platform.python_version(),
        "NumPy": np.__version__,
        "mpi4py": mpi_runtime.bindings_version(),
        "PyOpenCL": _pyopencl_version(),
        "machine": os.uname().machine,
    })  # fmt: skip


def _versions(values: Mapping[str, str]) -> list[Fact]:
    return [Fact(name, value, _VERSIONS) for name, value in values.items()]


@cache
def _pyopencl_version() -> str:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version("pyopencl")
    return "none"


def _arguments(arguments: Mapping[str, object]) -> list[Fact]:
    return [Fact(name, _shown(value), _ARGUMENTS) for name, value in arguments.items()]


def _environment(limits: Limits) -> list[Fact]:
    """Return the settings that may differ between ranks, though a difference is probably a mistake."""
    facts = [Fact(name, _shown(os.environ.get(name)), _ENVIRONMENT) for name in _VARIABLES]
    limit = {"stall_warning_s": limits.stall_warning_s, "timeout_s": limits.timeout_s}
    return facts + _arguments(limit)


def _shown(value: object) -> str:
    """Return a value as text for a message."""
    if value is None or isinstance(value, bool):
        return "nothing" if value is None else "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "an empty list"
    return repr(value) if isinstance(value, str) else str(value)


def _digest(facts: Sequence[Fact]) -> bytes:
    text = "\n".join(f"{fact.name}={fact.value}" for fact in facts)
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=_DIGEST_BYTES).digest()
