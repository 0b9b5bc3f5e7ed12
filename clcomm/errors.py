"""The errors clcomm raises: each one is a single line that a user can act on."""

from __future__ import annotations


class ClcommError(Exception):
    """Base of all of clcomm's errors; its text is one line."""

    #: Exit code of a program that it ends: 2 for what another start would repeat, 1 for what it may cure.
    exit_code = 2


class ArgumentError(ClcommError, ValueError):
    """An argument is outside what the call accepts."""


class DeviceError(ClcommError, RuntimeError):
    """No fitting OpenCL device, or the device refused a program."""


class ResourceError(ClcommError, RuntimeError):
    """MPI has no more of what a call needs, such as communicators."""


class ShortageError(DeviceError):
    """The device's driver lacks room on a disk or free descriptors."""

    exit_code = 1


class LaunchError(ClcommError, RuntimeError):
    """The job was started in a way that cannot work, e.g. by another MPI's mpiexec."""


class MismatchError(ClcommError, RuntimeError):
    """Ranks disagree on something that has to be the same on all of them."""


class DivergenceError(MismatchError):
    """Replicas that were alike differ, by a flipped bit say, which no checkpoint has."""

    exit_code = 1


class ReplayError(ClcommError, RuntimeError):
    """A function that was replayed does not do what was recorded of it any longer."""


class DataError(ClcommError, ValueError):
    """A dataset is missing, damaged or of another format."""


class CheckpointError(ClcommError, ValueError):
    """A checkpoint is damaged or belongs to another job."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint could not be written; the one before it is still there."""

    exit_code = 1


class OutputError(ClcommError):
    """A file could not be written for want of room on its disk or of a free descriptor."""

    exit_code = 1


class NonFiniteError(ClcommError, ArithmeticError):
    """A gradient or loss holds NaN or Inf."""

    exit_code = 1


def no_copy(kind: str, instead: str) -> ArgumentError:
    """Return the error for an object that cannot be copied or pickled."""
    return ArgumentError(f"{kind}: expected to stay in its process, got one to be copied or pickled; {instead}")
