"""Ranks laid out along axes, and models that are trained on them."""

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
