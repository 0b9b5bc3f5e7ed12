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


def drawn_counts(rng: np.random.Generator, ranks: int, shards: int) -> list[int]:
    """Return how many shards each rank gets, drawn."""
    return (1 + rng.multinomial(shards - ranks, np.full(ranks, 1 / ranks))).tolist()


def run_backward(sync: Synchronizer, losses: Sequence[Callable[[], Any]]) -> None:
    """Run backward of the mean of the micro-batches' losses, which each function computes."""
    for number, loss_of in enumerate(losses, 1):
        loss = loss_of() * (1 / len(losses))
        with nullcontext() if number == len(losses) else sync.no_sync():
            loss.backward()
