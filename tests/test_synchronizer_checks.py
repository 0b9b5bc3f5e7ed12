"""What the Synchronizer finds out: models, plans and replicas that differ, and gradients that are no numbers."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Synchronizer
from clcomm.base.errors import ArgumentError, ClcommError, MismatchError, NonFiniteError, name_ranks
from clcomm.engine import Linear, Sequential
from clcomm.engine.nn import Generator
from clcomm.optim import SGD
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from tests.helpers import one_line
from tests.numpy_models import Model, set_gradients, small_model


def others(comm) -> str:
    """Return how a message names all ranks but the last."""
    return name_ranks(range(comm.size - 1))


def same_error_everywhere(comm, kind, call) -> str:
    """Return the message of the error that `call` raises, which has to be the same on every rank."""
    with pytest.raises(kind) as caught:
        call()
    message = one_line(caught)
    assert comm.all_gather_object(message) == [message] * comm.size
    return message


def model_of(comm, common: dict, on_last: dict) -> Model:
    """Return a model of zeros by {name: (shape, dtype)}; the last rank has another one."""
    chosen = on_last if comm.rank == comm.size - 1 else common
    return Model((name, np.zeros(shape, dtype)) for name, (shape, dtype) in chosen.items())


W, B = ((3, 4), "float32"), ((4,), "float32")


@pytest.mark.parametrize(
    ("on_last", "index", "ours", "theirs"),
    [
        ({"w": W, "c": B}, 1, "b (4,) float32", "c (4,) float32"),
        ({"w": ((4, 3), "float32"), "b": B}, 0, "w (3, 4) float32", "w (4, 3) float32"),
        ({"w": W, "b": ((4,), "float64")}, 1, "b (4,) float32", "b (4,) float64"),
        ({"b": B, "w": W}, 0, "w (3, 4) float32", "b (4,) float32"),
        ({"w": W}, 1, "b (4,) float32", "nothing"),
        ({"w": W, "b": B, "extra": B}, 2, "nothing", "extra (4,) float32"),
        ({}, 0, "w (3, 4) float32", "model: expected at least one parameter, got none from named_parameters()"),
    ],
    ids=["name", "shape", "dtype", "order", "fewer", "more", "none"],
)
@pytest.mark.parametrize("method", ["broadcast_parameters", "sync_gradients", "check_replicas"])
def test_models_that_differ(several, on_last, index, ours, theirs, method):
    model = model_of(several, {"w": W, "b": B}, on_last)
    message = same_error_everywhere(several, MismatchError, lambda: getattr(Synchronizer(several), method)(model))
    assert message == (
        f"parameters: expected the same on every rank, but entry {index} is {ours!r} on {others(several)}, "
        f"{theirs!r} on rank {several.size - 1}; build the same model on every rank"
    )
    assert several.stats.total("all_reduce")["calls"] == several.stats.total("broadcast")["calls"] == 0


@pytest.mark.parametrize(
    ("name", "common", "on_last"),
    [("overlap", False, True), ("overlap", "auto", False), ("check_finite", False, True),
     ("check_replicas_every", 0, 5), ("check_start", True, False), ("on_divergence", "raise", "rebroadcast")],
)  # fmt: skip
def test_settings_that_differ(several, name, common, on_last):
    sync = Synchronizer(several, **{name: on_last if several.rank == several.size - 1 else common})
    message = same_error_everywhere(several, MismatchError, lambda: sync.sync_gradients(small_model()))
    assert message.startswith("Synchronizer: expected the same on every rank, but entry ")
    assert f"'{name} {common}' on {others(several)}, '{name} {on_last}' on rank {several.size - 1};" in message


def test_a_model_that_all_ranks_refuse_is_their_own_error(several):
    message = same_error_everywhere(several, ArgumentError, lambda: Synchronizer(several).sync_gradients(Model([])))
    assert message == "model: expected at least one parameter, got none from named_parameters()"


def test_bucket_sizes_that_differ(several):
    model = small_model()
    sync = Synchronizer(several, bucket_size=200 if several.rank == several.size - 1 else 100)
    message = same_error_everywhere(several, MismatchError, lambda: sync.sync_gradients(model))
    assert message == (
        f"bucket plan: expected the same on every rank, but entry 0 is 'bucket_size 100' on {others(several)}, "
        f"'bucket_size 200' on rank {several.size - 1}; give every rank the same settings"
    )


def test_bucketing_on_some_ranks_only(several):
    model, last = small_model(), several.rank == several.size - 1
    message = same_error_everywhere(
        several, MismatchError, lambda: Synchronizer(several, not last).sync_gradients(model)
    )
    assert f"'bucket_size 1048576' on {others(several)}, 'per tensor' on rank {several.size - 1}" in message


def test_untrained_state_that_differs(several):
    last = several.rank == several.size - 1
    model = Model([("w", np.zeros(2))], {"mean": np.zeros(3 if last else 2)})
    message = same_error_everywhere(several, MismatchError, lambda: Synchronizer(several).broadcast_parameters(model))
    assert message == (
        f"buffers and frozen parameters: expected the same on every rank, but entry 0 is 'mean (2,) float64' on "
        f"{others(several)}, 'mean (3,) float64' on rank {several.size - 1}; build the same model on every rank"
    )


# --- replicas that drift apart ---


def test_one_flipped_bit_is_found_and_named(several):
    model, sync = small_model(several.rank), Synchronizer(several)
    sync.broadcast_parameters(model)
    sync.check_replicas(model)
    flipped = min(1, several.size - 1)
    if several.rank == flipped:
        model["b1"].data.view(np.uint32)[3] ^= 1
    message = same_error_everywhere(several, MismatchError, lambda: sync.check_replicas(model))
    rest = name_ranks([rank for rank in range(several.size) if rank != flipped])
    sides = f"on rank {flipped} differs from {rest}" if several.size > 2 else "differs between ranks 0 and 1"
    assert message == (
        f"replicas: expected the same parameters on every rank, but 'b1' {sides}; "
        "broadcast the parameters again and look for the cause"
    )
    sync.broadcast_parameters(model)
    sync.check_replicas(model)


@pytest.mark.parametrize("every", [1, 3])
def test_replicas_are_compared_every_so_many_steps(several, every):
    model, sync = small_model(), Synchronizer(several, check_replicas_every=every)
    for _ in range(every):
        sync.sync_gradients(model)
    if several.rank == 0:
        model["w2"].data[0, 0] += 1
    for _ in range(every - 1):
        sync.sync_gradients(model)
    message = same_error_everywhere(several, MismatchError, lambda: sync.sync_gradients(model))
    assert "but 'w2' " in message


def test_replicas_are_not_compared_again_unless_asked(several):
    model, sync = small_model(), Synchronizer(several)
    for step in range(5):
        sync.sync_gradients(model)
        model["w1"].data[0, 0] += several.rank
        assert sync.guard.checks == 1, step


# --- replicas that differ from the start ---


START = "call broadcast_parameters(model) before the first step"


@pytest.mark.parametrize("kind", ["numpy", "native", "torch"])
@pytest.mark.parametrize("zero", [None, 1])
def test_a_forgotten_broadcast_is_an_error_in_the_first_step(several, device, kind, zero):
    if zero and kind != "native":
        pytest.skip("a sharded update is for the engine's models")
    model, sync = _seeded(kind, several.rank, device), Synchronizer(several)
    if zero:
        DistributedOptimizer(SGD(model, lr=0.1), sync)
    message = same_error_everywhere(several, MismatchError, lambda: sync.sync_gradients(model))
    assert message.startswith("replicas: expected the same parameters on every rank, but ")
    assert message.endswith(f"; {START}")
    sync.broadcast_parameters(model)
    for _ in range(2):
        sync.sync_gradients(model)


def _seeded(kind, rank, device):
    if kind == "numpy":
        return small_model(rank)
    if kind == "native":
        return Linear(3, 2, device=device, rng=Generator(rank))
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    with torch.random.fork_rng():
        torch.manual_seed(rank)
        return torch.nn.Linear(3, 2)


def test_parameters_that_one_rank_changes_after_the_broadcast_are_found(several):
    model, sync = small_model(several.rank), Synchronizer(several)
    sync.broadcast_parameters(model)
    if several.rank == 0:
        model["b1"].data[0] += 1
    message = same_error_everywhere(several, MismatchError, lambda: sync.sync_gradients(model))
    assert "but 'b1' " in message and message.endswith(START)


def test_frozen_parameters_that_differ_are_named(several, device):
    model, sync = Sequential(*(Linear(3, 3, device=device, rng=Generator(1)) for _ in range(2))), Synchronizer(several)
    for parameter in model[0].parameters():
        parameter.requires_grad = False
    if several.rank == 0:
        model[0].weight.copy_from(np.zeros(model[0].weight.shape))
    message = same_error_everywhere(several, MismatchError, lambda: sync.sync_gradients(model))
    assert "but '0.weight' " in message and message.endswith(START)


def test_buffers_may_differ_and_so_may_parameters_that_are_to(several):
    model, sync = Model([("w", np.zeros(2))], {"mean": np.full(2, float(several.rank))}), Synchronizer(several)
    sync.sync_gradients(model)
    other = small_model(several.rank)
    Synchronizer(several, check_start=False).sync_gradients(other)
    assert other.bits() == small_model(several.rank).bits()


def test_replicas_that_start_apart_are_made_alike_where_that_is_asked(several):
    model, sync = small_model(several.rank), Synchronizer(several, on_divergence="rebroadcast")
    sync.sync_gradients(model)
    assert model.bits() == small_model(0).bits()


def test_a_sound_run_is_not_disturbed(comm):
    model, sync = small_model(comm.rank), Synchronizer(comm, check_replicas_every=2, check_finite=True)
    sync.broadcast_parameters(model)
    for step in range(6):
        set_gradients(model, comm.rank, step)
        sync.sync_gradients(model)
        for parameter in model.parameters.values():
            parameter.data -= 0.1 * parameter.grad
    assert sync.get_communication_stats()["total_allreduce_calls"] == 6


# --- gradients that are no numbers ---


@pytest.mark.parametrize(("value", "found"), [(np.nan, "2 NaN and 0 Inf"), (-np.inf, "0 NaN and 2 Inf")])
@pytest.mark.parametrize("options", [{}, {"use_bucketing": False}])
def test_a_gradient_that_is_not_finite_is_named_with_its_rank(comm, value, found, options):
    model, sync = small_model(), Synchronizer(comm, check_finite=True, **options)
    set_gradients(model, comm.rank)
    culprit = comm.size - 1
    if comm.rank == culprit:
        model["b1"].grad[2:4] = value
    message = same_error_everywhere(comm, NonFiniteError, lambda: sync.sync_gradients(model))
    assert message == (
        f"gradient: expected finite numbers, but 'b1' has {found} on rank {culprit}; "
        "lower the learning rate or look at that rank's batch"
    )
    set_gradients(model, comm.rank)
    sync.sync_gradients(model)  # a caller may go on


@pytest.mark.parametrize("scheme", ["fp16", "bf16", "int8", "topk:0.01", "powersgd:2"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_compression_hides_no_gradient_that_is_not_finite(several, scheme, value):
    model, sync = small_model(), Synchronizer(several, check_finite=True, compression=scheme)
    culprit = several.size - 1
    for step in range(2):  # the first leaves residuals behind
        set_gradients(model, several.rank)
        if step and several.rank == culprit:
            model["b1"].grad[2] = value
        if not step:
            sync.sync_gradients(model)
    message = same_error_everywhere(several, NonFiniteError, lambda: sync.sync_gradients(model))
    assert f"but 'b1' has {'1 NaN and 0 Inf' if np.isnan(value) else '0 NaN and 1 Inf'} on rank {culprit};" in message


def test_a_sum_that_overflows_names_its_parameter(several):
    model, sync = small_model(), Synchronizer(several, check_finite=True)
    set_gradients(model, 0)
    model["w1"].grad[0, 0] = 3e38
    message = same_error_everywhere(several, NonFiniteError, lambda: sync.sync_gradients(model))
    assert message == (
        "gradient: expected finite numbers, but 'w1' overflows when the ranks' finite gradients are compressed or "
        "added; lower the learning rate or look at that rank's batch"
    )


def test_without_the_check_what_is_no_number_passes(comm):
    model, sync = small_model(), Synchronizer(comm)
    set_gradients(model, 0)
    if comm.rank == 0:
        model["w1"].grad[0, 0] = np.nan
    sync.sync_gradients(model)
    assert np.isnan(model["w1"].grad[0, 0])


def test_a_gradient_of_another_shape_is_refused(comm):
    model, sync = small_model(), Synchronizer(comm)
    model["w1"].grad = np.zeros((7, 5), np.float32)
    with pytest.raises(ClcommError) as caught:
        sync.sync_gradients(model)
    assert one_line(caught) == "gradient of 'w1': expected shape (5, 7), got (7, 5)"
