"""Parallelism beyond replicas: ranks on a mesh, layers divided between them, pipelines, and several devices a process.

mesh.py lays ranks out along axes, tensor_parallel divides layers, pipeline divides a model into stages, devices trains
replicas within one process. Start with mesh.py, then data_parallel.py.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clcomm.parallel.data_parallel import DistributedDataParallel
    from clcomm.parallel.mesh import DeviceMesh, Mesh
    from clcomm.parallel.sync_batch_norm import SyncBatchNorm
    from clcomm.parallel.tensor_parallel import (
        ColumnParallel,
        HeadsParallel,
        RowParallel,
        SequenceParallel,
        VocabularyParallel,
        VocabularyParallelCrossEntropyLoss,
        parallelize_module,
    )

__all__ = [
    "ColumnParallel",
    "DeviceMesh",
    "DistributedDataParallel",
    "HeadsParallel",
    "Mesh",
    "RowParallel",
    "SequenceParallel",
    "SyncBatchNorm",
    "VocabularyParallel",
    "VocabularyParallelCrossEntropyLoss",
    "parallelize_module",
]

#: The modules of names that tensor parallelism does not have; each is imported at the first access of a name.
_MODULES = {
    "DeviceMesh": "mesh", "DistributedDataParallel": "data_parallel", "Mesh": "mesh",
    "SyncBatchNorm": "sync_batch_norm",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_MODULES.get(name, 'tensor_parallel')}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
