"""Datasets and batches under the names of `torch.utils.data`, in its order of samples.

Samples are loaded in the calling thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine import Tensor
from clcomm.engine.creation import as_tensor, multinomial, tensor
from clcomm.engine.nn.init import Generator, default_generator
from clcomm.engine.tensor import FLOAT32

__all__ = [
    "BatchSampler", "ConcatDataset", "DataLoader", "Dataset", "IterableDataset", "RandomSampler",
    "Sampler", "SequentialSampler", "Subset", "SubsetRandomSampler", "TensorDataset", "WeightedRandomSampler",
    "default_collate", "get_worker_info", "random_split",
]  # fmt: skip


class Dataset:
    """Samples by number: a subclass defines `__getitem__` and `__len__`."""

    def __getitem__(self, index: int) -> Any:
        raise TypeError(f"{type(self).__name__} defines no __getitem__()")

    def __len__(self) -> int:
        raise TypeError(f"{type(self).__name__} defines no __len__()")


class TensorDataset(Dataset):
    """Rows of tensors or arrays of equal length."""

    def __init__(self, *tensors: Any):
        if not tensors or len({len(each) for each in tensors}) != 1:
            raise ArgumentError(f"TensorDataset: expected tensors of one length, got {[len(t) for t in tensors]}")
        self.tensors = tensors
        self._arrays = [each.numpy() if isinstance(each, Tensor) else np.asarray(each) for each in tensors]

    def __getitem__(self, index: Any) -> tuple[np.ndarray, ...]:
        return tuple([each[index] for each in self._arrays])

    def __len__(self) -> int:
        return len(self._arrays[0])


class Subset(Dataset):
    """The samples of a dataset with the given numbers."""

    def __init__(self, dataset: Any, indices: Sequence[int]):
        self.dataset, self.indices = dataset, indices

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.indices[index]]

    def __len__(self) -> int:
        return len(self.indices)


class ConcatDataset(Dataset):
    """The samples of several datasets, one after the other."""

    def __init__(self, datasets: Iterable[Any]):
        self.datasets = list(datasets)
        self.cumulative_sizes = np.cumsum([len(each) for each in self.datasets]).tolist()

    def __getitem__(self, index: int) -> Any:
        at = index + len(self) if index < 0 else index
        place = bisect_right(self.cumulative_sizes, at)
        if not 0 <= at < len(self):
            raise IndexError(f"ConcatDataset: expected {-len(self)} to {len(self) - 1}, got {index}")
        return self.datasets[place][at - (self.cumulative_sizes[place - 1] if place else 0)]

    def __len__(self) -> int:
        return self.cumulative_sizes[-1] if self.cumulative_sizes else 0


class IterableDataset(Dataset):
    """Samples in turn: a subclass defines `__iter__`, and a DataLoader takes them as they come."""

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(f"{type(self).__name__} defines no __iter__()")


class Sampler:
    """The numbers of samples in their order: a subclass defines `__iter__`."""

    def __init__(self, data_source: object = None):
        pass

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(f"{type(self).__name__} defines no __iter__()")


class SequentialSampler(Sampler):
    """The numbers of a dataset's samples from 0 on."""

    def __init__(self, data_source: Any):
        self._count = len(data_source)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._count))

    def __len__(self) -> int:
        return self._count


class SubsetRandomSampler(Sampler):
    """The given numbers in PyTorch's random order."""

    def __init__(self, indices: Sequence[int], generator: Generator | None = None):
        self.indices, self._generator = indices, generator

    def __iter__(self) -> Iterator[int]:
        order = (self._generator or default_generator()).permutation(len(self.indices)).tolist()
        return iter([self.indices[place] for place in order])

    def __len__(self) -> int:
        return len(self.indices)


class WeightedRandomSampler(Sampler):
    """Numbers drawn by their weights; not PyTorch's. See `creation.multinomial`."""

    def __init__(self, weights: Any, num_samples: int, replacement: bool = True, generator: Generator | None = None):
        self.weights, self.num_samples, self._how = as_tensor(weights, dtype=FLOAT32), num_samples, replacement
        self._generator = generator

    def __iter__(self) -> Iterator[int]:
        return iter(multinomial(self.weights, self.num_samples, self._how, generator=self._generator).tolist())

    def __len__(self) -> int:
        return self.num_samples


class BatchSampler(Sampler):
    """Lists of a sampler's numbers, `batch_size` in each; with `drop_last` a last one of fewer is left out."""

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool):
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last

    def __iter__(self) -> Iterator[list[int]]:
        numbers = iter(self.sampler)
        while len(batch := list(islice(numbers, self.batch_size))) == self.batch_size:
            yield batch
        if batch and not self.drop_last:
            yield batch

    def __len__(self) -> int:
        count = len(self.sampler)
        return count // self.batch_size if self.drop_last else -(-count // self.batch_size)


class RandomSampler(Sampler):
    """The numbers of a dataset's samples in PyTorch's random order, or drawn with replacement.

    num_samples: how many; by default as many as there are samples.
    """

    def __init__(self, data_source: Any, replacement: bool = False, num_samples: int | None = None,
                 generator: Generator | None = None):  # fmt: skip
        self._count, self._replacement, self._generator = len(data_source), replacement, generator
        self._samples = self._count if num_samples is None else num_samples
        if not replacement and self._samples > self._count:
            raise ArgumentError(f"RandomSampler: expected at most {self._count} samples, got {self._samples}")

    def __len__(self) -> int:
        return self._samples

    def __iter__(self) -> Iterator[int]:
        own = self._generator or Generator(default_generator().next_seed())
        if not self._replacement and self._count:
            # PyTorch draws one more order, of which it takes the rest, or nothing.
            for _ in range(self._samples // self._count):
                yield from own.permutation(self._count).tolist()
            yield from own.permutation(self._count).tolist()[: self._samples % self._count]
        else:
            for done in range(0, self._samples, 32):  # at a time, as PyTorch
                yield from own.integers((min(32, self._samples - done),), 0, self._count).tolist()


def random_split(dataset: Any, lengths: Sequence[int], generator: Generator | None = None) -> list[Subset]:
    """Return parts of a dataset, of given lengths, drawn without replacement; ArgumentError unless they add up."""
    if sum(lengths) != len(dataset):
        raise ArgumentError(f"random_split: expected lengths that add up to {len(dataset)}, got {list(lengths)}")
    order = (generator or default_generator()).permutation(len(dataset)).tolist()
    ends = np.cumsum(lengths).tolist()
    return [Subset(dataset, order[end - length : end]) for end, length in zip(ends, lengths, strict=True)]


class DataLoader:
    """Batches of a dataset's samples as tensors.

    Args:
        dataset: has `__getitem__` and `__len__`; samples are numbers, arrays, tensors, or tuples or dicts of such.
        batch_size: samples of a batch.
        shuffle: whether each pass has another order: PyTorch's after the same `manual_seed`.
        sampler: the numbers of the samples in their order, such as a DistributedSampler.
        batch_sampler: in place of batch_size, shuffle, sampler and drop_last: the numbers of each batch.
        drop_last: whether a last batch of fewer samples is left out.
        collate_fn: returns the batch of a list of samples; by default `collate`.
        generator: the source of the order; by default the one that `manual_seed` seeds.
        ignored: num_workers, pin_memory and persistent_workers change nothing.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        *,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        generator: Generator | None = None,
        **ignored: object,
    ):
        unknown = ignored.keys() - {"num_workers", "pin_memory", "persistent_workers", "prefetch_factor"}
        if unknown:
            raise ArgumentError(f"DataLoader: expected no {', '.join(sorted(unknown))}")
        if shuffle and sampler is not None:
            raise ArgumentError("DataLoader: expected shuffle or a sampler, got both")
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ArgumentError(f"batch_size: expected a whole number from 1 up, got {batch_size!r}")
        if batch_sampler is not None and (batch_size, shuffle, sampler, drop_last) != (1, False, None, False):
            raise ArgumentError("DataLoader: expected batch_sampler, or batch_size and an order, got both")
        if isinstance(dataset, IterableDataset) and (shuffle or sampler is not None or batch_sampler is not None):
            raise ArgumentError("DataLoader: expected no order of an IterableDataset's samples, got one")
        self.batch_sampler = batch_sampler
        self.dataset, self.batch_size, self.sampler = dataset, batch_size, sampler
        self._shuffle, self._drop_last = shuffle, drop_last
        self._collate, self._generator = collate_fn or collate, generator

    def __len__(self) -> int:
        if self.batch_sampler is not None:
            return len(self.batch_sampler)  # type: ignore[arg-type]
        count = len(self.dataset if self.sampler is None else self.sampler)  # type: ignore[arg-type]
        return count // self.batch_size if self._drop_last else -(-count // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        (self._generator or default_generator()).next_seed()  # PyTorch draws one for its workers
        if isinstance(self.dataset, IterableDataset):
            samples = BatchSampler(self.dataset, self.batch_size, self._drop_last)
            yield from map(self._collate, samples)
            return
        batches = self.batch_sampler
        if batches is None:
            batches = BatchSampler(self._order(), self.batch_size, self._drop_last)
        for numbers in batches:
            yield self._collate([self.dataset[number] for number in numbers])

    def _order(self) -> Iterable[int]:
        if self.sampler is not None:
            return self.sampler
        if not self._shuffle:
            return range(len(self.dataset))
        return RandomSampler(self.dataset, generator=self._generator)


def collate(samples: list[Any]) -> Any:
    """Return samples as a batch: numbers, arrays and tensors stacked to a tensor, tuples and dicts part by part."""
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: collate([each[key] for each in samples]) for key in first}
    if isinstance(first, (tuple, list)):
        return [collate(list(each)) for each in zip(*samples, strict=True)]
    if isinstance(first, str):
        return samples
    return tensor(np.stack([each.numpy() if isinstance(each, Tensor) else np.asarray(each) for each in samples]))


default_collate = collate


def get_worker_info() -> None:
    """Return None: samples are loaded in the calling thread."""
