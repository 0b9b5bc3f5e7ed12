"""Compression: nothing gets lost for good, all ranks end alike, fewer bytes travel, and training reaches as far."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from clcomm import Communicator, Synchronizer, checkpoint
from clcomm.checkpoint_series import CheckpointSeries
from clcomm.compression import parse_compression
from clcomm.compression.coding import BLOCK, Coding, chars_nbytes, unpack
from clcomm.compression.feedback import FlatMemory
from clcomm.compression.task import Task
from clcomm.compression.topk import TopK
from clcomm.distributed_optimizer import DistributedOptimizer
from clcomm.engine import Generator, Linear, Tensor
from clcomm.engine.codec import Codec
from clcomm.errors import ArgumentError, CheckpointError, MismatchError
from clcomm.layout import FlatLayout, ParameterSpec
from clcomm.optim import SGD
from clcomm.transport.bfloat16 import from_bfloat16, to_bfloat16
from tests.helpers import one_line
from tests.numpy_models import set_gradients, small_model
from tests.training.trainers import assert_same_bits, make_trainer, train
from training.schedules import constant
from training.snapshot import restore_snapshot, save_snapshot

SCHEMES = ["fp16", "bf16", "int8", "topk:0.05", "powersgd:2"]
FEEDBACK = SCHEMES[2:]
LAYOUT = FlatLayout([ParameterSpec("w", (40, 30)), ParameterSpec("b", (40,))])
(BUCKET,) = LAYOUT.buckets(1 << 20)
SIZE = (BUCKET.stop - BUCKET.start) // 4


def gradient_of(rank: int, step: int) -> np.ndarray:
    """Return a bucket's gradient: the slots hold numbers, the padding between them zeros."""
    flat = np.zeros(LAYOUT.span, np.uint8)
    for number, slot in enumerate(LAYOUT.slots):
        rng = np.random.default_rng([rank, step, number])
        LAYOUT.view(flat, slot.name)[...] = rng.standard_normal(slot.shape)
    return flat[BUCKET.start : BUCKET.stop].view(np.float32)


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
    left = comm.all_reduce(hook.feedback.residual_of(Task(own, comm, out, BUCKET)).astype(np.float64), "mean")
    np.testing.assert_allclose(sent + left, wanted, atol=2e-5)
    assert np.abs(left).max() > 1e-4, "there was something to feed back"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("options", [{}, {"use_bucketing": False}])
def test_all_ranks_end_with_the_same_bits(comm, scheme, options):
    model, sync = small_model(comm.rank), Synchronizer(comm, compression=scheme, **options)
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
            monkeypatch.setattr(Codec, "on", classmethod(lambda cls, device: None))
        model = Linear(70, 30, rng=Generator(1))
        sync = Synchronizer(comm, compression=scheme)
        sync.broadcast_parameters(model)
        assert (sync.space_for(model).replica.codec is None) == (codec is None)
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
def test_the_share_of_topk_comes_down_from_a_quarter_to_the_one_asked_for(share, warm_up):
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


# --- what is kept from step to step ---


@pytest.mark.parametrize("cut", [{}, {"use_bucketing": False}])
@pytest.mark.parametrize("scheme", [*SCHEMES, "none"])
def test_a_state_goes_on_with_the_same_bits(comm, scheme, cut):
    model, sync = small_model(), Synchronizer(comm, compression=scheme, **cut)
    again, resumed = small_model(), Synchronizer(comm, compression=scheme, **cut)
    for seed in range(200, 900, 100):
        set_gradients(model, comm.rank, seed)
        sync.sync_gradients(model)
        if seed == 500:
            state = {name: array.copy() for name, array in sync.state_dict(model).items()}
            resumed.load_state_dict(again, state)
        if seed > 500:
            set_gradients(again, comm.rank, seed)
            resumed.sync_gradients(again)
            assert again.gradient_bits() == model.gradient_bits()
    assert bool(state) == (scheme in FEEDBACK)


@pytest.mark.parametrize("scheme", FEEDBACK)
def test_two_models_have_residuals_of_their_own(comm, scheme):
    sync = Synchronizer(comm, compression=scheme)
    alone = Synchronizer(comm, compression=scheme)
    models = [small_model() for _ in range(3)]
    for seed in (100, 200, 300):
        for number, (model, one) in enumerate(zip(models, (sync, sync, alone), strict=True)):
            set_gradients(model, comm.rank, seed + 1000 * (number == 1))
            one.sync_gradients(model)
    assert models[0].gradient_bits() == models[2].gradient_bits()


def test_residuals_stay_with_their_elements_when_buckets_change():
    memory = FlatMemory()
    flat = np.zeros(LAYOUT.span, np.uint8)
    (whole,), parts = LAYOUT.buckets(1 << 20), LAYOUT.buckets(None)
    for bucket in parts:
        memory.of(flat[bucket.start : bucket.stop].view(np.float32), bucket)[:] = bucket.index + 1
    kept = memory.of(flat[whole.start : whole.stop].view(np.float32), whole)
    assert [kept[slot.start // 4] for slot in LAYOUT.slots] == [1, 2]


@pytest.mark.parametrize("scheme", FEEDBACK)
def test_resuming_has_the_bits_of_an_uninterrupted_run(comm, tmp_path, scheme):
    path = comm.broadcast_object(str(tmp_path / "run.npz"))
    samples = 60 * comm.size
    whole = train(make_trainer(comm, samples, compression=scheme), 12)
    first = make_trainer(comm, samples, compression=scheme)
    train(first, 5)
    save_snapshot(CheckpointSeries(comm, path), first, {})
    resumed = make_trainer(comm, samples, compression=scheme)
    restore_snapshot(path, resumed, {})
    assert_same_bits(train(resumed, 12), whole)


@pytest.mark.mpi(min_size=2)
def test_another_number_of_ranks_goes_on_without_the_residuals_and_says_so(auto, tmp_path, caplog):
    path = auto.broadcast_object(str(tmp_path / "run.npz"))
    first = make_trainer(auto, 60 * auto.size, compression="int8")
    train(first, 3)
    save_snapshot(CheckpointSeries(auto, path), first, {})
    part = auto.comm.Split(auto.rank, 0)
    with Communicator(part) as alone:
        resumed = make_trainer(alone, 60 * auto.size, compression="int8")
        resumed.loader.sampler.load_state_dict = lambda state: None  # it has an opinion of its own on other ranks
        restore_snapshot(path, resumed, {})
        assert not resumed.sync.state_dict(resumed.model)["residual"].any()
    part.Free()
    assert [record.getMessage() for record in caplog.records] == [
        f"checkpoint: was written by {auto.size} ranks, this job has 1: what compression held back is left out"
    ]


def spoilt(state: dict[str, np.ndarray], entry: str, value: object) -> dict[str, np.ndarray]:
    """Return a state with another value at `entry`; None takes it out, a function makes it of the one that is there."""
    if value is None:
        return {name: array for name, array in state.items() if name != entry}
    return state | {entry: value(state[entry].copy()) if callable(value) else value}


def with_nan(array: np.ndarray) -> np.ndarray:
    array.view(np.float32).flat[0] = np.nan
    return array


def beyond_the_last_parameter(array: np.ndarray) -> np.ndarray:
    array[-1] = 1
    return array


SPOILT = [
    ("topk:0.1", "residual", None, r"\['residual'\]: expected uint8 \(\d+\), got nothing"),
    ("int8", "residual", lambda array: array[:-512], r"\['residual'\]: expected uint8 \(\d+\), got uint8 \(\d+,\)"),
    ("int8", "residual", lambda array: array.view(np.float32), r"\['residual'\]: expected uint8 \(\d+\), got float32"),
    ("int8", "residual", with_nan, r"\['residual'\]: expected finite numbers, got others for 'w2'"),
    ("int8", "residual", beyond_the_last_parameter, r"\['residual'\]: expected zeros between the parameters"),
    ("int8", "more", np.zeros(1), r": expected the entries \['residual'\], got 'more' too"),
    ("topk:0.1", "steps", None, r"\['steps'\]: expected int64 \(any, 2\), got nothing"),
    ("topk:0.1", "steps", np.zeros(2, np.int64), r"\['steps'\]: expected int64 \(any, 2\), got int64 \(2,\)"),
    ("topk:0.1", "steps", np.array([[0, -1]]), r"\['steps'\]: expected numbers from 0 up, got -1"),
    ("topk:0.1", "steps", np.array([[3, 1]]), r"\['steps'\]: expected the starts of different buckets"),
    ("topk:0.1", "steps", np.array([[0, 1], [0, 1]]), r"\['steps'\]: expected the starts of different buckets"),
    ("powersgd:1", "factor/w1", lambda array: array.T.copy(), r"\['factor/w1'\]: expected float32 \(\d+, 1\), got"),
    ("powersgd:1", "factor/w1", with_nan, r"\['factor/w1'\]: expected finite numbers, got others"),
    ("powersgd:1", "factor/w9", np.zeros((1, 1)), r": expected the entries .*, got 'factor/w9' too"),
]


@pytest.mark.parametrize(("scheme", "entry", "value", "told"), SPOILT)
def test_a_state_that_nobody_wrote_is_refused_and_changes_nothing(scheme, entry, value, told):
    with Communicator(transport="solo") as comm:
        model, sync = small_model(), Synchronizer(comm, compression=scheme)
        set_gradients(model, 0, 200)
        sync.sync_gradients(model)
        before = {name: array.copy() for name, array in sync.state_dict(model).items()}
        with pytest.raises(ArgumentError, match="^state_dict" + told):
            sync.load_state_dict(model, spoilt(before, entry, value))
        after = sync.state_dict(model)
        assert after.keys() == before.keys()
        assert all(after[name].tobytes() == array.tobytes() for name, array in before.items())


def test_a_checkpoint_whose_residuals_nobody_wrote_is_refused_on_every_rank(comm, tmp_path):
    path = comm.broadcast_object(str(tmp_path / "run.npz"))
    first = make_trainer(comm, 60 * comm.size, compression="int8")
    train(first, 3)
    save_snapshot(CheckpointSeries(comm, path), first, {})
    last = comm.size - 1
    if comm.rank == 0:
        held = checkpoint.load(path)
        held.arrays[f"sync/{last}/residual"] = held.arrays[f"sync/{last}/residual"][:-4]
        checkpoint.save(path, held)
    comm.barrier()
    resumed = make_trainer(comm, 60 * comm.size, compression="int8")
    before = resumed.model.state_dict()
    with pytest.raises(CheckpointError) as caught:
        restore_snapshot(path, resumed, {})
    assert f"checkpoint: sync/{last}: state_dict['residual']: expected uint8 (" in one_line(caught)
    after = resumed.model.state_dict()
    assert all(after[name].tobytes() == array.tobytes() for name, array in before.items())


def test_low_rank_factors_are_what_travels(comm):
    hook, out = parse_compression("powersgd:2"), np.zeros(SIZE, np.float32)
    comm.stats.reset()
    comm.run_as_all_reduce(lambda: hook(gradient_of(comm.rank, 0), comm, out, BUCKET), nbytes=LAYOUT.nbytes)
    assert comm.stats.total("all_reduce")["wire_bytes"] == 4 * (2 * (40 + 30) + 40)


def test_a_hook_of_ones_own(comm):
    seen = []

    def doubled(gradient, comm, out, bucket):
        seen.append([slot.name for slot in bucket.slots])
        comm.all_reduce(2 * gradient, "mean", out=out)

    plain, hooked = small_model(), small_model()
    for model, hook in ((plain, None), (hooked, doubled)):
        sync = Synchronizer(comm)
        sync.register_comm_hook(hook)
        set_gradients(model, comm.rank)
        sync.sync_gradients(model)
    assert seen == [["w2", "b1", "w1"]]
    for one, two in zip(plain.parameters.values(), hooked.parameters.values(), strict=True):
        assert (2 * one.grad).tobytes() == two.grad.tobytes()


def test_what_a_hook_begins_in_the_background_is_waited_for_and_counted(comm):
    returned = {
        "nothing": lambda handle, out: None,
        "the handle": lambda handle, out: handle,
        "out": lambda _, out: out,
    }
    for what, choose in returned.items():
        plain, hooked = small_model(), small_model()
        sync = Synchronizer(comm, use_bucketing=False)
        set_gradients(plain, comm.rank)
        sync.sync_gradients(plain)
        sync.register_comm_hook(
            lambda gradient, comm, out, bucket, choose=choose: choose(
                comm.all_reduce_async(gradient, "mean", out=out), out
            )
        )
        comm.stats.reset()
        set_gradients(hooked, comm.rank)
        sync.sync_gradients(hooked)
        assert hooked.gradient_bits() == plain.gradient_bits(), what
        total = comm.stats.total("all_reduce", "gradients")
        assert (total["calls"], total["wire_bytes"]) == (3, total["bytes"])


def test_a_hook_that_returns_the_mean_is_told_where_it_belongs(comm):
    model, sync = small_model(), Synchronizer(comm)
    sync.register_comm_hook(lambda gradient, comm, out, bucket: gradient / comm.size)
    set_gradients(model, comm.rank)
    with pytest.raises(ArgumentError) as caught:
        sync.sync_gradients(model)
    assert "expected it to put the mean into `out` and to return None, got ndarray" in one_line(caught)


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


# --- the formats ---


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


# --- what is refused ---


@pytest.mark.parametrize("text", ["gzip", "", "topk", "topk:0", "topk:2", "powersgd:0", "powersgd:x", "fp16:2", None])
def test_unknown_schemes_are_refused(text):
    with Communicator(transport="solo") as comm, pytest.raises(ArgumentError) as caught:
        Synchronizer(comm, compression=text)
    assert one_line(caught).startswith("compression: expected none, fp16, bf16, int8, topk:SHARE")


def test_a_hook_has_to_be_callable():
    with Communicator(transport="solo") as comm, pytest.raises(ArgumentError) as caught:
        Synchronizer(comm).register_comm_hook("fp16")
    assert "got str" in one_line(caught)


def test_a_sharded_update_does_not_compress():
    with Communicator(transport="solo") as comm, pytest.raises(ArgumentError) as caught:
        DistributedOptimizer(SGD(Linear(3, 2), 0.1), Synchronizer(comm, compression="fp16"))
    assert "expected one without compression" in one_line(caught)


@pytest.mark.mpi(min_size=2)
def test_ranks_with_other_schemes_learn_of_it(several):
    model = small_model()
    sync = Synchronizer(several, compression="int8" if several.rank else "fp16")
    with pytest.raises(MismatchError) as caught:
        sync.sync_gradients(model)
    assert "bucket plan: expected the same on every rank, but entry 1 is 'compression fp16' on rank 0" in one_line(
        caught
    )
