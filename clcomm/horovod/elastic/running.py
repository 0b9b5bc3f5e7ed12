"""A training function that is called again, on the ranks that are left, after others were lost."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from clcomm.horovod import world
from clcomm.horovod.lost_ranks import HorovodInternalError
from clcomm.sync.elastic import is_lost_peer, survivors_of

_log = logging.getLogger("clcomm")


class HostsUpdatedInterrupt(Exception):
    """A change of hosts: raised by no call here, as ranks are not added; a program may raise it on all ranks.

    skip_sync: whether the state stays as it is.
    """

    def __init__(self, skip_sync: bool = False):
        super().__init__("hosts were updated")
        self.skip_sync = skip_sync


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function `train(state, ...)` that goes on from the last commit when ranks are lost.

    Where another rank dies (under Open MPI's `mpiexec --with-ft ulfm`, else MPI ends the job), those that are left
    make a Communicator of their own, go back to the state's last commit, call its reset callbacks, take the newest
    state among them and call the function again.
    """

    @functools.wraps(function)
    def train(state: Any, *args: Any, **kwargs: Any) -> Any:
        prepare: Callable[[], object] = state.sync
        while True:
            ended, result = _attempt(prepare, function, state, *args, **kwargs)
            if ended is None:
                return result
            prepare = partial(_resume, state, ended)

    return train


def _attempt(
    prepare: Callable[[], object], function: Callable[..., object], *args: object, **kwargs: object
) -> tuple[Exception | None, Any]:
    """Return (None, result) of the function, or (error, None) where training can go on after the error."""
    try:
        prepare()
        return None, function(*args, **kwargs)
    except Exception as error:
        if is_lost_peer(error):
            _go_on_without_the_lost()
        elif not isinstance(error, (HorovodInternalError, HostsUpdatedInterrupt)):
            raise
        return error, None


def _resume(state: Any, ended: Exception) -> None:
    """Bring the state to where all ranks go on."""
    is_interrupt = isinstance(ended, HostsUpdatedInterrupt)
    if not is_interrupt:
        state.restore()
    state.on_reset()
    if not is_interrupt or not ended.skip_sync:  # type: ignore[attr-defined]
        state.sync()


def _go_on_without_the_lost() -> None:
    """Replace the Communicator by one of the ranks that are left; collective over these."""
    left = world.communicator()
    size = left.size
    while True:
        left = survivors_of(left)
        try:
            world.replace_communicator(left)
            break
        except Exception as error:
            if not is_lost_peer(error):
                raise
    if left.rank == 0:
        _log.warning("elastic: %d of %d ranks go on from the last commit", left.size, size)
