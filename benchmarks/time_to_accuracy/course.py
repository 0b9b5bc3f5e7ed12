"""The common course of both systems: data, order, batch, optimizer, schedule, and the steps of evaluations."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.peers.batches import default_data
from clcomm.sync.sampler import DistributedSampler, EvaluationSampler
from training.data.datasets import Splits
from training.data.loader import Loader
from training.schedules import Schedule, parse_schedule

SEED, LR, MOMENTUM, SCHEDULE = 0, 0.05, 0.9, "cosine:warmup=40"
EVALUATION_BATCH = 128
_MOST_EPOCHS = 10


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a course."""
    parser.add_argument("--model", choices=("convnet", "mlp"), default="convnet")
    parser.add_argument("--data", default=default_data(), help="as for the examples; default here: %(default)s")
    parser.add_argument("--batch-size", type=harness.positive, default=32, help="of a rank; default: %(default)s")
    parser.add_argument("--target", type=float, default=0.98, help="test accuracy to reach; default: %(default)s")
    parser.add_argument("--every", type=harness.positive, default=50, help="steps between tests; default: %(default)s")


def worker_options() -> argparse.Namespace:
    """Return a worker's own options."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_options(parser)
    return parser.parse_args()


def loaders(options: argparse.Namespace, splits: Splits, rank: int, size: int) -> tuple[Loader, Loader]:
    """Return a rank's training and test batches."""
    assert splits.test is not None
    order = DistributedSampler(len(splits.train), rank, size, seed=SEED)
    test_order = EvaluationSampler(len(splits.test), rank, size)
    return (
        Loader(splits.train, order, options.batch_size, prefetch=0),
        Loader(splits.test, test_order, EVALUATION_BATCH, prefetch=0),
    )


def test_size(splits: Splits) -> int:
    """Return the number of test images."""
    assert splits.test is not None
    return len(splits.test)


def schedule(loader: Loader) -> Schedule:
    """Return the learning rate's factor by step."""
    return parse_schedule(SCHEDULE, len(loader))


def train(
    options: argparse.Namespace, loader: Loader, step: Callable[[np.ndarray, np.ndarray, float], None],
    accuracy: Callable[[], float],
) -> dict[str, Any]:  # fmt: skip
    """Train until the target is reached; return the number of steps and the accuracy."""
    factor, steps, reached = schedule(loader), 0, 0.0
    for epoch in range(_MOST_EPOCHS):
        for images, labels in loader.epoch(epoch):
            step(images, labels, LR * factor(steps))
            steps += 1
            if steps % options.every == 0:
                reached = accuracy()
                if reached >= options.target:
                    return {"steps": steps, "accuracy": reached}
    return {"steps": steps, "accuracy": reached}


def report(result: dict[str, Any]) -> None:
    """Print a result for the parent."""
    print(json.dumps(result), flush=True)


def count_correct(logits: np.ndarray, labels: np.ndarray) -> int:
    """Return the number of images whose largest logit is their label's."""
    return int((logits.argmax(1) == labels).sum())
