"""Samplers: nothing is lost, shards are equal, and the number of ranks does not change a global batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.base.errors import ArgumentError, CheckpointError
from clcomm.sync.sampler import (
    BalancedSampler,
    ContiguousSampler,
    DistributedSampler,
    EvaluationSampler,
    _stable_order,
    shuffled,
)

lengths = st.integers(1, 300)
worlds = st.integers(1, 9)
seeds = st.integers(0, 2**64 - 1)
epochs = st.integers(0, 50)


def shards(kind, length, world, epoch=0, **options):
    samplers = [kind(length, rank, world, **options) for rank in range(world)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [sampler.indices() for sampler in samplers], samplers


@given(lengths, worlds, seeds, epochs, st.booleans())
def test_distributed_shards_are_equal_and_lose_nothing(length, world, seed, epoch, shuffle):
    parts, samplers = shards(DistributedSampler, length, world, epoch, shuffle=shuffle, seed=seed)
    assert {len(part) for part in parts} == {-(-length // world)} == {len(sampler) for sampler in samplers}
    counts = np.bincount(np.concatenate(parts), minlength=length)
    assert len(counts) == length and counts.min() >= 1
    assert counts.sum() - length < world
    if world <= length:
        assert counts.max() <= 2


@given(lengths, worlds, seeds, epochs)
def test_without_padding_each_sample_comes_once(length, world, seed, epoch):
    parts, samplers = shards(DistributedSampler, length, world, epoch, seed=seed, pad=False)
    assert sorted(np.concatenate(parts).tolist()) == list(range(length))
    sizes = [len(part) for part in parts]
    assert sizes == [len(sampler) for sampler in samplers] and max(sizes) - min(sizes) <= 1
    assert {sampler.longest_shard for sampler in samplers} == {max(sizes)} == {sizes[0]}
    assert all(not sampler.equal_shards for sampler in samplers)


@given(lengths, worlds, seeds)
def test_drop_last_never_repeats(length, world, seed):
    if length < world:
        with pytest.raises(ArgumentError, match="drop_last"):
            DistributedSampler(length, 0, world, drop_last=True)
        return
    parts, samplers = shards(DistributedSampler, length, world, seed=seed, drop_last=True)
    assert {len(part) for part in parts} == {length // world} == {len(sampler) for sampler in samplers}
    seen = np.concatenate(parts)
    assert len(np.unique(seen)) == len(seen)


@given(st.integers(1, 200), st.sampled_from([2, 3, 4, 6]), st.integers(1, 7), seeds, epochs)
def test_a_global_batch_is_the_same_for_any_number_of_ranks(length, world, batch, seed, epoch):
    length *= world  # without padding the two agree on every step, the incomplete last one too
    parts, _ = shards(DistributedSampler, length, world, epoch, seed=seed)
    alone = shards(DistributedSampler, length, 1, epoch, seed=seed)[0][0]
    for step in range(-(-length // (world * batch))):
        together = np.stack([part[step * batch : (step + 1) * batch] for part in parts], axis=1).ravel()
        np.testing.assert_array_equal(together, alone[step * world * batch : (step + 1) * world * batch])


@given(lengths, worlds, seeds, epochs, st.booleans(), st.booleans())
def test_contiguous_shards(length, world, seed, epoch, shuffle, pad):
    parts, samplers = shards(ContiguousSampler, length, world, epoch, shuffle=shuffle, seed=seed, pad=pad)
    assert [len(part) for part in parts] == [len(sampler) for sampler in samplers]
    sizes = {len(part) for part in parts}
    assert max(sizes) - min(sizes) <= (0 if pad else 1)
    counts = np.bincount(np.concatenate(parts), minlength=length)
    assert len(counts) == length and counts.min() >= 1
    if not pad:
        assert counts.max() == 1
    for part, sampler in zip(parts, samplers, strict=True):
        if sampler.stop > sampler.start:
            assert set(part) == set(range(sampler.start, sampler.stop))


def test_contiguous_spreads_the_remainder_where_lizardist_gives_it_to_the_last_rank():
    parts, _ = shards(ContiguousSampler, 11, 4, shuffle=False, pad=False)
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]


@given(lengths, worlds)
def test_evaluation_sees_each_sample_once(length, world):
    parts, samplers = shards(EvaluationSampler, length, world)
    np.testing.assert_array_equal(np.concatenate(parts), np.arange(length))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    samplers[0].check_batch_size(length + 1)


@given(lengths, seeds, epochs)
def test_the_order_depends_on_seed_and_epoch_alone(length, seed, epoch):
    first, again = shuffled(length, seed, epoch), shuffled(length, seed, epoch)
    assert first.tobytes() == again.tobytes()
    np.testing.assert_array_equal(np.sort(first), np.arange(length))
    if length > 50:
        assert not np.array_equal(first, shuffled(length, seed, epoch + 1))
        assert not np.array_equal(first, shuffled(length, seed ^ 1, epoch))
        assert not np.array_equal(first, shuffled(length, seed, epoch, stream=1))


@pytest.mark.parametrize("equal_bits", [0, 16, 17, 64])
def test_many_keys_are_sorted_as_few_are(equal_bits):
    """Keys that differ in their upper bits alone, in their lower ones alone, and not at all, keep their order."""
    keys = np.random.Philox(key=1).random_raw(20_000)
    keys = keys >> np.uint64(equal_bits) if equal_bits < 64 else np.zeros_like(keys)
    keys[::7] = keys[0] ^ np.arange(len(keys[::7]), dtype=np.uint64) % np.uint64(3)
    for upper in (keys, keys | np.arange(len(keys), dtype=np.uint64) << np.uint64(48), np.unique(keys)):
        np.testing.assert_array_equal(_stable_order(upper), np.argsort(upper, kind="stable"))


def test_the_order_never_changes_between_versions():
    """A stored order: changing it would break every checkpoint's promise of the same bits."""
    assert shuffled(12, seed=1, epoch=2).tolist() == [4, 11, 2, 0, 6, 1, 5, 10, 9, 8, 7, 3]


def test_shuffling_is_fair():
    """Over 3,000 epochs each of 6 samples stands first about 500 times (5 sigma: 102)."""
    firsts = np.bincount([shuffled(6, 0, epoch)[0] for epoch in range(3000)], minlength=6)
    assert np.abs(firsts - 500).max() < 102


@pytest.mark.parametrize("kind", [DistributedSampler, ContiguousSampler])
def test_a_batch_larger_than_a_shard_is_refused_on_every_rank(kind):
    messages = set()
    for rank in range(4):
        sampler = kind(901, rank, 4)
        sampler.check_batch_size(226)
        with pytest.raises(ArgumentError, match=r"226.*901 samples over 4 ranks.*got 227") as caught:
            sampler.check_batch_size(227)
        messages.add(str(caught.value))
    assert len(messages) == 1 and "\n" not in messages.pop()


@pytest.mark.parametrize("batch_size", [0, -1, 1.5, "8", True, None])
def test_a_batch_size_that_is_no_positive_number_is_refused(batch_size):
    with pytest.raises(ArgumentError, match="batch_size"):
        DistributedSampler(10, 0, 1).check_batch_size(batch_size)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((0, 0, 1), "length"), ((5, 2, 2), "rank"), ((5, -1, 2), "rank"), ((5, 0, 0), "world_size")],
)
def test_bad_arguments_are_named(arguments, named):
    for kind in (DistributedSampler, ContiguousSampler, EvaluationSampler):
        with pytest.raises(ArgumentError, match=f"^{named}: expected"):
            kind(*arguments)


def test_state_comes_back_and_other_jobs_state_is_refused():
    written = DistributedSampler(100, 1, 4, seed=7)
    written.set_epoch(3)
    resumed = DistributedSampler(100, 1, 4)
    resumed.load_state_dict(written.state_dict())
    np.testing.assert_array_equal(resumed.indices(), written.indices())
    with pytest.raises(CheckpointError, match=r"length.*100.*101"):
        DistributedSampler(101, 1, 4).load_state_dict(written.state_dict())
    written = ContiguousSampler(100, 1, 4)
    with pytest.raises(CheckpointError, match=r"world_size.*4.*2"):
        ContiguousSampler(100, 1, 2).load_state_dict(written.state_dict())


def test_other_ranks_share_what_is_left_of_an_epoch():
    whole = DistributedSampler(100, 0, 1, seed=7)
    whole.set_epoch(3)
    fewer = [DistributedSampler(100, rank, 3) for rank in range(3)]
    for sampler in fewer:
        sampler.load_state_dict(DistributedSampler(100, 2, 4, seed=7).state_dict() | {"epoch": 3})
        sampler.leave_out(40)
    left = np.stack([sampler.indices() for sampler in fewer], axis=1).reshape(-1)
    np.testing.assert_array_equal(left, whole.indices()[40:])
    again = DistributedSampler(100, 0, 3)
    again.load_state_dict(fewer[0].state_dict())
    np.testing.assert_array_equal(again.indices(), fewer[0].indices())
    again.set_epoch(4)
    assert len(again) == 34
    with pytest.raises(ArgumentError, match=r"^done: expected fewer than the 100 samples"):
        again.leave_out(100)


def test_iterating_gives_the_indices_as_plain_integers():
    sampler = DistributedSampler(10, 1, 2, shuffle=False)
    assert list(sampler) == [1, 3, 5, 7, 9]
    assert all(type(index) is int for index in sampler)


# --- shares ---


@given(
    length=st.integers(1, 200), batch=st.integers(1, 9), seed=st.integers(0, 9), done=st.integers(0, 20),
    units=st.lists(st.integers(1, 9), min_size=1, max_size=4),
)  # fmt: skip
def test_shares_divide_the_steps_of_equal_shards(length, batch, seed, done, units):
    ranks = len(units)
    whole = batch * ranks
    shares = [1] * ranks
    for index in range(whole - ranks):
        shares[units[index % ranks] % ranks] += 1
    samplers = [BalancedSampler(length, rank, ranks, shares, seed=seed) for rank in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(3)
        if done < length:
            sampler.leave_out(done)
    order = samplers[0].global_order()
    batches = [sampler.batches(batch) for sampler in samplers]
    steps = max(map(len, batches))
    assert steps == -(-len(order) // whole) == -(-samplers[0].longest_shard // batch)
    for step in range(steps):
        parts = [own[step] for own in batches if step < len(own)]
        np.testing.assert_array_equal(np.concatenate(parts), order[step * whole : (step + 1) * whole])
        assert samplers[0].samples_of_all(step, 1) == sum(map(len, parts))
        if (step + 1) * whole <= len(order):
            assert [len(part) for part in parts] == shares
    for sampler, own in zip(samplers, batches, strict=True):
        assert sampler.batch_count(batch) == len(own) and all(len(part) for part in own)
        assert len(sampler) == len(sampler.indices()) == sum(map(len, own))


@pytest.mark.parametrize("shares", [(3, 2), (0, 4), (4,), (2, 2, 2)])
def test_shares_that_do_not_fit(shares):
    with pytest.raises(ArgumentError) as caught:
        BalancedSampler(20, 0, 2, shares)
    expected = "shares: expected 2 numbers of at least 1 that add up to a multiple of 2, got"
    assert str(caught.value) == f"{expected} {list(shares)}"
    with pytest.raises(ArgumentError, match=r"^batch_size: expected 3, got 4"):
        BalancedSampler(20, 0, 2, (2, 4)).batches(4)
