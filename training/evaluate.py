"""Accuracy and loss over a dataset, each sample counted once over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from clcomm.comm.communicator import Communicator
from clcomm.sync.logical_shards import LogicalShards
from clcomm.sync.sampler import EvaluationSampler
from training.data.loader import BatchSource, Loader

#: Samples that a rank evaluates at a time.
EVALUATION_BATCH = 128


@dataclass(frozen=True)
class Evaluation:
    """A model on a dataset: `accuracy` from 0 to 1 and mean cross-entropy `loss` over `samples`."""

    accuracy: float
    loss: float
    samples: int


def evaluate(
    comm: Communicator, predict: Callable[[np.ndarray], np.ndarray], test: BatchSource, samples: int, batch_size: int,
    shards: LogicalShards | None = None,
) -> Evaluation:  # fmt: skip
    """Return the same Evaluation on every rank; collective.

    Args:
        predict: returns the logits (B, classes) of images (B, C, H, W), or (B, T, classes) of sequences with T labels,
            each of which then counts as a sample.
        test: the dataset.
        samples: of it, divided between the ranks.
        batch_size: samples that a rank evaluates at a time.
        shards: what they are divided into instead, on any number of ranks.
    """
    shards = shards or LogicalShards.even(comm.size, comm.rank, comm.size, is_divided=False)
    totals = {}  # by shard: samples, correct, loss
    with comm.phase("predict"):
        for shard in shards.own:
            loader = Loader(test, EvaluationSampler(samples, shard, shards.count), batch_size, prefetch=0)
            totals[shard] = _totals(predict, loader)
    comm.rendezvous()
    evaluated, correct, loss = shards.total(comm, totals, 3)
    return Evaluation(correct / evaluated, loss / evaluated, int(evaluated))


def _totals(predict: Callable[[np.ndarray], np.ndarray], loader: Loader) -> np.ndarray:
    """Return the number of samples, the right answers and the sum of losses, float64 (3,)."""
    totals = np.zeros(3, np.float64)
    for images, several in loader:
        labels = several.reshape(-1)
        logits = predict(images).reshape(len(labels), -1)
        totals += len(labels), int((logits.argmax(1) == labels).sum()), _cross_entropy(logits, labels)
    return totals


def _cross_entropy(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the sum of the samples' cross-entropies, in float64."""
    shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
    own = shifted[np.arange(len(labels)), labels]
    return float((np.log(np.exp(shifted).sum(1)) - own).sum())
