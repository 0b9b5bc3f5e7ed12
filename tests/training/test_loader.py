"""The loader: the same batches with and without its thread, which never outlives the loop."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.base.errors import ArgumentError
from clcomm.sync.sampler import DistributedSampler, EvaluationSampler
from training.data.datasets import ArrayDataset
from training.data.loader import Loader, default_prefetch


def numbered(count=40):
    """A dataset whose sample i is an image full of i with label i: a batch tells which samples it holds."""
    images = np.broadcast_to(np.arange(count, dtype=np.float32)[:, None, None, None], (count, 1, 2, 2))
    return ArrayDataset(images, np.arange(count), name="numbered", classes=count)


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name == "clcomm-loader"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert loader_threads() == []


class Counting:
    """A dataset that counts its batches and fails at the one of number `failing`."""

    def __init__(self, failing=None, wait_s=0.0):
        self.gathered, self.failing, self.wait_s = 0, failing, wait_s

    def batch(self, indices):
        if self.gathered == self.failing:
            raise OSError("the disk is gone")
        self.gathered += 1
        time.sleep(self.wait_s)
        return indices.astype(np.float32), indices.astype(np.int32)

    def wait_until_gathered(self, batches):
        """Wait until another thread has asked for so many batches; it has a minute, more than it takes anywhere."""
        deadline = time.monotonic() + 60
        while self.gathered < batches and time.monotonic() < deadline:
            time.sleep(0.005)


@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 20), st.integers(0, 4), st.booleans(), st.integers(0, 3))
def test_batches_are_the_samplers_order_in_slices(count, world, batch_size, prefetch, drop_last, epoch):
    sampler = DistributedSampler(count, world - 1, world, seed=3)
    if batch_size > len(sampler):
        with pytest.raises(ArgumentError, match="batch_size"):
            Loader(numbered(count), sampler, batch_size, prefetch=prefetch)
        return
    loader = Loader(numbered(count), sampler, batch_size, prefetch=prefetch, drop_last=drop_last)
    got = list(loader.epoch(epoch))
    sampler.set_epoch(epoch)
    order = sampler.indices()
    assert len(got) == len(loader) == (len(order) // batch_size if drop_last else -(-len(order) // batch_size))
    for number, (images, labels) in enumerate(got):
        want = order[number * batch_size : (number + 1) * batch_size]
        np.testing.assert_array_equal(labels, want)
        np.testing.assert_array_equal(images, np.broadcast_to(want[:, None, None, None], (len(want), 1, 2, 2)))
        assert images.dtype == np.float32 and labels.dtype == np.int32 and images.flags.c_contiguous


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_resuming_within_an_epoch(prefetch):
    loader = Loader(numbered(), DistributedSampler(40, 0, 2), 6, prefetch=prefetch)
    whole = [labels.tolist() for _, labels in loader.epoch(5)]
    for start in range(len(loader) + 1):
        assert [labels.tolist() for _, labels in loader.epoch(5, start_batch=start)] == whole[start:]
    for start in (-1, len(loader) + 1):
        with pytest.raises(ArgumentError, match="start_batch: expected 0 to 4"):
            loader.epoch(5, start_batch=start)


def test_four_ranks_see_together_what_one_rank_sees():
    one = Loader(numbered(), DistributedSampler(40, 0, 1), 8)
    four = [Loader(numbered(), DistributedSampler(40, rank, 4), 2, prefetch=0) for rank in range(4)]
    for alone, *parts in zip(one.epoch(1), *(loader.epoch(1) for loader in four), strict=True):
        assert sorted(alone[1]) == sorted(np.concatenate([labels for _, labels in parts]))


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("held", [1, 2, 5])
def test_memory_is_used_again_once_a_batch_is_no_longer_held(prefetch, held):
    loader = Loader(numbered(50), DistributedSampler(50, 0, 1), 4, prefetch=prefetch, held=held)
    places = held + (prefetch + 1 if prefetch else 0)
    for epoch in range(2):
        seen, taken = [], []
        for images, labels in loader.epoch(epoch):
            taken.append((images, labels, labels.copy()))
            time.sleep(0.001)  # a thread that gathers ahead may run now
            for batch, numbers, copy in taken[-held:]:
                np.testing.assert_array_equal(numbers, copy)
                np.testing.assert_array_equal(batch[:, 0, 0, 0], copy)
            seen.append(labels.copy())
        whole = [id(images) for images, labels, _ in taken if len(labels) == 4]
        assert len(set(whole)) == min(places, len(whole)) and len(taken[-1][1]) == 2
        loader.sampler.set_epoch(epoch)
        np.testing.assert_array_equal(np.concatenate(seen), loader.sampler.indices())


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_batch_handed_out_is_never_overwritten(prefetch):
    loader = Loader(numbered(), DistributedSampler(40, 0, 1), 4, prefetch=prefetch)
    kept = [(images, images.copy()) for images, _ in loader.epoch(0)]
    list(loader.epoch(1))
    for images, copy in kept:
        np.testing.assert_array_equal(images, copy)
    assert not any(np.shares_memory(a, b) for (a, _), (b, _) in itertools.pairwise(kept))


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_an_error_while_gathering_reaches_the_loop(prefetch):
    loader = Loader(Counting(failing=2), DistributedSampler(40, 0, 1), 4, prefetch=prefetch)
    seen = 0
    with pytest.raises(OSError, match="the disk is gone"):
        for _ in loader:
            seen += 1
    assert seen == 2


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_an_abandoned_loop_ends_the_thread(taken):
    loader = Loader(Counting(), DistributedSampler(400, 0, 1), 1, prefetch=2)
    batches = iter(loader)
    for _ in range(taken):
        next(batches)
    assert len(loader_threads()) == (taken > 0)
    del batches
    assert loader_threads() == []
    with pytest.raises(RuntimeError, match="the loop failed"):
        for _ in loader:
            raise RuntimeError("the loop failed")


@pytest.mark.parametrize("prefetch", [1, 3])
def test_only_so_many_batches_are_gathered_ahead(prefetch):
    dataset = Counting()
    batches = Loader(dataset, DistributedSampler(40, 0, 1), 1, prefetch=prefetch).batches()
    next(batches)
    dataset.wait_until_gathered(prefetch + 2)
    time.sleep(0.05)
    assert dataset.gathered == prefetch + 2  # one handed out, `prefetch` ready, one waiting for its place
    batches.close()


def test_waiting_for_data_is_counted_and_prefetch_hides_it():
    waits = {}
    for prefetch in (0, 2):
        dataset = Counting(wait_s=0.02)
        loader = Loader(dataset, DistributedSampler(20, 0, 1), 1, prefetch=prefetch)
        for taken, _ in enumerate(loader, 1):
            if prefetch:  # the step's own work: the next batch is ready once the one after it is begun
                dataset.wait_until_gathered(min(taken + 2, 20))
        waits[prefetch] = loader.data_wait_s
    assert waits[0] >= 0.4 and waits[2] < waits[0] / 2


def test_the_order_is_fixed_when_the_iteration_is_asked_for():
    sampler = DistributedSampler(40, 0, 1)
    loader = Loader(numbered(), sampler, 8)
    batches = loader.epoch(1)
    sampler.set_epoch(2)
    want = DistributedSampler(40, 0, 1)
    want.set_epoch(1)
    np.testing.assert_array_equal(np.concatenate([labels for _, labels in batches]), want.indices())


def test_evaluation_takes_any_batch_size_and_each_sample_once():
    seen = []
    for rank in range(3):
        loader = Loader(numbered(), EvaluationSampler(40, rank, 3), 100)
        seen += [labels for _, labels in loader]
    np.testing.assert_array_equal(np.concatenate(seen), np.arange(40))
    nothing = Loader(numbered(2), EvaluationSampler(2, 2, 3), 4)
    assert len(nothing) == 0 and list(nothing) == []


def test_bad_arguments_are_named():
    with pytest.raises(ArgumentError, match="batch_size: expected at most 20"):
        Loader(numbered(), DistributedSampler(40, 1, 2), 21)
    with pytest.raises(ArgumentError, match="prefetch: expected a number of batches from 0 up, got -1"):
        Loader(numbered(), DistributedSampler(40, 0, 1), 4, prefetch=-1)
    with pytest.raises(ArgumentError, match="held: expected a number of batches from 0 up, got -1"):
        Loader(numbered(), DistributedSampler(40, 0, 1), 4, held=-1)


def test_one_core_needs_no_thread():
    assert [default_prefetch(cores) for cores in (1, 2, 16)] == [0, 2, 2]
