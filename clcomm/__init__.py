"""Data-parallel training for OpenCL devices over MPI."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from clcomm import _moved
from clcomm._version import __version__

if TYPE_CHECKING:
    from clcomm.base.errors import ClcommError
    from clcomm.comm.collectives.in_flight import Handle
    from clcomm.comm.communicator import Communicator
    from clcomm.comm.stats import Collective, CommStats, Observer
    from clcomm.comm.watch import note_samples, note_saved, note_step, run
    from clcomm.engine.device import Device
    from clcomm.parallel import DistributedDataParallel, Mesh
    from clcomm.parallel.loss_scaling import GradScaler
    from clcomm.sync.clipping import clip_grad_norm
    from clcomm.sync.distributed_optimizer import DistributedOptimizer
    from clcomm.sync.sampler import DistributedSampler
    from clcomm.sync.synchronizer import Synchronizer

__all__ = [
    "ClcommError",
    "Collective",
    "CommStats",
    "Communicator",
    "Device",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "DistributedSampler",
    "GradScaler",
    "Handle",
    "Mesh",
    "Observer",
    "Synchronizer",
    "__version__",
    "clip_grad_norm",
    "note_samples",
    "note_saved",
    "note_step",
    "run",
]

#: The module of each name, imported at the first access, so that `clcomm --help` does not load NumPy.
_MODULES = {
    "ClcommError": "base.errors", "Collective": "comm.stats", "CommStats": "comm.stats",
    "Communicator": "comm.communicator", "Device": "engine.device", "DistributedDataParallel": "parallel",
    "DistributedOptimizer": "sync.distributed_optimizer", "DistributedSampler": "sync.sampler",
    "GradScaler": "parallel.loss_scaling", "Handle": "comm.collectives.in_flight", "Mesh": "parallel",
    "Observer": "comm.stats", "Synchronizer": "sync.synchronizer", "clip_grad_norm": "sync.clipping",
    "note_samples": "comm.watch", "note_saved": "comm.watch", "note_step": "comm.watch", "run": "comm.watch",
}  # fmt: skip

sys.meta_path.insert(0, _moved.Finder())


def __getattr__(name: str) -> Any:
    """Import a name of `__all__`, or a module of the package, at its first access."""
    if name in _MODULES:
        value = globals()[name] = getattr(import_module(f"clcomm.{_MODULES[name]}"), name)
        return value
    try:
        if not name.startswith("_"):
            return import_module(f"clcomm.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"clcomm.{name}":
            raise
    raise AttributeError(f"module 'clcomm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
