"""Locks on files that a job writes repeatedly; the error of another job names the holder.

A lock is on a small file beside the file, .NAME.lock, which names the process. The system releases the lock when the
process ends, also if it is killed; the lock file may remain, and is harmless.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

#: How long a job waits for the end of an earlier one, such as one whose launcher was killed.
WAIT_S = 6.0
_POLL_S, _MOST_BYTES = 0.1, 200
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class WriterLocks:
    """The locks that this process holds.

    A process has one such object (`Job.locks`): the system's lock belongs to the process, and `close` of any of its
    descriptors of a lock file releases it.
    """

    def __init__(self) -> None:
        #: Descriptor and number of holders of each lock.
        self._held: dict[Path, tuple[int, int]] = {}

    def acquire(self, target: Path, wait_s: float = WAIT_S) -> tuple[Path, int] | None:
        """Lock the file at `target` for this process and return the lock; None where the file system has no locks.

        Raises OSError if another process holds the lock for `wait_s` seconds more; its strerror names the holder.
        """
        path = target.with_name(f".{target.name}.lock").absolute()
        descriptor, holders = self._held.get(path, (-1, 0))
        if not holders:
            found = _locked(path, time.monotonic() + wait_s)
            if found is None:
                return None
            descriptor = found
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
        self._held[path] = descriptor, holders + 1
        return path, os.getpid()

    def release(self, held: tuple[Path, int] | None) -> None:
        """Release a lock, once for each `acquire`; no-op in a forked child."""
        if held is None or held[1] != os.getpid() or held[0] not in self._held:
            return
        path = held[0]
        descriptor, holders = self._held.pop(path)
        if holders > 1:
            self._held[path] = descriptor, holders - 1
            return
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _locked(path: Path, deadline: float) -> int | None:
    """Return the descriptor of a lock file, locked before the deadline (monotonic seconds); None without locks."""
    while True:
        descriptor = os.open(path, _FLAGS, 0o600)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            holder = "".join(filter(str.isprintable, os.pread(descriptor, _MOST_BYTES, 0).decode(errors="replace")))
            os.close(descriptor)
            if time.monotonic() > deadline:
                raise OSError(error.errno, f"another job writes it ({holder or 'unknown process'})") from None
            time.sleep(_POLL_S)
            continue
        except OSError:
            os.close(descriptor)
            return None
        if _is_at(path, descriptor):
            return descriptor
        os.close(descriptor)  # its last holder has removed it in the meantime


def _is_at(path: Path, descriptor: int) -> bool:
    with suppress(OSError):
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    return False
