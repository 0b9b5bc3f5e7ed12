"""Build a run's kernels once for all ranks of a host.

PoCL takes seconds to compile a step's kernels, and stores them in a cache that all processes of a user share. Without
this every rank would compile all of them, at once and into the same files. Built kernels are sealed with a checksum; at
a later start, damaged ones are removed and built again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from clcomm.communicator import Communicator
from clcomm.engine import Device, kernel_cache, pocl_cache
from clcomm.engine.rehearsal import Rehearsal, build_identity, shared_cache
from clcomm.errors import ClcommError, ShortageError
from clcomm.host import usable_cores
from clcomm.storage.files import read_regular, replacing, write_whole
from clcomm.storage.scratch import remove_stale, scratch_directory

#: The most bytes that are read of a mark.
_MOST_BYTES = 4096
#: How often a rank without a core looks whether the others have built.
_POLL_S = 0.01

_log = logging.getLogger("clcomm")


def build_together(comm: Communicator, device: Device, rehearse: Callable[[], Rehearsal], run: str) -> None:
    """Build the kernels of a run once for all ranks of a host that share a kernel cache; collective.

    Damaged kernels of an earlier build are built again. Kernels that are left out here are built by each rank when it
    needs them.

    Args:
        device: this rank's.
        rehearse: returns the kernels of the run.
        run: text that identifies them.

    Raises, on every rank, DeviceError if a kernel does not build, ShortageError if PoCL cannot store one.
    """
    stamp = _stamp(device, run)
    if comm.local_rank == 0:
        remove_stale()
        if stamp is not None:
            _clear_damaged(stamp)
    comm.rendezvous()
    need = None if stamp is None or stamp.exists() else (os.uname().nodename, str(stamp))
    comm.rendezvous()
    needs = comm.all_gather_object(need)
    if not any(needs):
        return
    leads = need is not None and needs.index(need) == comm.rank
    began = time.time()
    if leads and stamp is not None:
        _mark(stamp)
    with ExitStack() as stack:
        folders = comm.all_gather_object(_claims(stack) if leads else None)
        failure = None
        if need is not None and stamp is not None:
            failure = _build_share(rehearse, folders[needs.index(need)], stamp.parent)
        comm.rendezvous()
    failures = [error for error in comm.all_gather_object(failure) if error is not None]
    if leads and stamp is not None:
        _unmark(stamp, began if not failures else None)
    if failures:
        raise failures[0]


def _stamp(device: Device, run: str) -> Path | None:
    """Return the file that marks a run's kernels as built; it is removed with the cache."""
    cache = shared_cache(device)
    return cache and cache / f"clcomm-{sha256((build_identity(device) + run).encode()).hexdigest()[:32]}"


def _claims(stack: ExitStack) -> Path | None:
    """Create the directory in which ranks claim programs, until the stack ends; return None if that fails."""
    try:
        return stack.enter_context(scratch_directory("build"))
    except ClcommError:
        return None


def _build_share(rehearse: Callable[[], Rehearsal], claims: Path | None, cache: Path) -> ClcommError | None:
    """Build the programs that no other rank has claimed, one by one; return the error, if any."""
    shortage = pocl_cache.shortage()
    if shortage:
        return ShortageError(shortage)  # LLVM ends the process where it cannot write
    if claims is None:
        return None
    core = _claimed_core(claims)
    try:
        if core is not None:
            with _locked(cache, fcntl.LOCK_SH):
                _build_unclaimed(rehearse(), claims)
    except ClcommError as error:
        return error
    finally:
        if core is not None:
            core.write_text("done")
    while any(map(_builds, claims.glob("core-*"))):  # not in a collective, where a long wait is reported
        time.sleep(_POLL_S)
    return None


def _claimed_core(claims: Path) -> Path | None:
    """Return this rank's mark for a core to build on; None: more ranks would only load the compiler more often."""
    for core in sorted(usable_cores()):
        with suppress(OSError):  # another rank has it; or another host made this folder
            mark = claims / f"core-{core}"
            file = os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            os.write(file, str(os.getpid()).encode())
            os.close(file)
            return mark
    return None


def _build_unclaimed(rehearsal: Rehearsal, claims: Path) -> None:
    for number, program in enumerate(rehearsal.programs):
        with suppress(OSError):  # claimed by another rank; or /tmp is not shared, and each rank builds later
            os.close(os.open(claims / str(number), os.O_CREAT | os.O_EXCL))
            rehearsal.build([program])
    rehearsal.close()


def _builds(mark: Path) -> bool:
    """Return whether a rank with a core still builds; one that has died does not."""
    with suppress(OSError, ValueError):  # ValueError: it is done
        return Path("/proc", str(int(mark.read_text() or os.getpid()))).exists()  # "": it is about to write
    return False


def _clear_damaged(stamp: Path) -> None:
    """Remove a run's damaged kernels, and those of a job that died while it built them.

    Only then it waits for jobs that build into the cache: it would take away what they write.
    """
    if _left_by_dead(stamp) is None and _broken(stamp) is None:
        return
    with _locked(stamp.parent, fcntl.LOCK_EX):  # and looks again, as another job may have removed them
        left, broken = _left_by_dead(stamp), _broken(stamp)
        if left is not None:
            kernel_cache.clear(left)
            with suppress(OSError):
                _marker(stamp).unlink()
        if broken is not None:
            _log.warning("kernel cache %s: damaged; building anew what this run needs", stamp.parent)
            kernel_cache.clear(broken)
            with suppress(OSError):
                stamp.unlink()


def _left_by_dead(stamp: Path) -> list[Path] | None:
    """Return the programs in use since a job began to build which has died; None: none has."""
    marker = _marker(stamp)
    with suppress(OSError, ValueError):
        if not _is_alive(read_regular(marker, _MOST_BYTES).decode()):
            return kernel_cache.used_since(stamp.parent, marker.stat().st_mtime)
    return None


def _broken(stamp: Path) -> list[Path] | None:
    """Return the programs that differ from their seal, none where the seal is no seal; None: all are whole."""
    try:
        return kernel_cache.damaged(stamp.parent, kernel_cache.read_seal(stamp), stamp.stat().st_mtime) or None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return []


@contextmanager
def _locked(cache: Path, how: int) -> Iterator[None]:
    """Hold a lock of fcntl's on the cache: LOCK_SH to build, LOCK_EX to remove; none where the system has none."""
    with ExitStack() as opened:
        with suppress(OSError):
            descriptor = os.open(cache, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, descriptor)
            fcntl.flock(descriptor, how)
        yield


def _mark(stamp: Path) -> None:
    """Mark that this process builds; the mark remains if it dies."""
    with suppress(OSError):
        stamp.parent.mkdir(parents=True, exist_ok=True)
        with replacing(_marker(stamp)) as file:
            file.write(f"{os.uname().nodename} {os.getpid()}".encode())


def _unmark(stamp: Path, began: float | None) -> None:
    """Remove the mark, and seal the files used since `began`; None: there is nothing to seal."""
    with suppress(OSError, ClcommError):  # on a full disk too: then the next run builds again
        if began is not None:
            cache = stamp.parent
            write_whole(stamp, kernel_cache.seal(cache, kernel_cache.used_since(cache, began)), "POCL_CACHE_DIR")
    with suppress(OSError):
        _marker(stamp).unlink()


def _marker(stamp: Path) -> Path:
    return stamp.with_name(stamp.name + ".building")


def _is_alive(builder: str) -> bool:
    """Return whether the process that left a mark may still run; for one on another host it is not known: True."""
    host, pid = builder.split()
    return host != os.uname().nodename or Path("/proc", str(int(pid))).exists()
