"""The error of Horovod's calls where a rank was lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from clcomm.elastic import is_lost_peer


class HorovodInternalError(RuntimeError):
    """A collective that failed because a rank was lost; a program may raise it to go back to the last commit."""


@contextmanager
def raising_internal_errors() -> Iterator[None]:
    """Raise HorovodInternalError in place of MPI's error for a lost rank."""
    try:
        yield
    except Exception as error:
        if isinstance(error, HorovodInternalError) or not is_lost_peer(error):
            raise
        raise HorovodInternalError(f"a rank was lost: {error}; hvd.elastic.run goes on without it") from error
