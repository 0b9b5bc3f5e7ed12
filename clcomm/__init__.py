"""Data-parallel training for OpenCL devices over MPI."""

from clcomm._version import __version__
from clcomm.clipping import clip_grad_norm
from clcomm.communicator import Communicator
from clcomm.errors import ClcommError
from clcomm.handle import Handle
from clcomm.stats import Collective, CommStats, Observer
from clcomm.synchronizer import Synchronizer

__all__ = [
    "ClcommError",
    "Collective",
    "CommStats",
    "Communicator",
    "Handle",
    "Observer",
    "Synchronizer",
    "__version__",
    "clip_grad_norm",
]
