"""Bucket sizes and scaling: decisions that follow from the cost model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.base.errors import ArgumentError
from clcomm.comm.costs.forecast import MODELS, bucket_bytes, equal_tensors, recommend, scaling
from clcomm.comm.costs.model import Cluster, Cost
from models.convnet import ConvNet
from models.mlp import MLP

CLUSTER = Cluster({4: Cost(6e-6, 5e-10)}, Cost(1e-5, 1e-9), "ring")


@pytest.mark.parametrize(("name", "make"), [("convnet", ConvNet), ("mlp", MLP)])
def test_models_are_those_of_the_repository(name, make):
    assert MODELS[name] == tuple(parameter.nbytes for _, parameter in make().named_parameters())


@given(st.integers(1, 10**9), st.integers(1, 500))
def test_equal_tensors_lose_no_byte(nbytes, tensors):
    if tensors > nbytes:
        with pytest.raises(ArgumentError, match=r"^tensors: expected a number from 1 to the"):
            equal_tensors(nbytes, tensors)
        return
    sizes = equal_tensors(nbytes, tensors)
    assert len(sizes) == tensors
    assert sum(sizes) == nbytes
    assert max(sizes) - min(sizes) <= 1


def test_buckets_come_in_the_order_of_backward():
    assert bucket_bytes([10, 20, 30], None) == (30, 20, 10)
    assert bucket_bytes([10, 20, 30], 50) == (50, 10)
    assert sum(bucket_bytes(MODELS["convnet"], 1 << 20)) == 827_688


def test_without_overlap_one_bucket_is_recommended():
    best = recommend(MODELS["convnet"], Cost(1e-5, 1e-9).seconds).best
    assert (best.bucket_size, best.buckets) == (1 << 20, (827_688,))
    assert best.seconds == pytest.approx(1e-5 + 827_688e-9)


def test_with_overlap_and_a_dear_byte_several_buckets_are():
    tensors = equal_tensors(1 << 20, 64)
    best = recommend(tensors, Cost(1e-6, 1e-9).seconds, backward_s=1e-3, overlap=True).best
    assert 1 < len(best.buckets) < 64


def cut(tensors, bucket_size):
    """Return buckets as a loop over the tensors in backward's order fills them; None: one for each tensor."""
    buckets = []
    for nbytes in reversed(tensors):
        if buckets and bucket_size is not None and buckets[-1] + nbytes <= bucket_size:
            buckets[-1] += nbytes
        else:
            buckets.append(nbytes)
    return tuple(buckets)


def simulated_s(buckets, all_reduce_s, forward_s, backward_s, overlap):
    """Return a step's seconds: the network takes one bucket at a time, when backward has completed it."""
    computed, free = forward_s, 0.0
    if not overlap:
        return forward_s + backward_s + sum(map(all_reduce_s, buckets))
    for nbytes in buckets:
        computed += backward_s * nbytes / sum(buckets)
        free = max(free, computed) + all_reduce_s(nbytes)
    return max(free, computed)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize(("latency", "per_byte"), [(2e-5, 2e-9), (1e-3, 1e-10), (1e-7, 5e-8)])
def test_the_recommended_size_is_the_fastest_of_all_powers_of_two_in_a_simulation(overlap, model, latency, per_byte):
    tensors = MODELS[model]

    def all_reduce_s(nbytes):
        return latency + per_byte * nbytes

    found = recommend(tensors, all_reduce_s, forward_s=1e-3, backward_s=2e-3, overlap=overlap)
    simulated = {
        size: simulated_s(cut(tensors, size), all_reduce_s, 1e-3, 2e-3, overlap)
        for size in (None, *(1 << exponent for exponent in range(10, 26)))
    }
    assert found.best.seconds == pytest.approx(min(simulated.values()))
    assert simulated[found.best.bucket_size] == pytest.approx(min(simulated.values()))
    for candidate in found.candidates:
        assert candidate.seconds == pytest.approx(simulated[candidate.bucket_size])
        assert candidate.buckets == cut(tensors, candidate.bucket_size)
    plans = [candidate.buckets for candidate in found.candidates]
    assert len(plans) == len(set(plans)) and set(plans) == {cut(tensors, size) for size in simulated}


def test_the_scaling_table_goes_from_2_to_4096_ranks_and_says_what_was_measured():
    rows = scaling(CLUSTER, [1000, 2000], ranks_per_host=4, measured_s={(4, 1): 5e-5, (3, 1): 4e-5})
    assert [row.ranks for row in rows] == [2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    assert [row.ranks for row in rows if row.basis == "measured"] == [3, 4]
    assert rows[-1].hosts == 1024
    by_ranks = {row.ranks: row for row in rows}
    assert by_ranks[4].predicted_s == pytest.approx(2 * 6e-6 + 3000 * 5e-10)
    assert by_ranks[4].busbw_bytes_per_s == pytest.approx(3000 / 5e-5 * 1.5)
    assert by_ranks[16].network_s == pytest.approx(2 * 6e-5 + 1.5 * 3000e-9)  # 4 hosts
    assert by_ranks[16].busbw_bytes_per_s == pytest.approx(3000 / by_ranks[16].predicted_s * 2 * 15 / 16)


def test_efficiency_is_computing_over_the_step():
    (row,) = scaling(CLUSTER, [1000], ranks_per_host=4, measured_s={(2, 1): 1e-3}, compute_s=3e-3, largest=2)
    assert row.efficiency == pytest.approx(0.75)
    assert scaling(CLUSTER, [1000], ranks_per_host=4, largest=2)[0].efficiency is None


def test_no_ranks_on_a_host_is_refused():
    with pytest.raises(ArgumentError, match=r"^ranks_per_host: expected a number from 1 up, got 0$"):
        scaling(CLUSTER, [1], ranks_per_host=0)
