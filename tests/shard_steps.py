"""What tests of logical shards share: Communicators of fewer ranks, and a shard's backward in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from clcomm import Communicator, Synchronizer


@contextmanager
def first_ranks(comm: Communicator, count: int) -> Iterator[Communicator | None]:
    """Lend a Communicator of the first ranks, None on the others."""
    part = comm.split(0 if comm.rank < count else None)
    yield part
    if part is not None:
        part.finalize()


#: Of the networks: the numbers of a sample, and the classes.
INPUTS, CLASSES = 12, 5


def batches(shards: int, steps: int, seed: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield for each step the inputs and targets of every shard."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        yield (
            rng.standard_normal((shards, 8, INPUTS)).astype(np.float32),
            rng.integers(0, CLASSES, (shards, 8)).astype(np.int32),
        )


def drawn_counts(rng: np.random.Generator, ranks: int, shards: int) -> list[int]:
    """Return how many shards each rank gets, drawn."""
    return (1 + rng.multinomial(shards - ranks, np.full(ranks, 1 / ranks))).tolist()


def run_backward(sync: Synchronizer, losses: Sequence[Callable[[], Any]]) -> None:
    """Run backward of the mean of the micro-batches' losses, which each function computes."""
    for number, loss_of in enumerate(losses, 1):
        loss = loss_of() * (1 / len(losses))
        with nullcontext() if number == len(losses) else sync.no_sync():
            loss.backward()
