"""A cold start shared out: ranks of a host that would build the same kernels build each of them once.

PoCL takes seconds to compile a step's kernels, and keeps them in a cache that all processes of a user share. Without
this every rank would compile all of them, at once and into the same files.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from clcomm.communicator import Communicator
from clcomm.engine import Device
from clcomm.engine.rehearsal import Rehearsal, build_identity, shared_cache
from clcomm.errors import ClcommError, DeviceError


def build_together(comm: Communicator, device: Device, rehearse: Callable[[], Rehearsal], run: str) -> None:
    """Have the kernels of a run that `run` describes built once for all ranks of a host that share a cache; collective.

    What it leaves unbuilt, each rank builds when it needs it. DeviceError, the same on every rank, where a kernel does
    not build.
    """
    stamp = _stamp(device, run) if comm.size > 1 else None
    need = None if stamp is None or stamp.exists() else (os.uname().nodename, str(stamp))
    comm.rendezvous()
    needs = comm.all_gather_object(need)
    teams = {name: count for name, count in Counter(needs).items() if name is not None and count > 1}
    if not teams:
        return
    leads = need in teams and needs.index(need) == comm.rank
    folder = tempfile.mkdtemp(prefix="clcomm-build-") if leads else None
    folders = comm.all_gather_object(folder)
    failure = _build_share(rehearse, Path(folders[needs.index(need)])) if need in teams else None
    comm.rendezvous()
    failures = [text for text in comm.all_gather_object(failure) if text is not None]
    if folder is not None and stamp is not None:
        shutil.rmtree(folder, ignore_errors=True)
        if not failures:
            with suppress(OSError):
                stamp.parent.mkdir(parents=True, exist_ok=True)
                stamp.touch()
    if failures:
        raise DeviceError(failures[0])


def _stamp(device: Device, run: str) -> Path | None:
    """Return the file that says that a run's kernels are in the cache: it goes when the cache is cleared."""
    cache = shared_cache(device)
    return cache and cache / f"clcomm-{sha256((build_identity(device) + run).encode()).hexdigest()[:32]}"


def _build_share(rehearse: Callable[[], Rehearsal], claims: Path) -> str | None:
    """Build what no other rank has claimed, program by program; return what went wrong, if anything."""
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
        return str(error)
    return None
