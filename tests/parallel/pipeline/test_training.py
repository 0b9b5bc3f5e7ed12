"""Pipelines equal one rank on the same samples: every schedule, with and without data parallel, on any transport."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Communicator, DistributedDataParallel, Mesh
from clcomm.base.errors import ArgumentError, ClcommError
from clcomm.base.schedules.pipeline import INTERLEAVED, SCHEDULES
from clcomm.comm.transport import mpi_communicators
from clcomm.engine import CrossEntropyLoss, Dropout, Flatten, Generator, Linear, ReLU, Sequential
from clcomm.optim import SGD, Adam
from clcomm.parallel.pipeline import Pipeline
from tests.helpers import cpu_device
from tests.parallel.pipeline.cases import (
    CASES,
    Case,
    bits,
    features,
    require_close,
    resnet,
    tensor,
    trained_alone,
)
from tests.transport.references import pretended_host

pytestmark = pytest.mark.mpi(min_size=1)


def chunks_of(schedule: str, ranks: int) -> int:
    return 1 if schedule != INTERLEAVED else 2


def piped(case: Case, ranks, schedule: str, micro_batches: int, **settings) -> Pipeline:
    size = ranks["pp"].size if isinstance(ranks, Mesh) else ranks.size
    cut = case.cut(size * chunks_of(schedule, size))
    return Pipeline(
        case.make(), ranks, loss=case.loss, micro_batches=micro_batches, schedule=schedule, cut=cut, **settings
    )


def train(pipeline: Pipeline, case: Case, samples: int, steps: int, ddp=None, replica: int = 0) -> list[float]:
    optimizer, losses = SGD(pipeline.parameters(), 0.05, momentum=0.9), []
    for step in range(steps):
        losses.append(pipeline.step(*case.batch_of(step, samples, replica), ddp))
        if ddp is not None:
            ddp.finish_grad_sync()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.sampled(4)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("bucket_size", [1, 2000, "1MiB"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CASES)
def test_buckets_that_begin_in_the_last_backward_have_the_bits_of_others(auto, name, schedule, bucket_size):
    mesh, case, found = Mesh(auto, dp=2 if auto.size % 2 == 0 else auto.size, pp=-1), CASES[name], []
    micro_batches = 2 * mesh["pp"].size
    for overlap in (False, True):
        pipeline = piped(case, mesh, schedule, micro_batches)
        ddp = DistributedDataParallel(pipeline.module, mesh["dp"], bucket_size=bucket_size, overlap_grad_reduce=overlap)
        losses = train(pipeline, case, micro_batches, 6, ddp, mesh["dp"].rank)
        found.append((losses, bits(pipeline.state_dict())))
    assert found[0] == found[1]
    with pytest.raises(ArgumentError, match=r"ddp: expected .* of this pipeline.s module, got SGD"):
        pipeline.step(*case.batch_of(0, micro_batches), SGD(pipeline.module, 0.1))
    mesh.close()


@pytest.mark.sampled(4)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("layout", ["", "halves", "interleaved"])
@pytest.mark.parametrize("name", CASES)
def test_schedules_and_transports_give_the_same_bits(auto, monkeypatch, name, layout):
    """Micro-batches add up in one order; ranks pretend to be on several hosts, so that channels are of both kinds."""
    case, micro_batches = CASES[name], 3 * auto.size
    # A cut between layers that run as one kernel changes the order in which a convolution's bias gradient adds up.
    is_cut_between = name == "convnet" and case.cut(2 * auto.size) != "layers"
    found = []
    for schedule in SCHEDULES[:2] if is_cut_between else SCHEDULES:
        with monkeypatch.context() as patch:
            if layout:
                patch.setattr(mpi_communicators, "host_of", lambda comm: pretended_host(layout, comm))
            comm = Communicator(transport="auto" if layout else "mpi")
        pipeline = piped(case, comm, schedule, micro_batches)
        found.append((train(pipeline, case, micro_batches, 6), bits(pipeline.state_dict())))
        sent = [row for row in comm.stats.as_dict()["operations"] if row["operation"] == "send"]
        if not layout and comm.size > 1:
            stages = comm.size * pipeline.schedule.chunks
            own = range(comm.rank, stages, comm.size)
            forth = sum(stage < stages - 1 for stage in own) * micro_batches * 6
            back = sum(stage > 0 for stage in own) * micro_batches * 6
            assert {row["label"]: row["calls"] for row in sent} == {
                label: count for label, count in (("activations", forth), ("activation gradients", back)) if count
            }
        comm.finalize()
    shared = piped(case, auto, "1f1b", micro_batches)
    found.append((train(shared, case, micro_batches, 6), bits(shared.state_dict())))
    assert all(each == found[0] for each in found)


def test_batch_norm_sees_a_micro_batch_at_a_time(auto):
    case = Case(resnet, CASES["convnet"].batch, CASES["convnet"].loss, {})
    parts, samples = 2, 8
    pipeline = piped(case, auto, "1f1b", parts)
    train(pipeline, case, samples, 5)
    require_close(pipeline.state_dict(), trained_alone(case, samples, steps=5, parts=parts)[0])
    x, y = case.batch_of(99, samples)
    assert np.isfinite(pipeline.eval().evaluate(x, y))


def test_one_f_one_b_keeps_fewer_bytes_of_activations(auto):
    """Bytes are those that are there: by the schedule, of as many micro-batches as a rank keeps alive."""
    case, micro_batches, peaks = CASES["mlp"], 4 * auto.size, {}
    for schedule in ("gpipe", "1f1b"):
        pipeline = piped(case, auto, schedule, micro_batches)
        train(pipeline, case, 64 * micro_batches, 2)
        peaks[schedule] = pipeline.peak_activation_bytes
        alive = pipeline.schedule.most_alive(auto.rank)
        assert alive == (micro_batches if schedule == "gpipe" else auto.size - auto.rank)
    if auto.size == 1:
        assert peaks["1f1b"] < peaks["gpipe"]
        return
    # The last rank computes each micro-batch's loss too; a received activation may wait in its slot.
    assert peaks["1f1b"] < peaks["gpipe"] * (auto.size - auto.rank + 1) / micro_batches
    all_peaks = auto.all_gather_object(peaks)
    assert max(each["1f1b"] for each in all_peaks) < max(each["gpipe"] for each in all_peaks) / 2


def test_results_losses_and_state_are_those_of_the_model(comm):
    case = CASES["gpt"]
    pipeline, model = piped(case, comm, "1f1b", 2), case.make()
    for values in model.parameters():
        values.copy_from(values.numpy() + 0.1)
    state = model.state_dict()
    for tied in ("transformer.wte.weight", "lm_head.weight"):  # either name is enough
        pipeline.load_state_dict({name: values + 1 for name, values in state.items() if name != tied})
        assert not pipeline.state_dict().keys() ^ state.keys()
        np.testing.assert_array_equal(pipeline.state_dict()[tied], state[tied] + 1)
        pipeline.load_state_dict(state)
        assert bits(pipeline.state_dict()) == bits(state)

    for samples in (2, 6, 4, 8, 10, 2):  # channels of more shapes than are kept
        x, y = case.batch_of(0, samples)
        result = pipeline(x if comm.rank == 0 else None)
        loss = pipeline.evaluate(x, y if comm.rank == comm.size - 1 else None)
        expected = model(tensor(x))
        assert (result is not None) == (comm.rank == comm.size - 1)
        if result is not None:
            np.testing.assert_allclose(result.numpy(), expected.numpy(), rtol=1e-4, atol=1e-5)
        assert loss == pytest.approx(case.loss(expected, tensor(y)).item(), rel=1e-5)


@pytest.mark.parametrize("last", [Flatten, Dropout], ids=["flatten", "dropout"])
def test_results_of_a_stage_that_passes_its_input_on_last(comm, last):
    """Such results lie on slots, which later micro-batches use again."""
    device, rng = cpu_device("cpu"), Generator(1)
    layers = [Linear(6, 6, device=device, rng=rng) for _ in range(comm.size)]
    model = Sequential(*layers, last())
    model.eval()
    x = features(np.random.default_rng(0), 24)[0]
    expected = model(tensor(x)).numpy()
    pipeline = Pipeline(
        model, comm, loss=lambda y, _: y.sum(), micro_batches=12,
        cut=[0] if comm.size == 1 else [*range(comm.size - 1), comm.size],
    )  # fmt: skip
    result = pipeline(x)
    if result is not None:
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_a_step_after_one_that_failed_is_refused(auto):
    case, fails = CASES["mlp"], [True]

    def loss(y, target):
        if fails[0]:
            raise ValueError("planted")
        return case.loss(y, target)

    if auto.size > 1:
        pytest.skip("the other ranks would wait for the one that fails")
    pipeline = Pipeline(case.make(), auto, loss=loss, micro_batches=2)
    with pytest.raises(ValueError, match="planted"):
        pipeline.step(*case.batch_of(0, 4))
    fails[0] = False
    with pytest.raises(ClcommError, match="make another Pipeline"):
        pipeline.step(*case.batch_of(0, 4))


def test_tensors_are_batches_too(auto):
    case, micro_batches = CASES["mlp"], 2

    x, y = case.batch_of(0, 4)
    losses = [piped(case, auto, "gpipe", micro_batches).step(*batch) for batch in ((x, y), (tensor(x), tensor(y)))]
    assert losses[0] == losses[1]


def test_devices_with_memory_of_their_own_give_the_same_bits(auto):
    """A device that is treated as a GPU copies slots to its memory and back."""
    found = []
    for kind in ("cpu", "gpu"):
        device, rng = cpu_device(kind), Generator(5)
        layers = [each for _ in range(auto.size) for each in (Linear(6, 6, device=device, rng=rng), ReLU())]
        pipeline = Pipeline(Sequential(*layers), auto, loss=CrossEntropyLoss(), micro_batches=4)
        optimizer = Adam(pipeline.parameters(), 0.01)
        losses = []
        for step in range(5):
            x, y = features(np.random.default_rng(step), 8)
            losses.append(pipeline.step(x, y))
            optimizer.step()
            optimizer.zero_grad()
        found.append((losses, pipeline.state_dict()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    require_close(found[1][1], found[0][1])
