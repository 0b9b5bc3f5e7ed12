"""The error of Horovod's calls where a rank was lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from clcomm.sync.elastic import is_lost_peer


class HorovodInternalError(RuntimeError):
    """A collective that failed because a rank was lost; a program may raise it to go back to the last commit."""


def internal_error(error: Exception) -> Exception:
    """Return HorovodInternalError for MPI's error for a lost rank, and any other error as it is."""
    if isinstance(error, HorovodInternalError) or not is_lost_peer(error):
        return error
    found = HorovodInternalError(f"a rank was lost: {error}; hvd.elastic.run goes on without it")
    found.__cause__ = error
    return found


@contextmanager
def raising_internal_errors() -> Iterator[None]:
    """Raise `internal_error` in place of the block's errors."""
    try:
        yield
    except Exception as error:
        found = internal_error(error)
        raise found from found.__cause__
