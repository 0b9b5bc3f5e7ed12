"""DistributedOptimizer used in ways that cannot give the right gradients: one line, on every rank that can tell."""

from __future__ import annotations

import gc
import random

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from clcomm.base.errors import ArgumentError, MismatchError, name_ranks  # noqa: E402
from tests.helpers import one_line  # noqa: E402
from tests.horovod.training import batch_of, bits_of, gradients_of, net  # noqa: E402
from tests.horovod.values import folded  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=1)


def misuses(hvd):
    def wrapped(model, **options):
        return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), **options)

    def twice(model):
        optimizer = wrapped(model)
        for _ in range(2):
            model(batch_of(0, 0)).sum().backward()
        return optimizer

    def race(model):
        optimizer = wrapped(model)
        model(batch_of(0, 0)).sum().backward()
        optimizer.zero_grad()

    def adasum_skip(model):
        with wrapped(model, op=hvd.Adasum).skip_synchronize():
            pass

    return {
        "two backwards": (twice, "increase backward_passes_per_step", True),
        "zero_grad in flight": (race, "expected step() or synchronize() after backward()", True),
        "skip with adasum": (adasum_skip, "expected another op than Adasum", False),
        "no optimizer": (lambda model: hvd.DistributedOptimizer(model), "expected a torch.optim.Optimizer", False),
        "op": (lambda model: wrapped(model, op=hvd.Max), "expected hvd.Average, hvd.Sum or hvd.Adasum", False),
        "passes": (lambda model: wrapped(model, backward_passes_per_step=0), "a number from 1 up, got 0", False),
        "predivide": (lambda model: wrapped(model, op=hvd.Sum, gradient_predivide_factor=2.0), "expected 1.0", False),
        "predivide by 0": (lambda model: wrapped(model, gradient_predivide_factor=0.0), "a number above 0", False),
        "compression": (lambda model: wrapped(model, compression="fp16"), "Compressor, got 'fp16'", False),
        "groups": (lambda model: wrapped(model, num_groups=-1), "num_groups: expected", False),
        "groups of text": (lambda model: wrapped(model, groups="2"), "groups: expected a number from 0 up or", False),
        "flat groups": (
            lambda model: wrapped(model, groups=list(model.parameters())), "groups[0]: expected a list", False,
        ),
        "grouped twice": (
            lambda model: wrapped(model, groups=[[model[0].bias], [model[2].bias, model[0].bias]]),
            "groups[1]: expected each parameter once, got one of shape [40] again", False,
        ),
        "no pairs": (lambda model: wrapped(model, named_parameters=[1]), "expected pairs", False),
        "one name": (
            lambda model: wrapped(model, named_parameters=[("a", each) for each in model.parameters()]),
            "expected different names, got 'a' twice", False,
        ),
        "nameless": (
            lambda model: wrapped(model, named_parameters=[("a", model[0].weight)]), "got 5 without a name", False,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("kind", sorted(misuses(None)))
def test_a_misuse_is_one_line(hvd, kind):
    call, said, several = misuses(hvd)[kind]
    if several and hvd.size() == 1:
        call(net())  # nothing is in flight
        return
    with pytest.raises(ArgumentError) as caught:
        call(net())
    assert said in one_line(caught)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["shape", "number", "op", "groups"])
def test_ranks_with_other_models_all_get_the_same_error(hvd, kind):
    is_odd = hvd.rank() == hvd.size() - 1
    model = torch.nn.Linear(4, 3 if is_odd and kind == "shape" else 2, bias=not (is_odd and kind == "number"))
    with pytest.raises(MismatchError) as caught:
        op = hvd.Sum if is_odd and kind == "op" else hvd.Average
        groups = 2 if is_odd and kind == "groups" else 1
        plain = torch.optim.SGD(model.parameters(), 0.1)
        hvd.DistributedOptimizer(plain, model.named_parameters(), op=op, groups=groups)
    assert len(set(hvd.allgather_object(one_line(caught)))) == 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["buckets", "groups", "adasum", "a compressor of the program's own"])
def test_a_forgotten_broadcast_of_parameters_is_an_error_in_the_first_step(hvd, kind):
    class Own(hvd.Compression.none):
        """The same bits by another class."""

    model, settings = net(seed=hvd.rank()), {
        "buckets": {}, "groups": {"groups": 2}, "adasum": {"op": hvd.Adasum},
        "a compressor of the program's own": {"compression": Own},
    }[kind]  # fmt: skip
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), **settings)

    def step():
        optimizer.zero_grad()
        model(batch_of(hvd.rank(), 0)).square().sum().backward()
        optimizer.step()

    before = bits_of(model)
    with pytest.raises(MismatchError) as caught:
        step()
    said = one_line(caught)
    assert said.startswith("replicas: expected the same parameters on every rank, but '0.weight' differs")
    assert said.endswith("; call hvd.broadcast_parameters(model.state_dict(), 0) before the first step")
    assert hvd.allgather_object(said) == [said] * hvd.size()
    assert torch.equal(bits_of(model), before)
    hvd.broadcast_parameters(model.state_dict(), 0)
    for _ in range(2):
        step()
    rows = hvd.allgather(bits_of(model)[None])
    assert all(torch.equal(row, rows[0]) for row in rows)


@pytest.mark.parametrize("op", ["Average", "Adasum"])
@pytest.mark.parametrize(("begin", "key", "value"), [(0, "lr", 0.2), (3, "betas", (0.9, 0.99)), (2, "lr", None)])
def test_settings_that_differ_are_an_error_on_every_rank_at_the_next_step(hvd, op, begin, key, value):
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters()), op=getattr(hvd, op))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    try:
        for step in range(8):
            optimizer.zero_grad()
            model(batch_of(hvd.rank(), step)).square().sum().backward()
            if step == begin and hvd.rank() and value is not None:
                optimizer.param_groups[0][key] = value
            optimizer.step()
            schedule.step()
    except MismatchError as error:
        assert value is not None and step == begin + 1
        assert "optimizer" in str(error) and "\n" not in str(error)
    else:
        assert value is None or hvd.size() == 1


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("op", ["Average", "Adasum"])
@pytest.mark.parametrize("loads", ["no rank", "rank 0", "the others", "all ranks"])
def test_ranks_of_which_some_have_loaded_a_state_step_alike_and_run_hooks_once(hvd, op, loads):
    model, steps = net(), []
    plain = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), op=getattr(hvd, op))
    if loads == "all ranks" or loads == ("the others" if hvd.rank() else "rank 0"):
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.register_step_post_hook(lambda *_: steps.append(optimizer.param_groups[0]["lr"]))
    for step in range(4):
        optimizer.zero_grad()
        model(batch_of(hvd.rank(), step)).square().sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
    assert steps == [0.1, 0.05, 0.025, 0.0125]
    rows = hvd.allgather(bits_of(model)[None])
    assert all(torch.equal(row, rows[0]) for row in rows)


def left_for(hvd):
    """What a rank may call that has left its loop while the others are in a step."""
    return {
        "a metric": lambda: hvd.allreduce(torch.ones(3)),
        "a barrier": lambda: hvd.barrier(),
        "an object": lambda: hvd.allgather_object(1),
        "parameters": lambda: hvd.broadcast_parameters(net().state_dict(), 0),
        "another optimizer": lambda: hvd.DistributedOptimizer(torch.optim.SGD(net().parameters(), 0.1)),
        "a process set": lambda: hvd.add_process_set([0]),
        "the end": lambda: hvd.shutdown(),
    }


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("kind", sorted(left_for(None)))
def test_a_rank_that_leaves_its_loop_is_named_on_every_rank_and_nothing_is_lost(hvd, kind, several):
    gc.collect()  # optimizers of earlier tests, which errors hold
    rng = random.Random(f"{kind} {several} {hvd.size()}")
    leaver, steps, groups = rng.randrange(hvd.size()), rng.randrange(3), rng.choice([0, 3])
    model, twin = net(), net()
    beside = hvd.DistributedOptimizer(torch.optim.SGD(net().parameters(), 0.1)) if several else None
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), op=hvd.Sum, groups=groups)
    other = torch.optim.SGD(twin.parameters(), 0.1)

    def step(number):
        optimizer.zero_grad()
        model(batch_of(hvd.rank(), number)).square().sum().backward()
        optimizer.step()

    for number in range(steps):
        step(number)
    with pytest.raises(MismatchError) as caught:
        left_for(hvd)[kind]() if hvd.rank() == leaver else step(steps)
    said = one_line(caught)
    others = [rank for rank in range(hvd.size()) if rank != leaver]
    where = "step() of a DistributedOptimizer" if beside is None else "all_gather 'step or join'"
    assert f"{name_ranks(others)} in {where}" in said and f"rank {leaver} in " in said
    assert set(hvd.allgather_object(said)) == {said}
    for number in range(steps + 1):
        if number == steps:
            step(number)  # now by all ranks
        everyone = [gradients_of(twin, rank, [number], torch.float32) for rank in range(hvd.size())]
        for parameter, own in zip(twin.parameters(), zip(*everyone, strict=True), strict=True):
            parameter.grad = folded(list(own), "Sum")
        other.step()
    assert torch.equal(bits_of(model), bits_of(twin))
