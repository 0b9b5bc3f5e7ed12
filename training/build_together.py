"""A cold start shared out: ranks of a host that would build the same kernels build each of them once.

PoCL takes seconds to compile a step's kernels, and keeps them in a cache that all processes of a user share. Without
this every rank would compile all of them, at once and into the same files. What was built is sealed; what is damaged at
a later start is thrown away and built again.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from hashlib import sha256
from pathlib import Path

from clcomm.communicator import Communicator
from clcomm.engine import Device, kernel_cache, pocl_cache
from clcomm.engine.rehearsal import Rehearsal, build_identity, shared_cache
from clcomm.errors import ClcommError, ShortageError
from clcomm.files import read_regular, replacing, write_whole
from clcomm.scratch import scratch_directory, sweep

#: More than the words that name a builder.
_MOST_BYTES = 4096

_log = logging.getLogger("clcomm")


def build_together(comm: Communicator, device: Device, rehearse: Callable[[], Rehearsal], run: str) -> None:
    """Have the kernels of a run that `run` describes built once for all ranks of a host that share a cache; collective.

    What was built earlier and is damaged now is built anew. What it leaves unbuilt, each rank builds when it needs it.
    DeviceError, the same on every rank, where a kernel does not build.
    """
    stamp = _stamp(device, run)
    if comm.local_rank == 0:
        sweep()
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
        failure = _build_share(rehearse, folders[needs.index(need)]) if need is not None else None
        comm.rendezvous()
    failures = [error for error in comm.all_gather_object(failure) if error is not None]
    if leads and stamp is not None:
        _unmark(stamp, began if not failures else None)
    if failures:
        raise failures[0]


def _stamp(device: Device, run: str) -> Path | None:
    """Return the file that says that a run's kernels are in the cache: it goes when the cache is cleared."""
    cache = shared_cache(device)
    return cache and cache / f"clcomm-{sha256((build_identity(device) + run).encode()).hexdigest()[:32]}"


def _claims(stack: ExitStack) -> Path | None:
    """Make the directory in which ranks claim programs, until the stack ends; None where there is no place for it."""
    try:
        return stack.enter_context(scratch_directory("build"))
    except ClcommError:
        return None


def _build_share(rehearse: Callable[[], Rehearsal], claims: Path | None) -> ClcommError | None:
    """Build what no other rank has claimed, program by program; return what went wrong, if anything."""
    shortage = pocl_cache.shortage()
    if shortage:
        return ShortageError(shortage)  # LLVM ends the process where it cannot write
    if claims is None:
        return None
    try:
        rehearsal = rehearse()
        for number, program in enumerate(rehearsal.programs):
            with suppress(
                OSError
            ):  # another rank has it, or has a /tmp of its own: then every rank builds what it needs
                os.close(os.open(claims / str(number), os.O_CREAT | os.O_EXCL))
                rehearsal.build([program])
        rehearsal.close()
    except ClcommError as error:
        return error
    return None


def _clear_damaged(stamp: Path) -> None:
    """Throw away what is damaged of a run's kernels, and what a job left that died while it built them."""
    cache, marker = stamp.parent, _marker(stamp)
    with suppress(OSError, ValueError):
        if not _is_alive(read_regular(marker, _MOST_BYTES).decode()):
            kernel_cache.clear(kernel_cache.used_since(cache, marker.stat().st_mtime))
            marker.unlink()
    try:
        broken = kernel_cache.damaged(cache, kernel_cache.read_seal(stamp), stamp.stat().st_mtime)
    except FileNotFoundError:
        return
    except (OSError, ValueError, RecursionError):
        broken = None
    if broken is None or broken:
        _log.warning("kernel cache %s: damaged; building anew what this run needs", cache)
        kernel_cache.clear(broken or [])
        with suppress(OSError):
            stamp.unlink()


def _mark(stamp: Path) -> None:
    """Leave a sign that this process builds, which stays behind if it dies."""
    with suppress(OSError):
        stamp.parent.mkdir(parents=True, exist_ok=True)
        with replacing(_marker(stamp)) as file:
            file.write(f"{os.uname().nodename} {os.getpid()}".encode())


def _unmark(stamp: Path, began: float | None) -> None:
    """Take the sign away, and seal what was used since the building began; None: there is nothing to seal."""
    with suppress(OSError, ClcommError):  # on a full disk too: then the next run builds again
        if began is not None:
            cache = stamp.parent
            write_whole(stamp, kernel_cache.seal(cache, kernel_cache.used_since(cache, began)), "POCL_CACHE_DIR")
    with suppress(OSError):
        _marker(stamp).unlink()


def _marker(stamp: Path) -> Path:
    return stamp.with_name(stamp.name + ".building")


def _is_alive(builder: str) -> bool:
    """Say whether the process that left a sign may still be at work; one on another host may."""
    host, pid = builder.split()
    return host != os.uname().nodename or Path("/proc", str(int(pid))).exists()
