"""What does not fit is refused on all ranks, in one line with the numbers, and so are ranks that differ."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext

import numpy as np
import pytest

from clcomm import Communicator, DistributedDataParallel, Mesh, Synchronizer
from clcomm.base.errors import ArgumentError, MismatchError
from clcomm.engine import Linear, Module, Parameter, ReLU, Sequential
from clcomm.parallel.pipeline import Pipeline, measured_costs
from clcomm.parallel.pipeline.link import LinkPlan, Links
from tests.helpers import cpu_device, one_line
from tests.parallel.pipeline.cases import CASES, perceptron

pytestmark = pytest.mark.mpi(min_size=1)
LOSS = CASES["mlp"].loss


def refused(comm, error, make) -> str:
    """Return the message that every rank raises."""
    with pytest.raises(error) as caught:
        make()
    messages = comm.all_gather_object(one_line(caught))
    assert len({*messages}) == 1, messages
    return messages[0]


def with_its_own_forward() -> Sequential:
    """Return a model that SequenceParallel, say, has changed as a whole."""
    model = perceptron()
    model.forward = model.forward
    return model


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "2f2b"}, "schedule: expected one of gpipe, 1f1b, interleaved, got '2f2b'"),
        ({"micro_batches": 0}, "micro_batches: expected a whole number of at least 1, got 0"),
        ({"chunks": 3}, "chunks: expected 1 with schedule 1f1b, got 3"),
        ({"schedule": "interleaved", "chunks": 1}, "chunks: expected 2 or more stages a rank"),
        (
            {"schedule": "interleaved", "chunks": 30},
            "stages: expected at most one for each of 8 layers with parameters",
        ),
        ({"cut": "halves"}, "cut: expected 'layers', 'parameters' or the first layer of each stage, got 'halves'"),
        ({"cut": [1, 2]}, "cut: expected the first layer of each of"),
        ({"costs": [1.0, 2.0]}, "costs: expected one for each of 15 layers, got 2"),
        ({"costs": [1.0] * 15, "cut": [0]}, "costs: expected None with cut=[0], got 15 costs"),
        ({"costs": [-1.0] * 15}, "costs: expected numbers from 0 up"),
        ({"model": Linear(3, 3, device=cpu_device("cpu"))}, "model: expected a Sequential, or a Module with pipeline"),
        ({"model": Sequential()}, "pipeline_layers: expected modules, got none"),
        ({"model": with_its_own_forward()}, "model: expected layers that compute alone, got 'Sequential' around some"),
        ({"loss": None}, "loss: expected a function of a result and its target, got NoneType"),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks(auto, settings, message):
    settings = {"micro_batches": 2 * auto.size, "loss": LOSS, "model": perceptron(), **settings}
    assert message in refused(auto, ArgumentError, lambda: Pipeline(settings.pop("model"), auto, **settings))


@pytest.mark.mpi(min_size=3)
def test_interleaving_needs_whole_rounds_of_micro_batches(auto):
    wanted = {"micro_batches": auto.size + 1, "loss": LOSS, "schedule": "interleaved"}
    text = refused(auto, ArgumentError, lambda: Pipeline(perceptron(), auto, **wanted))
    assert text == (
        f"micro_batches: expected a multiple of {auto.size} ranks with schedule interleaved, got {auto.size + 1}"
    )


def test_more_stages_than_layers_are_refused(auto):
    model = Sequential(*(Linear(4, 4, device=cpu_device("cpu")) for _ in range(2 * auto.size - 1)), ReLU())
    wanted = {"micro_batches": auto.size, "loss": LOSS, "schedule": "interleaved"}
    text = refused(auto, ArgumentError, lambda: Pipeline(model, auto, **wanted))
    layers, stages = 2 * auto.size - 1, 2 * auto.size
    assert text == (
        f"stages: expected at most one for each of {layers} layers with parameters, got {stages} stages "
        f"({auto.size} ranks x 2 chunks)"
    )


def test_batches_that_cannot_be_cut_are_refused_and_later_ones_work(auto):
    case, count = CASES["mlp"], 3
    pipeline = Pipeline(case.make(), auto, loss=case.loss, micro_batches=count)
    x, y = case.batch_of(0, 4)
    text = refused(auto, ArgumentError, lambda: pipeline.step(x, y))
    assert text == "inputs: expected a batch that 3 micro-batches divide, got 4 samples"
    text = refused(auto, ArgumentError, lambda: pipeline.step(x[:3], y))
    assert text == "targets: expected 3, one for each input, got 4"
    assert "inputs: expected an array on rank 0, got None" in refused(
        auto, ArgumentError, lambda: pipeline.step(None, y[:3])
    )
    assert f"targets: expected an array on rank {auto.size - 1}, got None" in refused(
        auto, ArgumentError, lambda: pipeline.step(x[:3], None)
    )
    wrong = np.zeros((3, 7), np.float32)
    assert "linear" in refused(auto, ArgumentError, lambda: pipeline.step(wrong, y[:3]))
    assert np.isfinite(pipeline.step(x[:3], y[:3]))
    for bad in ("text", np.float32(1)):
        for inputs in (bad, bad if auto.rank == auto.size - 1 else x[:3]):  # on all ranks, and on one
            assert "inputs: expected an array or a Tensor of samples" in refused(
                auto, ArgumentError, lambda inputs=inputs: pipeline.step(inputs, y[:3])
            )
    assert np.isfinite(pipeline.step(x[:3], y[:3]))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("what", ["micro_batches", "schedule", "cut", "model", "error on one"])
def test_ranks_that_ask_for_different_pipelines_are_told(auto, what):
    is_odd, model, settings = auto.rank % 2 == 1, perceptron(), {"micro_batches": 12, "loss": LOSS}
    if is_odd and what == "model":
        model = Sequential(*[Linear(6, 6, device=cpu_device("cpu")) for _ in range(9)])
    elif is_odd:
        cut = [0, *range(15 - auto.size + 1, 15)]
        settings |= {"micro_batches": {"micro_batches": 24}, "schedule": {"schedule": "gpipe"},
                     "cut": {"cut": cut}, "error on one": {"cut": "?"}}[what]  # fmt: skip
    error = ArgumentError if what == "error on one" else MismatchError
    text = refused(auto, error, lambda: Pipeline(model, auto, **settings))
    assert "rank 1" in text or "ranks 1" in text


@pytest.mark.mpi(min_size=2)
def test_ranks_with_different_batches_are_told(auto):
    case = CASES["mlp"]
    pipeline = Pipeline(case.make(), auto, loss=case.loss, micro_batches=2)
    x, y = case.batch_of(0, 4 + 2 * auto.rank)
    assert "inputs: expected the same shape and dtype" in refused(auto, MismatchError, lambda: pipeline.step(x, y))

    def mixed():
        return pipeline.step(*case.batch_of(0, 4)) if auto.rank else pipeline(case.batch_of(0, 4)[0])

    assert "pipeline: expected the same call on every rank" in refused(auto, MismatchError, mixed)
    assert np.isfinite(pipeline.step(*case.batch_of(0, 4)))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("follows", ["ddp", "synchronizer"])
def test_overlap_without_its_wrapper_is_refused_on_all_ranks(auto, follows):
    """Also where it follows the parameters of one stage alone."""
    case, mesh = CASES["mlp"], Mesh(auto, dp=2 if auto.size % 2 == 0 else auto.size, pp=-1)
    ranks = mesh["pp"]

    def on(rank):  # a rank alone says nothing of others
        return f" (on {ranks.name_ranks([rank])})" if ranks.size > 1 else ""

    pipeline = Pipeline(case.make(), mesh, loss=case.loss, micro_batches=2)
    overlap = ranks.rank == ranks.size - 1
    ddp = DistributedDataParallel(pipeline.module, mesh["dp"], overlap_grad_reduce=overlap)
    sync = ddp.synchronizer
    if follows == "synchronizer":
        ddp, sync = None, Synchronizer(mesh["dp"], overlap=overlap)
    for step in range(4):  # overlap begins once the order of gradients is known
        with sync.no_sync() if ddp is None else nullcontext():
            pipeline.step(*case.batch_of(step, 4), ddp)
        sync.sync_gradients(pipeline.module)
    text = refused(ranks, ArgumentError, lambda: pipeline.step(*case.batch_of(0, 4)))
    expected = "ddp: expected the DistributedDataParallel whose overlap follows this pipeline's module, got None"
    assert text == expected + on(ranks.size - 1)
    other = DistributedDataParallel(perceptron(), mesh["dp"]) if ranks.rank == 0 else ddp
    if ddp is not None:
        text = refused(ranks, ArgumentError, lambda: pipeline.step(*case.batch_of(0, 4), other))
        assert text.endswith(f"of this pipeline's module, got one of another module{on(0)}")
        assert np.isfinite(pipeline.step(*case.batch_of(0, 4), ddp))
    mesh.close()


@pytest.mark.mpi(min_size=2)
def test_links_are_compared(auto):
    plans = [LinkPlan("x", 0, 0, 1, 2, (2,), "<f4"), LinkPlan("y", 0, 1, 0, 2, (2 + auto.rank,), "<f4")]
    text = refused(auto, MismatchError, lambda: Links(auto, cpu_device("cpu"), plans))
    assert "entry 1 is" in text and all(f"shape=({2 + rank},)" in text for rank in range(auto.size))


def test_a_mesh_without_stages_is_refused(auto):
    mesh = Mesh(auto, dp=-1)
    with pytest.raises(ArgumentError, match="comm: expected a Mesh with an axis pp, got the axes dp"):
        Pipeline(perceptron(), mesh, loss=LOSS, micro_batches=1)
    with pytest.raises(ArgumentError, match="comm: expected a Communicator or a Mesh, got NoneType"):
        Pipeline(perceptron(), None, loss=LOSS, micro_batches=1)


def test_pipelines_stay_in_their_process(auto):
    pipeline = Pipeline(perceptron(), auto, loss=LOSS, micro_batches=1)
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ArgumentError, match="Pipeline: expected to stay in its process"):
            duplicate(pipeline)


def test_layers_have_the_models_own_parameters(auto):
    class Odd(Module):
        def __init__(self):
            self.first = Linear(3, 3, device=cpu_device("cpu"))

        def pipeline_layers(self):
            stranger = Module()
            stranger.weight = Parameter(np.ones((2, 5), np.float32), cpu_device("cpu"))
            return [self.first, *[stranger] * auto.size]

    text = refused(
        auto, ArgumentError,
        lambda: Pipeline(Odd(), auto, loss=LOSS, micro_batches=1, cut=list(range(auto.size))),
    )  # fmt: skip
    assert text == "pipeline_layers: expected the model's own parameters and buffers, got another of shape (2, 5)"


def test_state_of_another_model_is_refused(auto):
    pipeline = Pipeline(perceptron(), auto, loss=LOSS, micro_batches=1)
    state = pipeline.state_dict()
    del state["0.weight"]
    with pytest.raises(ArgumentError, match=r"missing \['0.weight'\], unknown \['other'\]"):
        pipeline.load_state_dict(state | {"other": np.zeros(3)})
    for norm in (0, -1.0, float("nan"), True):
        with pytest.raises(ArgumentError, match="max_norm: expected a number above 0"):
            pipeline.clip_grad_norm(norm)


def test_measured_costs_cut_alike_on_every_rank():
    comm, device = Communicator(), cpu_device("cpu")
    sizes = [(4, 400), (400, 400), (400, 4), *[(4, 4)] * (comm.size + 1)]
    model = Sequential(*(Linear(*size, device=device) for size in sizes))
    costs = measured_costs(model, np.ones((64, 4), np.float32), comm)
    assert comm.all_gather_object(costs) == [costs] * comm.size
    assert len(costs) == len(sizes) and min(costs) > 0
    assert all(each.grad is None for each in model.parameters())
    pipeline = Pipeline(model, comm, loss=LOSS, micro_batches=2, costs=costs)
    by_parameters = Pipeline(model, comm, loss=LOSS, micro_batches=2, cut="parameters")
    for each in (pipeline, by_parameters):
        assert comm.all_gather_object(each.starts) == [each.starts] * comm.size
