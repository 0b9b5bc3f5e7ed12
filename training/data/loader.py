"""Batches of a dataset in a sampler's order, gathered ahead of the training loop by one thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Protocol

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.sync.sampler import Sampler

Batch = tuple[np.ndarray, np.ndarray]


class BatchSource(Protocol):
    """The interface that a loader needs of a dataset, such as training.data.datasets.ArrayDataset.

    `batch(indices)` is enough for a loader whose batches are all in new memory.
    """

    def new_batch(self, size: int) -> Batch: ...

    def batch(self, indices: np.ndarray, out: Batch | None = None) -> Batch: ...


def default_prefetch(cores: int) -> int:
    """Return how many batches to prefetch on `cores` cores: none on one core, where a second thread costs time."""
    return 2 if cores > 1 else 0


#: Changes the images of a batch in place: (images, the samples' indices, epoch).
Augmentation = Callable[[np.ndarray, np.ndarray, int], None]


class Loader:
    """Batches of (images float32 (B, C, H, W), labels int32 (B,)).

    Args:
        dataset: returns a batch for an array of indices.
        sampler: the order of the samples of each epoch.
        batch_size: samples of a batch.
        prefetch: how many batches a thread keeps ready; 0: they are gathered in the caller. The batches are the same.
        drop_last: leave out the last batch of an epoch if it is shorter than the others.
        held: how many batches the caller uses at a time; the memory of earlier ones is used again, which is faster, as
            it is mapped, in the cache and known to the device. 0: each is in new memory that the caller owns.
        augment: changes each batch's images; None: they stay as they are.

    Raises ArgumentError for a batch larger than a rank's shard, and for a negative `prefetch` or `held`.
    """

    def __init__(
        self,
        dataset: BatchSource,
        sampler: Sampler,
        batch_size: int,
        *,
        prefetch: int = 2,
        drop_last: bool = False,
        held: int = 0,
        augment: Augmentation | None = None,
    ) -> None:
        sampler.check_batch_size(batch_size)
        if not isinstance(prefetch, int) or prefetch < 0:
            raise ArgumentError(f"prefetch: expected a number of batches from 0 up, got {prefetch!r}")
        if not isinstance(held, int) or held < 0:
            raise ArgumentError(f"held: expected a number of batches from 0 up, got {held!r}")
        self.dataset, self.sampler = dataset, sampler
        self.batch_size, self.prefetch, self.drop_last = int(batch_size), prefetch, drop_last
        self.held, self._augment = held, augment  # held: settable between iterations
        self._memory: list[Batch] = []
        self.data_wait_s = 0.0  # time that the caller has waited for batches; may be set to 0

    def __len__(self) -> int:
        """The number of batches in a whole epoch."""
        if self.drop_last:
            return len(self.sampler) // self.batch_size
        return self.sampler.batch_count(self.batch_size)

    @property
    def most_batches(self) -> int:
        """The number of batches on the rank that has the most."""
        whole, rest = divmod(self.sampler.longest_shard, self.batch_size)
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
        parts = self.sampler.batches(self.batch_size)[start_batch : len(self)]
        gathered = self._gathered(parts, self.sampler.epoch)
        return self._ahead(gathered, len(parts)) if self.prefetch else self._inline(gathered)

    def _gathered(self, parts: list[np.ndarray], epoch: int) -> Iterator[Batch]:
        """Yield the batch of each part of the epoch's order."""
        # One more is being gathered while `prefetch` wait and the caller uses its own.
        places = self.held + (self.prefetch + 1 if self.prefetch else 0)
        size = len(parts[0]) if parts else 0
        for number, part in enumerate(parts):
            is_whole = self.held > 0 and len(part) == size
            place = self._place(number % places, size) if is_whole else None
            batch = self.dataset.batch(part) if place is None else self.dataset.batch(part, place)
            if self._augment is not None:
                self._augment(batch[0], part, epoch)
            yield batch

    def _place(self, number: int, size: int) -> Batch:
        """Return memory for a batch of so many samples, which is used again for others of this size."""
        if self._memory and len(self._memory[0][1]) != size:
            self._memory = []
        while number >= len(self._memory):
            self._memory.append(self.dataset.new_batch(size))
        return self._memory[number]

    def _inline(self, gathered: Iterator[Batch]) -> Generator[Batch, None, None]:
        begin = time.perf_counter()
        for batch in gathered:
            self.data_wait_s += time.perf_counter() - begin
            yield batch
            begin = time.perf_counter()

    def _ahead(self, gathered: Iterator[Batch], count: int) -> Generator[Batch, None, None]:
        producer = _Producer(gathered, self.prefetch)
        try:
            for _ in range(count):
                begin = time.perf_counter()
                batch = producer.take()
                self.data_wait_s += time.perf_counter() - begin
                yield batch
        finally:  # also runs when the loop breaks, fails, or drops the iterator
            producer.close()


class _Producer:
    """A thread that takes batches from an iterator, of which at most `ahead` wait in a queue."""

    def __init__(self, gathered: Iterator[Batch], ahead: int) -> None:
        self._gathered = gathered
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
            for batch in self._gathered:
                if self._stopped.is_set():
                    return
                self._ready.put(batch)
        except BaseException as error:  # raised in the caller
            self._ready.put(error)
