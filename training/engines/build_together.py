"""Build a run's kernels once for all ranks of a host.

PoCL takes seconds to compile a step's kernels, and stores them in a cache that all processes of a user share. Without
this every rank would compile all of them, at once. A stamp in the cache lists what a run has built.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from hashlib import sha256
from pathlib import Path

from clcomm.base.errors import ClcommError, ShortageError
from clcomm.base.host import usable_cores
from clcomm.base.storage.files import read_regular, write_whole
from clcomm.base.storage.scratch import remove_stale, scratch_directory
from clcomm.comm.communicator import Communicator
from clcomm.engine import Device, pocl
from training.engines.rehearsal import Rehearsal, build_identity, shared_cache

#: The most bytes that are read of a stamp.
_MOST_BYTES = 1 << 20
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
            _remove_damaged(stamp)
    comm.rendezvous()
    need = None if stamp is None or stamp.exists() else (os.uname().nodename, str(stamp))
    comm.rendezvous()
    needs = comm.all_gather_object(need)
    if not any(needs):
        return
    leads = need is not None and needs.index(need) == comm.rank
    with ExitStack() as stack:
        folders = comm.all_gather_object(_claims(stack) if leads else None)
        failure = None
        if need is not None and stamp is not None:
            failure = _build_share(rehearse, folders[needs.index(need)])
        comm.rendezvous()
    found = comm.all_gather_object((failure, need, pocl.names_used(stamp.parent) if stamp else []))
    failures = [error for error, _, _ in found if error is not None]
    if failures:
        raise failures[0]
    if leads and stamp is not None:
        names = sorted({name for _, where, names in found if where == need for name in names})
        with suppress(OSError, ClcommError):  # on a full disk too: then the next run builds again
            write_whole(stamp, json.dumps(names), "POCL_CACHE_DIR")


def _stamp(device: Device, run: str) -> Path | None:
    """Return the file that marks a run's kernels as built; it is removed with the cache."""
    cache = shared_cache(device)
    return cache and cache / f"run-{sha256((build_identity(device) + run).encode()).hexdigest()[:32]}"


def _claims(stack: ExitStack) -> Path | None:
    """Create the directory in which ranks claim programs, until the stack ends; return None if that fails."""
    try:
        return stack.enter_context(scratch_directory("build"))
    except ClcommError:
        return None


def _build_share(rehearse: Callable[[], Rehearsal], claims: Path | None) -> ClcommError | None:
    """Build the programs that no other rank has claimed, one by one; return the error, if any."""
    shortage = pocl.shortage()
    if shortage:
        return ShortageError(shortage)  # LLVM ends the process where it cannot write
    if claims is None:
        return None
    core = _claimed_core(claims)
    try:
        if core is not None:
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


def _remove_damaged(stamp: Path) -> None:
    """Remove a run's stamp where a program has changed since, so that the ranks build it together again."""
    try:
        names = json.loads(read_regular(stamp, _MOST_BYTES))
        if isinstance(names, list) and not pocl.damaged(stamp.parent, map(os.path.basename, names)):
            return
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, RecursionError):
        pass  # no stamp of ours
    _log.warning("kernel cache %s: damaged; building anew what this run needs", stamp.parent)
    with suppress(OSError):
        stamp.unlink()
