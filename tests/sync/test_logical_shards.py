"""Logical shards: the bits of parameters, optimizer, buffers and norms are the same on any number of ranks."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer, clip_grad_norm, optim
from clcomm.base.errors import ArgumentError, MismatchError, NonFiniteError
from clcomm.comm.transport import mpi_communicators
from clcomm.engine import BatchNorm1d, CrossEntropyLoss, Dropout, Linear, ReLU, Sequential, Tensor, nn
from clcomm.engine.random_stream import RandomStream
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from tests.helpers import one_line
from tests.numpy_models import Model
from tests.shard_steps import CLASSES, INPUTS, batches, drawn_counts, first_ranks, run_backward
from tests.transport.references import pretended_host
from training.expected_memory import expected_memory

OPTIMIZERS = {
    "sgd": lambda model: optim.SGD(model, 0.1, momentum=0.9), "adam": lambda model: optim.Adam(model, 1e-2),
}  # fmt: skip


def _loss(model: Any, inputs: np.ndarray, targets: np.ndarray, device: Any) -> Tensor:
    return CrossEntropyLoss()(model(Tensor(inputs, device)), Tensor(targets, device))


def trained(
    comm: Communicator, device: Any, shards: int, *, optimizer: str = "adam", micro_batches: int = 1, steps: int = 3,
    deals: bool = False, is_sharded: bool = False, **options: Any,
) -> str:  # fmt: skip
    """Return the hash of everything that a training with dropout, batch norm and clipping ends with."""
    nn.manual_seed(7)
    RandomStream.of(device).seed(7, comm.rank)
    model = Sequential(
        Linear(INPUTS, 33, device=device), BatchNorm1d(33, device=device), ReLU(), Dropout(0.3),
        Linear(33, CLASSES, device=device),
    )  # fmt: skip
    sync, norms, rng = Synchronizer(comm, shards=shards, **options), [], np.random.default_rng(comm.size)
    sync.broadcast_parameters(model)
    stepper = OPTIMIZERS[optimizer](model)
    if is_sharded:
        stepper = DistributedOptimizer(stepper, sync)
    for inputs, targets in batches(shards, steps):
        for shard in sync.shards.own:
            with sync.shard(model, shard):
                parts = zip(
                    np.split(inputs[shard], micro_batches), np.split(targets[shard], micro_batches), strict=True
                )
                run_backward(sync, [partial(_loss, model, x, y, device) for x, y in parts])
        sync.sync_gradients(model)
        norms.append(clip_grad_norm(sync, model, 0.5))
        if deals:
            sync.deal_shards(drawn_counts(rng, comm.size, shards))
        stepper.step()
        stepper.zero_grad()
    sync.check_replicas(model)
    sync.broadcast_buffers(model)
    state = {**model.state_dict(), **stepper.state_dict(), "norms": np.array(norms)}
    return hashlib.sha256(b"".join(np.asarray(state[name]).tobytes() for name in sorted(state))).hexdigest()


@pytest.mark.parametrize(("shards", "optimizer", "micro_batches"), [(4, "sgd", 2), (7, "adam", 1)])
def test_the_bits_are_the_same_on_any_number_of_ranks(several, device, shards, optimizer, micro_batches):
    given = {"optimizer": optimizer, "micro_batches": micro_batches}
    expected = trained(Communicator(transport="solo"), device, shards, **given)
    for count in range(1, several.size + 1):
        with first_ranks(several, count) as part:
            assert part is None or trained(part, device, shards, **given) == expected, count


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("more", [0, 3])
def test_a_divided_optimizer_has_the_same_bits_on_any_number_of_ranks(several, device, more):
    shards = several.size + more
    expected = trained(Communicator(transport="solo"), device, shards)
    for count in range(1, several.size + 1):
        with first_ranks(several, count) as part:
            assert part is None or trained(part, device, shards, is_sharded=True, deals=True) == expected, count


def test_a_divided_optimizer_waits_for_all_shards(several, device):
    model = Linear(INPUTS, CLASSES, device=device)
    sync = Synchronizer(several, shards=2 * several.size)
    sync.broadcast_parameters(model)
    DistributedOptimizer(optim.SGD(model, 0.1), sync)
    with pytest.raises(ArgumentError, match=r"sync_gradients: expected each of rank 0's shards, .*got none of shard 0"):
        sync.sync_gradients(model)


@pytest.mark.mpi(min_size=2)
def test_shards_that_are_dealt_anew_keep_the_bits(several, device):
    """Each shard goes on with its random numbers and running statistics on the rank that it goes to."""
    shards = several.size + 3
    expected = trained(Communicator(transport="solo"), device, shards, steps=6)
    assert trained(several, device, shards, steps=6, deals=True) == expected


@pytest.mark.mpi(min_size=2)
def test_deals_that_do_not_fit_are_refused_on_every_rank(several, device):
    model = Linear(INPUTS, CLASSES, device=device)
    sync = Synchronizer(several, shards=2 * several.size)
    sync.broadcast_parameters(model)
    size = several.size
    for counts in ([2 * size], [0] + [2] * (size - 2) + [4], [2] * (size - 1) + [3], [2.0] * size):
        with pytest.raises(ArgumentError, match=f"deal: expected {size} whole numbers from 1 up that add up to"):
            sync.deal_shards(counts)
    with pytest.raises(MismatchError, match="deal_shards: expected the same on every rank") as caught:
        sync.deal_shards([1, *[2] * (size - 2), 3] if several.rank else [2] * size)
    one_line(caught)
    if several.rank == 1:
        with sync.shard(model, sync.shards.own.start):
            model(Tensor(np.ones((2, INPUTS), np.float32), device)).sum().backward()
    with pytest.raises(ArgumentError, match="expected it between steps, got it on rank 1 after shard 2 and") as caught:
        sync.deal_shards([1, *[2] * (size - 2), 3])
    one_line(caught)
    with pytest.raises(ArgumentError, match="deal_shards: expected logical shards"):
        Synchronizer(several).deal_shards([1] * size)


@pytest.mark.parametrize(
    "options", [{"overlap": True}, {"overlap": "auto", "bucket_size": "auto"}, {"bucket_size": 64}]
)
def test_as_many_shards_as_ranks_have_the_bits_of_one_rank_with_any_settings(several, device, options):
    expected = trained(Communicator(transport="solo"), device, several.size, steps=9)
    assert trained(several, device, several.size, steps=9, **options) == expected


def test_one_rank_has_the_mean_over_shards_in_their_order(device):
    """Each gradient is (((shard 0 + shard 1) + shard 2) + ...) / shards in float32."""
    shards, comm = 5, Communicator(transport="solo")
    model = Model([("w", np.zeros(257, np.float32))])
    sync = Synchronizer(comm, shards=shards)
    drawn = np.random.default_rng(3).standard_normal((shards, 257)).astype(np.float32)
    for shard in sync.shards.own:
        with sync.shard(model, shard):
            model["w"].grad = drawn[shard].copy()
    sync.sync_gradients(model)
    total = drawn[0].copy()
    for row in drawn[1:]:
        total += row
    np.testing.assert_array_equal(model["w"].grad, total / np.float32(shards))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("layout", ["first-alone", "interleaved"])
def test_hosts_do_not_change_the_bits(device, monkeypatch, layout):
    expected = trained(Communicator(transport="solo"), device, 6)
    monkeypatch.setattr(mpi_communicators, "host_of", lambda comm: pretended_host(layout, comm))
    with Communicator() as comm:
        assert trained(comm, device, 6) == expected


def test_a_torch_model_draws_each_shards_numbers(several, torch):
    def run(comm: Communicator) -> bytes:
        rng = np.random.default_rng(comm.size)
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(INPUTS, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, CLASSES))
        sync = Synchronizer(comm, shards=4)
        sync.broadcast_parameters(model)
        stepper = torch.optim.SGD(model.parameters(), 0.1)
        for inputs, targets in batches(4, 3):
            for shard in sync.shards.own:
                with sync.shard(model, shard):
                    logits = model(torch.from_numpy(inputs[shard]))
                    torch.nn.functional.cross_entropy(logits, torch.from_numpy(targets[shard]).long()).backward()
            sync.sync_gradients(model)
            stepper.step()
            stepper.zero_grad()
            sync.deal_shards(drawn_counts(rng, comm.size, 4))
        return b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = run(Communicator(transport="solo"))
    for count in range(2, several.size + 1):
        with first_ranks(several, min(count, 4)) as part:
            assert part is None or run(part) == expected, count
    torch.set_num_threads(threads)


def test_models_that_draw_from_one_stream_have_the_bits_of_one_rank(several, device):
    """Each shard's numbers go on from one model to the next, on a rank with one shard and with several."""

    def run(comm: Communicator, shards: int) -> list[bytes]:
        nn.manual_seed(2)
        models = [Sequential(Dropout(0.5), Linear(INPUTS, CLASSES, device=device)) for _ in range(2)]
        sync = Synchronizer(comm, shards=shards)
        for model in models:
            sync.broadcast_parameters(model)
        for inputs, targets in batches(shards, 3):
            for model in models:
                for shard in sync.shards.own:
                    with sync.shard(model, shard):
                        logits = model(Tensor(inputs[shard], device))
                        CrossEntropyLoss()(logits, Tensor(targets[shard], device)).backward()
                sync.sync_gradients(model)
                optim.SGD(model, 0.1).step()
                model.zero_grad()
        return [parameter.numpy().tobytes() for model in models for parameter in model.parameters()]

    for shards in (several.size, several.size + 1):
        assert run(several, shards) == run(Communicator(transport="solo"), shards)


def test_the_expected_memory_has_the_shards_gradients(several, device):
    model = Linear(400, 300, device=device)
    plain, sharded = Synchronizer(several), Synchronizer(several, shards=2 * several.size)
    without = expected_memory(plain, model, 1)
    found = expected_memory(sharded, model, 1)
    rows = 1 + 2 * (several.size - 1)  # one of rank 0, one for each shard of the others
    assert found.gradients - without.gradients >= rows * 4 * 400 * 300 // several.size


def test_a_shard_that_a_rank_left_out_is_named_on_every_rank(several, device):
    model = Linear(INPUTS, CLASSES, device=device)
    sync = Synchronizer(several, shards=2 * several.size)
    sync.broadcast_parameters(model)
    for shard in sync.shards.own[: 1 if several.rank == 1 else 2]:
        with sync.shard(model, shard):
            model(Tensor(np.ones((2, INPUTS), np.float32), device)).sum().backward()
    with pytest.raises(ArgumentError, match=r"rank 1's shards, range\(2, 4\).*got none of shard 3") as caught:
        sync.sync_gradients(model)
    one_line(caught)


def test_an_infinite_gradient_is_named_with_its_parameter(several, device):
    model = Linear(INPUTS, CLASSES, device=device)
    sync = Synchronizer(several, shards=2 * several.size, check_finite=True)
    sync.broadcast_parameters(model)
    for shard in sync.shards.own:
        with sync.shard(model, shard):
            value = np.inf if shard == 3 else 1
            model(Tensor(np.full((2, INPUTS), value, np.float32), device)).sum().backward()
    with pytest.raises(NonFiniteError, match=r"'weight' has .* Inf on rank 1"):
        sync.sync_gradients(model)


def test_shards_out_of_their_order_are_refused(device):
    model = Linear(INPUTS, CLASSES, device=device)
    sync = Synchronizer(Communicator(transport="solo"), shards=3)
    expected = r"expected shard 0, this rank's next, of range\(0, 3\), got 1"
    with pytest.raises(ArgumentError, match=expected), sync.shard(model, 1):
        pass
    with pytest.raises(ArgumentError, match=r"expected a Synchronizer with logical shards: Synchronizer\(comm, sh"):
        Synchronizer(Communicator(transport="solo")).shard(model, 0)


@pytest.mark.parametrize("shards", [0, -1, True, 1.5, "2"])
def test_only_whole_numbers_of_shards_are_accepted(shards):
    with pytest.raises(ArgumentError, match="shards: expected a whole number from 1 up, for 1 rank, got"):
        Synchronizer(Communicator(transport="solo"), shards=shards)


@pytest.mark.mpi(min_size=2)
def test_shards_whose_gradients_exceed_the_hosts_memory_are_refused(auto, device):
    with pytest.raises(ArgumentError, match="shards: expected a value whose memory this host has, got 999999999"):
        Synchronizer(auto, shards=999_999_999).broadcast_parameters(Linear(500, 500, device=device))


@pytest.mark.mpi(min_size=2)
def test_fewer_shards_than_ranks_are_refused(auto):
    with pytest.raises(ArgumentError, match=f"expected a whole number from {auto.size} up, for {auto.size} ranks"):
        Synchronizer(auto, shards=auto.size - 1)


@pytest.mark.parametrize(
    "options", [{"compression": "fp16"}, {"algorithm": "ring"}, {"combination": "adasum"}, {"zero": 2}, {"zero": 3}]
)
def test_what_sums_in_another_order_is_refused(options):
    with pytest.raises(ArgumentError, match="shards") as caught:
        Synchronizer(Communicator(transport="solo"), shards=4, **options)
    one_line(caught)


def test_calls_that_weigh_or_mix_ranks_are_refused(device):
    model = Linear(INPUTS, CLASSES, device=device)
    sync = Synchronizer(Communicator(transport="solo"), shards=2)
    sync.broadcast_parameters(model)
    refused = {
        "samples": lambda: sync.sync_gradients(model, samples=3),
        "expect": lambda: sync.expect_samples(model, 3),
        "join": lambda: sync.join(model, lambda: None).__enter__(),
        "average": lambda: sync.average_parameters(model),
        "hook": lambda: sync.register_comm_hook(lambda gradient, comm, out, bucket: None),
    }
    for name, call in refused.items():
        with pytest.raises(ArgumentError, match="shards=2") as caught:
            call()
        assert one_line(caught), name
