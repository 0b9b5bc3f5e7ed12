"""Code that runs as another user, one without rights of its own: tests of what users may do to each other."""

from __future__ import annotations

import os
import pickle
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

#: The user and group that own nothing.
NOBODY = 65534


def as_nobody(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns, or raise what it raises, in a forked child that is another user.

    What it imports has to be imported already: that user may not be able to read this environment.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            result = (True, function(*args))
        except BaseException as error:
            result = (False, error)
        with open(writing, "wb") as file:
            pickle.dump(result, file)
        os.kill(os.getpid(), 9)  # none of the parent's exit handlers
    os.close(writing)
    with open(reading, "rb") as file:
        succeeded, value = pickle.load(file)
    os.waitpid(child, 0)
    if not succeeded:
        raise value
    return value


@contextmanager
def common_directory() -> Iterator[Path]:
    """Make a directory like /tmp, in which every user may make files and remove their own."""
    folder = Path(tempfile.mkdtemp(prefix="clcomm-tests-"))
    folder.chmod(0o777 | stat.S_ISVTX)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
