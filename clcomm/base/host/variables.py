"""clcomm's environment variables: a table of types and defaults, through which all read them; deprecated names."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple, TypeVar

from clcomm.base.errors import ArgumentError
from clcomm.base.host.launcher import launched_rank

_log = logging.getLogger("clcomm")

#: Types of values.
SWITCH, SECONDS, COUNT, DEVICE, TEXT = "switch", "seconds", "number", "device", "text"
#: Paths: of a file that is written, of one that is there, of a directory that is there, of one that is written to too,
#: and of one that is made where it is missing.
FILE, READABLE = "file", "readable file"
DIRECTORY, WRITABLE, NEW_DIRECTORY = "directory", "writable directory", "new directory"
_ON, _OFF = ("1", "on", "true", "yes"), ("0", "off", "false", "no")
START = "CLCOMM_"


class Variable(NamedTuple):
    """A variable's type, its default in words, and whether each Communicator checks it when it is made."""

    type: str
    default: str = ""
    of_every_job: bool = False


#: The comment above a line says what the variable means: `python -m docs.tables` makes a page of them.
VARIABLES = {
    # Tuned kernel sizes, cost models and built programs; has to be the user's own.
    "CLCOMM_CACHE_DIR": Variable(NEW_DIRECTORY, "`$XDG_CACHE_HOME/clcomm` or `~/.cache/clcomm`"),
    # Set by `clcomm run --chaos`: the faults (docs/robustness.md#faults-on-purpose) that ranks plant.
    "CLCOMM_CHAOS": Variable(TEXT),
    # Set by it too: where ranks note the faults.
    "CLCOMM_CHAOS_LOG": Variable(FILE),
    # A key of 16 bytes or more: checkpoints are signed (docs/robustness.md#checkpoints-that-were-altered) with it,
    # others refused.
    "CLCOMM_CHECKPOINT_KEY": Variable(READABLE),
    # `off`, on all ranks: do not compare calls (docs/robustness.md#ranks-that-call-different-collectives).
    "CLCOMM_CHECKS": Variable(SWITCH, "on", True),
    # The examples' data sets; downloads are kept in `CLCOMM_CACHE_DIR`.
    "CLCOMM_DATA": Variable(DIRECTORY, "`data`"),
    # `gpu`, `gpu:1`, `cpu`, `cpu:1`, part of a name; the option `--device` comes first.
    "CLCOMM_DEVICE": Variable(DEVICE, "GPUs, else the CPU"),
    # Where ranks write their last operations at a time-out.
    "CLCOMM_DUMP_DIR": Variable(WRITABLE, "the temporary directory", True),
    # `off`: install no hooks (docs/robustness.md#what-is-hooked).
    "CLCOMM_HOOKS": Variable(SWITCH, "on", True),
    # Set by `clcomm run`, `verify` and `plan`: the job's mark and scratch files.
    "CLCOMM_JOB_FOLDER": Variable(NEW_DIRECTORY),
    # Set by `clcomm run --min-ranks`: the copies in memory (docs/robustness.md#ranks-that-are-replaced-and-that-join).
    "CLCOMM_MEMORY": Variable(NEW_DIRECTORY),
    # `1`: download no data.
    "CLCOMM_OFFLINE": Variable(SWITCH, "off"),
    # Set by `clcomm run`: where ranks note steps and checkpoints.
    "CLCOMM_PROGRESS": Variable(FILE),
    # Set by a rank, for what it starts (docs/robustness.md#what-a-rank-starts).
    "CLCOMM_RANK_PROCESS": Variable(TEXT),
    # `0`: run every step as Python.
    "CLCOMM_REPLAY": Variable(SWITCH, "on", True),
    # The run's figures, with `clcomm.torch` or `clcomm.horovod`.
    "CLCOMM_REPORT": Variable(FILE),
    # Set by `clcomm run`: the number of restarts so far.
    "CLCOMM_RESTART": Variable(COUNT, "0", True),
    # Time in one collective after which missing ranks are named; 0: never.
    "CLCOMM_STALL_WARNING_S": Variable(SECONDS, "10, or the program's", True),
    # Time in one collective after which the job ends; 0: never.
    "CLCOMM_TIMEOUT_S": Variable(SECONDS, "300, or the program's", True),
    # A timeline, with `clcomm.torch` or `clcomm.horovod`.
    "CLCOMM_TRACE": Variable(FILE),
    # `1`: print the traceback of errors that are otherwise one line.
    "CLCOMM_TRACEBACK": Variable(SWITCH, "off", True),
}

#: Arguments of a program that users look for among the variables, and where they belong.
ARGUMENTS = {
    "bucket_size": "Communicator", "transport": "Communicator", "use_bucketing": "Communicator",
    "compression": "Synchronizer", "overlap": "Synchronizer", "zero": "Synchronizer",
}  # fmt: skip
#: How alike two names are of which one is taken for the other's misspelling, from 0 to 1.
_ALIKE = 0.75


def text(name: str) -> str:
    """Return a variable's text; "" where it is not set."""
    assert name in VARIABLES, name
    return os.environ.get(name, "")


def is_on(name: str) -> bool:
    """Return a switch, which is its default where it is not set or empty; ArgumentError for other words."""
    _require(name)
    given = text(name).strip().lower()
    return given in _ON if given else VARIABLES[name].default == "on"


def seems_on(name: str) -> bool:
    """Return a switch as `is_on` does, its default for other words: where no error can be raised."""
    return VARIABLES[name].default == "on" if problem(name) else is_on(name)


def seconds(name: str) -> float | None:
    """Return a number of seconds from 0 up; None where the variable is not set. ArgumentError for anything else."""
    _require(name)
    return float(text(name)) if name in os.environ else None


def count(name: str) -> int:
    """Return a whole number from 0 up; 0 where the variable is not set. ArgumentError for anything else."""
    _require(name)
    return int(text(name) or 0)


def directory(name: str) -> str:
    """Return the path of a directory that is there; "" where the variable is not set. ArgumentError for others."""
    _require(name)
    return text(name)


def file(name: str) -> str:
    """Return the path of a file that is there; "" where the variable is not set. ArgumentError for others."""
    _require(name)
    return text(name)


def _require(name: str) -> None:
    wrong = problem(name)
    if wrong:
        raise ArgumentError(wrong)


def problem(name: str) -> str:
    """Return what is wrong with a variable's value, as an error's message; "": nothing, or it is not set."""
    given, kind = text(name), VARIABLES[name].type
    wanted = ""
    if kind == SECONDS and name in os.environ:
        wanted = "" if _is_seconds(given) else "seconds, 0 for no limit"
    elif not given:
        return ""
    elif kind == SWITCH:
        wanted = "" if given.strip().lower() in (*_ON, *_OFF) else "on or off, 1 or 0"
    elif kind == COUNT:
        wanted = "" if given.isascii() and given.isdigit() else "a whole number from 0 up"
    elif kind == READABLE:
        wanted = "" if os.path.isfile(given) else "a file that is there"
    elif kind == DIRECTORY:
        wanted = "" if os.path.isdir(os.path.expanduser(given)) else "a directory that is there"
    elif kind == WRITABLE:
        wanted = "" if os.path.isdir(given) and os.access(given, os.W_OK) else "a directory that can be written to"
    return f"{name}: expected {wanted}, got {given!r}" if wanted else ""


def _is_seconds(given: str) -> bool:
    try:
        return float(given) >= 0
    except ValueError:
        return False


def require_valid() -> None:
    """Raise ArgumentError for the first wrong value among the variables of every job; warn of misspelt names, once."""
    for name, variable in VARIABLES.items():
        if variable.of_every_job:
            _require(name)
    for name, meant in unknown().items():
        if meant and not launched_rank():
            _warn_of(name, meant)


@cache  # one warning for each name
def _warn_of(name: str, meant: str) -> None:
    _log.warning("%s: expected a variable of clcomm, got one that nothing reads; did you mean %s?", name, meant)


def unknown() -> dict[str, str]:
    """Return the variables that begin like clcomm's and are none, each with what seems to be meant; "": nothing does.

    That is another variable, or an argument such as Communicator(transport=...).
    """
    return {name: _meant(name) for name in sorted(os.environ) if name.startswith(START) and name not in VARIABLES}


def _meant(name: str) -> str:
    from difflib import get_close_matches  # here, as names are right mostly

    words = {START + own.upper(): f"{where}({own}=...)" for own, where in ARGUMENTS.items()}
    words |= {own: own for own in VARIABLES}
    for shorten in (str, _stem):
        short = {shorten(word).removeprefix(START): meant for word, meant in words.items()}
        near = get_close_matches(shorten(name).removeprefix(START), short, 1, _ALIKE)
        if near:
            return short[near[0]]
    return ""


def _stem(name: str) -> str:
    return name.removesuffix("_DIR").removesuffix("_S")


# --- Public names that go: they work and warn for two minor versions (CONTRIBUTING.md, what stays stable). ---

F = TypeVar("F", bound=Callable[..., Any])


def deprecated(*, use: str, until: str) -> Callable[[F], F]:
    """Return a decorator of a function or method that warns at each place that calls it.

    Args:
        use: what to write instead, such as "Communicator.all_reduce".
        until: the version in which the name goes, such as "1.3"; a test fails from then on.
    """

    def decorate(function: F) -> F:
        text = f"{function.__qualname__}: goes in clcomm {until}; use {use}"

        @wraps(function)
        def warning(*args: Any, **kwargs: Any) -> Any:
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return function(*args, **kwargs)

        warning.__deprecated__ = text  # type: ignore[attr-defined]  # PEP 702's name, for tools
        return warning  # type: ignore[return-value]

    return decorate
