"""Batches of a dataset in a sampler's order, gathered ahead of the training loop by one thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator
from typing import Protocol

import numpy as np

from clcomm.errors import ArgumentError
from clcomm.sampler import Sampler

Batch = tuple[np.ndarray, np.ndarray]


class BatchSource(Protocol):
    """The interface that a loader needs of a dataset, such as training.data.datasets.ArrayDataset."""

    def batch(self, indices: np.ndarray) -> Batch: ...


def default_prefetch(cores: int) -> int:
    """Return how many batches to prefetch on `cores` cores: none on one core, where a second thread costs time."""
    return 2 if cores > 1 else 0


class Loader:
    """Batches of (images float32 (B, C, H, W), labels int32 (B,)) in new memory that the caller owns.

    Args:
        dataset: returns a batch for an array of indices.
        sampler: the order of the samples of each epoch.
        batch_size: samples of a batch.
        prefetch: how many batches a thread keeps ready; 0: they are gathered in the caller. The batches are the same.
        drop_last: leave out the last batch of an epoch if it is shorter than the others.

    Raises ArgumentError for a batch larger than a rank's shard, and for a negative `prefetch`.
    """

    def __init__(
        self,
        dataset: BatchSource,
        sampler: Sampler,
        batch_size: int,
        *,
        prefetch: int = 2,
        drop_last: bool = False,
    ) -> None:
        sampler.check_batch_size(batch_size)
        if not isinstance(prefetch, int) or prefetch < 0:
            raise ArgumentError(f"prefetch: expected a number of batches from 0 up, got {prefetch!r}")
        self.dataset, self.sampler = dataset, sampler
        self.batch_size, self.prefetch, self.drop_last = int(batch_size), prefetch, drop_last
        self.data_wait_s = 0.0  # time that the caller has waited for batches; may be set to 0

    def __len__(self) -> int:
        """The number of batches in a whole epoch."""
        return self._batches_in(len(self.sampler))

    @property
    def most_batches(self) -> int:
        """The number of batches on the rank that has the most."""
        return self._batches_in(self.sampler.longest_shard)

    def _batches_in(self, samples: int) -> int:
        whole, rest = divmod(samples, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Generator[Batch, None, None]:
        return self.batches()

    def epoch(self, epoch: int, start_batch: int = 0) -> Generator[Batch, None, None]:
        """Return the batches of `epoch` from `start_batch`, which is not 0 if a run resumes within an epoch."""
        self.sampler.set_epoch(epoch)
        return self.batches(start_batch)

    def batches(self, start_batch: int = 0) -> Generator[Batch, None, None]:
        """Return the rest of the sampler's current epoch from `start_batch`; its order is fixed at this call."""
        if not 0 <= start_batch <= len(self):
            raise ArgumentError(f"start_batch: expected 0 to {len(self)}, the batches of an epoch, got {start_batch}")
        indices = self.sampler.indices()
        parts = [
            indices[number * self.batch_size : (number + 1) * self.batch_size]
            for number in range(start_batch, len(self))
        ]
        return self._ahead(parts) if self.prefetch else self._inline(parts)

    def _inline(self, parts: list[np.ndarray]) -> Generator[Batch, None, None]:
        for part in parts:
            begin = time.perf_counter()
            batch = self.dataset.batch(part)
            self.data_wait_s += time.perf_counter() - begin
            yield batch

    def _ahead(self, parts: list[np.ndarray]) -> Generator[Batch, None, None]:
        producer = _Producer(self.dataset, parts, self.prefetch)
        try:
            for _ in parts:
                begin = time.perf_counter()
                batch = producer.take()
                self.data_wait_s += time.perf_counter() - begin
                yield batch
        finally:  # also runs when the loop breaks, fails, or drops the iterator
            producer.close()


class _Producer:
    """A thread that gathers batches, of which at most `ahead` wait in a queue."""

    def __init__(self, dataset: BatchSource, parts: list[np.ndarray], ahead: int) -> None:
        self._dataset, self._parts = dataset, parts
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(ahead)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._produce, name="clcomm-loader", daemon=True)
        self._thread.start()

    def take(self) -> Batch:
        """Return the next batch, or raise the error that stopped the thread."""
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        """Stop the thread and wait until it has ended."""
        self._stopped.set()
        while not self._ready.empty():  # a free place unblocks the thread, which then ends
            self._ready.get_nowait()
        self._thread.join()

    def _produce(self) -> None:
        try:
            for part in self._parts:
                batch = self._dataset.batch(part)
                if self._stopped.is_set():
                    return
                self._ready.put(batch)
        except BaseException as error:  # raised in the caller
            self._ready.put(error)
