"""Datasets and batches under the names of `torch.utils.data`, in its order of samples.

Samples are loaded in the calling thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from clcomm.engine import Tensor
from clcomm.engine.nn.init import Generator, default_generator
from clcomm.errors import ArgumentError

__all__ = ["DataLoader", "Dataset", "RandomSampler", "Subset", "TensorDataset", "random_split"]


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


class RandomSampler:
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
        if not self._replacement:
            yield from own.permutation(self._count).tolist()[: self._samples]
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
        self.dataset, self.batch_size, self.sampler = dataset, batch_size, sampler
        self._shuffle, self._drop_last = shuffle, drop_last
        self._collate, self._generator = collate_fn or collate, generator

    def __len__(self) -> int:
        count = len(self.dataset if self.sampler is None else self.sampler)  # type: ignore[arg-type]
        return count // self.batch_size if self._drop_last else -(-count // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        (self._generator or default_generator()).next_seed()  # PyTorch draws one for its workers
        batch = []
        for number in self._order():
            batch.append(self.dataset[number])
            if len(batch) == self.batch_size:
                yield self._collate(batch)
                batch = []
        if batch and not self._drop_last:
            yield self._collate(batch)

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
    return Tensor(np.stack([each.numpy() if isinstance(each, Tensor) else np.asarray(each) for each in samples]))
