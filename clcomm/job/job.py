"""The job that this process belongs to: what is there once for all of its Communicators, until the process ends."""

from __future__ import annotations

from functools import cache
from typing import Protocol


class Hooks(Protocol):
    """The hooks of the process's exits: `clcomm.job.exits`."""

    def opened(self, communicator: object) -> None:
        """Register an open Communicator of several ranks."""

    def closed(self, communicator: object) -> None:
        """Deregister a closed Communicator."""


class Job:
    """This process's part in a job.

    Attributes:
        hooks: of the process's exits, from the first Communicator or `clcomm run` on.
    """

    def __init__(self) -> None:
        self.hooks: Hooks | None = None


@cache
def this_job() -> Job:
    """Return the job of this process, made by the first call."""
    return Job()
