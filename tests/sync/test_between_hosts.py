"""Compression between hosts: hosts add up in their memory, and what they send each other is all that is compressed."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer
from clcomm.base.host.arrays import from_bfloat16, to_bfloat16
from clcomm.comm.transport import mpi_communicators
from tests.numpy_models import Model, set_gradients, small_model
from tests.training.test_trainer import assert_same_bits, make_trainer, train
from tests.transport.references import drawn, layout_hosts, pretended_host
from training.checkpoint_series import CheckpointSeries
from training.snapshot import restore_snapshot, save_snapshot

pytestmark = pytest.mark.mpi(min_size=3)
SHAPE = (40, 64)
SIZE = 40 * 64
FEEDBACK = ["int8", "topk:0.05", "powersgd:2"]
#: Of each scheme, how much of the gradients one host hands over.
SHARES = {"none": 1.0, "fp16": 0.5, "bf16": 0.5, "int8": 260 / 1024, "topk:0.25": 0.5, "powersgd:2": 2 * 104 / SIZE}


@pytest.fixture(params=["first-alone", "interleaved"])
def layout(request, monkeypatch):
    """Let Communicators believe in two hosts."""
    monkeypatch.setattr(mpi_communicators, "host_of", lambda comm: pretended_host(request.param, comm))
    return request.param


@pytest.fixture
def comm(layout, request):
    made = Communicator()
    yield made
    if not request.node.has_failed:
        made.finalize()


def gradients_of(rank: int, step: int = 0) -> np.ndarray:
    return drawn(rank, SIZE, "float32", step).reshape(SHAPE)


def host_sums(layout: str, size: int) -> list[np.ndarray]:
    """Return each host's sum, in rank order, weighed so that the mean over hosts is that over ranks."""
    hosts = layout_hosts(layout, size)
    sums = [sum((gradients_of(rank) for rank in ranks[1:]), gradients_of(ranks[0])) for ranks in hosts]
    return [total.reshape(-1) * np.float32(len(hosts) / size) for total in sums]


def averaged(comm: Communicator, sync: Synchronizer, model: Model, step: int = 0) -> np.ndarray:
    model["w"].grad = gradients_of(comm.rank, step).copy()
    sync.sync_gradients(model)
    return model["w"].grad


def test_halves_are_made_of_the_hosts_sums(comm, layout):
    first, second = (total / np.float32(2) for total in host_sums(layout, comm.size))
    expected = {
        "fp16": (first.astype(np.float16) + second.astype(np.float16)).astype(np.float32),
        "bf16": from_bfloat16(to_bfloat16(from_bfloat16(to_bfloat16(first)) + from_bfloat16(to_bfloat16(second)))),
    }
    for scheme, mean in expected.items():
        model = Model([("w", np.zeros(SHAPE, np.float32))])
        assert averaged(comm, Synchronizer(comm, compression=scheme), model).tobytes() == mean.tobytes(), scheme


@pytest.mark.parametrize("scheme", SHARES)
def test_every_rank_counts_what_its_host_handed_over(comm, scheme):
    model, sync = Model([("w", np.zeros(SHAPE, np.float32))]), Synchronizer(comm, compression=scheme)
    first = averaged(comm, sync, model).tobytes()
    comm.stats.reset()
    for _ in range(3):
        last = averaged(comm, sync, model).tobytes()
    total = comm.stats.total("all_reduce", "gradients")
    assert (total["calls"], total["bytes"]) == (3, 3 * 4 * SIZE)
    assert total["wire_bytes"] == round(SHARES[scheme] * total["bytes"])
    rows = comm.stats.as_dict()["operations"]
    assert {row["label"] for row in rows} <= {"gradients", "checks"}
    assert [row["transport"] for row in rows if row["label"] == "gradients"] == ["hierarchical"]
    everyone = comm.all_gather_object((first, last))
    assert everyone == [everyone[0]] * comm.size, "the same bits on every rank"


@pytest.mark.parametrize("scheme", FEEDBACK)
def test_what_was_sent_and_the_hosts_residuals_are_what_was_wanted(comm, scheme):
    model, sync = Model([("w", np.zeros(SHAPE, np.float32))]), Synchronizer(comm, compression=scheme)
    sent, wanted = np.zeros(SHAPE), np.zeros(SHAPE)
    for step in range(6):
        wanted += sum(gradients_of(rank, step).astype(np.float64) for rank in range(comm.size)) / comm.size
        sent += averaged(comm, sync, model, step)
    states = comm.all_gather_object((comm.local_rank, sync.state_dict(model)))
    assert all(bool(state) == (local_rank == 0) for local_rank, state in states)
    residuals = [state["residual"].view(np.float32)[:SIZE].reshape(SHAPE) for _, state in states if state]
    largest = np.abs(wanted).max()
    np.testing.assert_allclose(sent + np.mean(residuals, axis=0, dtype=np.float64), wanted, atol=1e-6 * largest)
    assert np.abs(residuals).max() > 1e-4 * largest, "there was something to feed back"


@pytest.mark.parametrize("scheme", FEEDBACK)
def test_a_restored_state_continues_with_the_same_bits(comm, scheme):
    model, sync = small_model(), Synchronizer(comm, compression=scheme)
    again, resumed = small_model(), Synchronizer(comm, compression=scheme)
    for seed in range(200, 700, 100):
        set_gradients(model, comm.rank, seed)
        sync.sync_gradients(model)
        if seed == 400:
            resumed.load_state_dict(again, {name: array.copy() for name, array in sync.state_dict(model).items()})
        if seed > 400:
            set_gradients(again, comm.rank, seed)
            resumed.sync_gradients(again)
            assert again.gradient_bits() == model.gradient_bits()


def test_resuming_has_the_bits_of_an_uninterrupted_run_on_the_same_hosts_alone(comm, tmp_path, caplog):
    path = comm.broadcast_object(str(tmp_path / "run.npz"))
    samples = 60 * comm.size
    whole = train(make_trainer(comm, samples, compression="powersgd:2"), 8)
    first = make_trainer(comm, samples, compression="powersgd:2")
    train(first, 4)
    save_snapshot(CheckpointSeries(comm, path), first, {})
    resumed = make_trainer(comm, samples, compression="powersgd:2")
    restore_snapshot(path, resumed, {})
    assert_same_bits(train(resumed, 8), whole)
    assert not caplog.records
    with Communicator(transport="mpi") as elsewhere:
        other = make_trainer(elsewhere, samples, compression="powersgd:2")
        restore_snapshot(path, other, {})
        assert not other.sync.state_dict(other.model)["residual"].any()
    if comm.rank == 0:
        assert [record.getMessage() for record in caplog.records] == [
            "checkpoint: was written on other hosts: what compression kept is left out"
        ]
