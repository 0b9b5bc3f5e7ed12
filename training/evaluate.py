"""Accuracy and loss over a dataset, each sample counted once over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from clcomm.communicator import Communicator
from training.data.loader import Loader

#: Samples that a rank evaluates at a time.
EVALUATION_BATCH = 128


@dataclass(frozen=True)
class Evaluation:
    """A model on a dataset: `accuracy` from 0 to 1 and mean cross-entropy `loss` over `samples`."""

    accuracy: float
    loss: float
    samples: int


def evaluate(comm: Communicator, predict: Callable[[np.ndarray], np.ndarray], loader: Loader) -> Evaluation:
    """Return the same Evaluation on every rank; collective.

    Args:
        predict: returns the logits (B, classes) of images (B, C, H, W), or (B, T, classes) of sequences with T labels,
            each of which then counts as a sample.
        loader: this rank's part of the dataset.
    """
    totals = np.zeros(3, np.float64)  # samples, correct, loss
    with comm.phase("predict"):
        for images, several in loader:
            labels = several.reshape(-1)
            logits = predict(images).reshape(len(labels), -1)
            totals += len(labels), int((logits.argmax(1) == labels).sum()), _cross_entropy(logits, labels)
    comm.rendezvous()
    samples, correct, loss = comm.all_reduce(totals, label="metrics")
    return Evaluation(correct / samples, loss / samples, int(samples))


def _cross_entropy(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the sum of the samples' cross-entropies, in float64."""
    shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
    own = shifted[np.arange(len(labels)), labels]
    return float((np.log(np.exp(shifted).sum(1)) - own).sum())
