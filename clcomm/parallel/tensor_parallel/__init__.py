"""Tensor and sequence parallelism: models with layers divided between ranks."""

from clcomm.parallel.exchange import Exchange
from clcomm.parallel.tensor_parallel.functions import (
    copy_to_ranks,
    gather_from_ranks,
    reduce_from_ranks,
    reduce_scatter_to_ranks,
    scatter_to_ranks,
)
from clcomm.parallel.tensor_parallel.parallelize import parallelize_module
from clcomm.parallel.tensor_parallel.shards import divided_state, gathered_state
from clcomm.parallel.tensor_parallel.styles import (
    ColumnParallel,
    HeadsParallel,
    RowParallel,
    SequenceParallel,
    Style,
    VocabularyParallel,
)
from clcomm.parallel.tensor_parallel.vocabulary import VocabularyParallelCrossEntropyLoss, cross_entropy

__all__ = [
    "ColumnParallel",
    "Exchange",
    "HeadsParallel",
    "RowParallel",
    "SequenceParallel",
    "Style",
    "VocabularyParallel",
    "VocabularyParallelCrossEntropyLoss",
    "copy_to_ranks",
    "cross_entropy",
    "divided_state",
    "gather_from_ranks",
    "gathered_state",
    "parallelize_module",
    "reduce_from_ranks",
    "reduce_scatter_to_ranks",
    "scatter_to_ranks",
]
