"""Compression: nothing gets lost for good, all ranks end alike, fewer bytes travel, and training reaches as far."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from clcomm import Communicator, Synchronizer
from clcomm.base.host.arrays import from_bfloat16, to_bfloat16
from clcomm.engine import Generator, Linear, Tensor
from clcomm.engine.codec import DeviceCodec
from clcomm.sync.compression import parse_compression
from clcomm.sync.compression.coding import BLOCK, chars_nbytes, unpack
from clcomm.sync.compression.quantized import TopK
from clcomm.sync.compression.ranks import Task
from tests.coding import Coding
from tests.compressed_gradients import BUCKET, FEEDBACK, LAYOUT, SCHEMES, SIZE, gradient_of
from tests.numpy_models import set_gradients, small_model
from tests.training.trainers import make_trainer
from training.schedules import constant


@pytest.mark.parametrize("scheme", FEEDBACK)
def test_what_was_sent_and_the_residual_are_what_was_wanted(comm, scheme):
    hook = parse_compression(scheme)
    own, out, sent = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32), np.zeros(SIZE)
    wanted = np.zeros(SIZE)
    for step in range(12):
        own[:] = gradient_of(comm.rank, step)
        wanted += sum(gradient_of(rank, step).astype(np.float64) for rank in range(comm.size)) / comm.size
        hook(own, comm, out, BUCKET)
        sent += out
    left = comm.all_reduce(hook.kept_of(Task(own, comm, out, BUCKET)).astype(np.float64), "mean")
    np.testing.assert_allclose(sent + left, wanted, atol=2e-5)
    assert np.abs(left).max() > 1e-4, "there was something to feed back"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("options", [{}, {"use_bucketing": False}])
def test_all_ranks_end_with_the_same_bits(comm, scheme, options):
    model, sync = small_model(), Synchronizer(comm, compression=scheme, **options)
    sync.broadcast_parameters(model)
    for seed in (100, 200):
        set_gradients(model, comm.rank, seed)
        sync.sync_gradients(model)
        everyone = comm.all_gather_object(model.gradient_bits())
        assert everyone == [everyone[0]] * comm.size
        assert all(np.isfinite(p.grad).all() for p in model.parameters.values())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_device_codes_as_numpy_does(comm, scheme, monkeypatch):
    models = []
    for codec in ("the device's", None):
        if codec is None:
            monkeypatch.setattr(DeviceCodec, "on", classmethod(lambda cls, device: None))
        model = Linear(70, 30, rng=Generator(1))
        sync = Synchronizer(comm, compression=scheme)
        sync.broadcast_parameters(model)
        assert (sync.models.of(model).space.adapter.codec is None) == (codec is None)
        for step in range(4):
            inputs = np.random.default_rng([comm.rank, step]).standard_normal((5, 70)).astype(np.float32)
            outputs = model(Tensor(inputs))
            (outputs * outputs).sum().backward()
            sync.sync_gradients(model)
            models.append([parameter.grad.numpy() for parameter in model.parameters()])
            model.zero_grad()
    for mine, numpys in zip(models[:4], models[4:], strict=True):
        if scheme == "powersgd:2":  # sums of products come in other orders
            assert all(np.allclose(*pair, rtol=1e-2, atol=1e-2) for pair in zip(mine, numpys, strict=True))
        else:
            assert [each.tobytes() for each in mine] == [each.tobytes() for each in numpys]


@pytest.mark.parametrize(("scheme", "tolerance"), [("fp16", 2**-10), ("bf16", 2**-7)])
def test_halves_are_means_within_their_precision(comm, scheme, tolerance):
    hook, out = parse_compression(scheme), np.zeros(SIZE, np.float32)
    rows = np.array([gradient_of(rank, 0) for rank in range(comm.size)], np.float64)
    hook(rows[comm.rank].astype(np.float32), comm, out, BUCKET)
    assert (np.abs(out - rows.mean(axis=0)) <= tolerance * np.abs(rows).mean(axis=0) * comm.size + 1e-6).all()


@pytest.mark.parametrize(
    ("scheme", "share"), [("none", 1), ("fp16", 0.5), ("bf16", 0.5), ("int8", 0.26), ("topk:0.01", 0.021)]
)
def test_bytes_on_the_wire_are_counted_beside_the_arrays_own(comm, scheme, share):
    shape = (200, 256)  # no padding
    model = Linear(shape[1], shape[0], bias=False)
    sync = Synchronizer(comm, compression=scheme)
    if scheme.startswith("topk"):
        sync.register_comm_hook(TopK(0.01, warm_up=0))
    sync.broadcast_parameters(model)
    comm.stats.reset()
    for _ in range(3):
        sync.sync_gradients(model)
    total = comm.stats.total("all_reduce", "gradients")
    assert (total["calls"], total["bytes"]) == (3, 3 * 4 * 200 * 256)
    assert total["wire_bytes"] <= share * total["bytes"]
    assert scheme not in ("none", "fp16", "bf16") or total["wire_bytes"] == share * total["bytes"]
    assert {row["label"] for row in comm.stats.as_dict()["operations"]} <= {"gradients", "checks"}


@pytest.mark.parametrize(("share", "warm_up"), [(0.01, 100), (0.3, 10), (1.0, 5), (0.001, 0), (0.001, 3)])
def test_the_share_of_topk_decreases_from_a_quarter_to_the_given_one(share, warm_up):
    hook = TopK(share, warm_up)
    shares = [hook.share_at(step) for step in range(warm_up + 5)]
    assert shares == sorted(shares, reverse=True)
    assert set(shares[warm_up:]) == {share}
    if warm_up:
        assert shares[0] == max(0.25, share)


def test_topk_sends_more_while_it_warms_up(comm):
    hook, out, sent = TopK(0.01, warm_up=4), np.zeros(SIZE, np.float32), []
    own = np.zeros(SIZE, np.float32)
    for step in range(6):
        own[:] = gradient_of(comm.rank, step)
        comm.stats.reset()
        hook(own, comm, out, BUCKET)
        sent.append(comm.stats.total("all_gather")["bytes"] // comm.size // 8)
    assert sent == [math.ceil(share * SIZE) for share in (0.25, 0.25, 0.0625, 0.015625, 0.01, 0.01)]


def test_low_rank_factors_are_what_travels(comm):
    hook, out = parse_compression("powersgd:2"), np.zeros(SIZE, np.float32)
    comm.stats.reset()
    comm.run_as_all_reduce(lambda: hook(gradient_of(comm.rank, 0), comm, out, BUCKET), nbytes=LAYOUT.nbytes)
    assert comm.stats.total("all_reduce")["wire_bytes"] == 4 * (2 * (40 + 30) + 40)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_training_reaches_the_uncompressed_accuracy(scheme):
    """As many steps, on data that a network of this size learns; the bar is half a point."""
    assert accuracy(scheme) >= accuracy("none") - 0.005
    assert accuracy("none") > 0.9


@cache
def accuracy(compression: str) -> float:
    """Return the share of its own samples that a trained model gets right."""
    with Communicator(transport="solo") as comm:
        trainer = make_trainer(comm, 480, batch=16, compression=compression)
        trainer.schedule = constant()
        for _ in trainer.train(epochs=20):
            pass
        right = [
            trainer.parts.predict(images).argmax(axis=1) == labels for images, labels in trainer.loader.epoch(0, 0)
        ]
        return float(np.concatenate(right).mean())


floats = arrays.arrays(np.float32, st.integers(1, 600), elements=st.floats(-(2.0**99), 2.0**99, width=32))


@given(floats)
def test_int8_is_within_half_a_step_of_each_blocks_largest(given_values):
    rows = np.zeros((1, chars_nbytes(given_values.size)), np.uint8)
    Coding(None).to_chars(given_values, np.zeros_like(given_values), rows, 0)()
    back = unpack(rows[0], given_values.size)
    for start in range(0, given_values.size, BLOCK):
        block = slice(start, start + BLOCK)
        limit = np.abs(given_values[block]).max() / 127 * 0.5001 + 1e-38
        assert (np.abs(back[block] - given_values[block]) <= limit).all()


@given(floats)
def test_bfloat16_rounds_to_nearest_as_pytorch_does(given_values):
    torch = pytest.importorskip("torch")
    expected = torch.tensor(given_values).to(torch.bfloat16).float().numpy()
    assert from_bfloat16(to_bfloat16(given_values)).tobytes() == expected.tobytes()


def test_bfloat16_is_summed_in_float32_and_rounded_once_more(comm):
    rows = [to_bfloat16(gradient_of(rank, 0)) for rank in range(comm.size)]
    total = from_bfloat16(rows[0])
    for row in rows[1:]:
        total = total + from_bfloat16(row)
    expected = to_bfloat16(total).tobytes()
    assert comm.all_reduce(rows[comm.rank].copy()).tobytes() == expected
    assert comm.all_reduce_async(rows[comm.rank].copy()).wait().tobytes() == expected


def test_nan_and_inf_show_in_the_mean_and_not_in_later_ones():
    with Communicator(transport="solo") as comm:
        for scheme in SCHEMES:
            hook, out = parse_compression(scheme), np.zeros(SIZE, np.float32)
            bad = gradient_of(0, 0).copy()
            bad[3] = np.inf
            hook(bad, comm, out, BUCKET)
            assert not np.isfinite(out).all(), scheme
            bad[:] = gradient_of(0, 1)
            hook(bad, comm, out, BUCKET)
            assert np.isfinite(out).all(), scheme
