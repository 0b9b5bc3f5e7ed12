"""DistributedOptimizer against one process that computes all ranks' gradients: the same bits, whatever is set."""

from __future__ import annotations

import copy
import warnings

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from clcomm.errors import ArgumentError, MismatchError  # noqa: E402
from clcomm.horovod.adasum import adasum  # noqa: E402
from tests.helpers import one_line  # noqa: E402
from tests.horovod.values import folded, same_bits, tensor_of  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=1)
STEPS = 3

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
    "groups": lambda parameters: (
        lambda all_: torch.optim.AdamW([{"params": all_[:2], "lr": 0.1}, {"params": all_[2:]}])
    )(list(parameters)),
}


def net(dtype=torch.float32, seed=1):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 30), torch.nn.Tanh(), torch.nn.Linear(30, 3)]
    return torch.nn.Sequential(*layers).to(dtype)


def batch_of(rank: int, step: int, dtype=torch.float32) -> torch.Tensor:
    return tensor_of(rank, (4, 6), torch.float64, step).to(dtype)


def gradients_of(model, rank: int, steps, dtype) -> list[torch.Tensor]:
    """Return what a rank's backwards of these steps add up to, a missing gradient being zero."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    for step in steps:
        twin(batch_of(rank, step, dtype)).square().sum().backward()
    return [torch.zeros_like(each) if each.grad is None else each.grad for each in twin.parameters()]


def summed(gradients: list[torch.Tensor], op: str, halves: bool) -> torch.Tensor:
    """Return the reduced gradient: narrow ones as float32, unless halves were asked for."""
    dtype = gradients[0].dtype
    wide = torch.float16 if halves else torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    return folded([each.to(wide) for each in gradients], op).to(dtype)


def bits_of(model) -> torch.Tensor:
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


def reference(kind, ranks, dtype, op, passes, halves):
    model = net(dtype)
    optimizer = OPTIMIZERS[kind](model.parameters())
    for step in range(STEPS):
        steps = range(step * passes, (step + 1) * passes)
        everyone = [gradients_of(model, rank, steps, dtype) for rank in range(ranks)]
        for parameter, own in zip(model.parameters(), zip(*everyone, strict=True), strict=True):
            parameter.grad = own[0] if ranks == 1 else summed(list(own), op, halves)
        optimizer.step()
    return model


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("op", ["Average", "Sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_steps_are_those_of_one_process_with_all_gradients(hvd, kind, op, dtype):
    for number, bucket_size in enumerate((64, 4096, 1 << 20)):
        passes, halves, set_to_none = 1 + number, number == 1, bool(number % 2)
        hvd.communicator().bucket_size = bucket_size
        model = net(dtype)
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS[kind](model.parameters()),
            named_parameters=model.named_parameters() if number else None,
            compression=hvd.Compression.fp16 if halves else hvd.Compression.none,
            backward_passes_per_step=passes,
            op=getattr(hvd, op),
        )
        assert isinstance(optimizer, type(OPTIMIZERS[kind](net().parameters())))
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=set_to_none)
            for each in range(step * passes, (step + 1) * passes):
                model(batch_of(hvd.rank(), each, dtype)).square().sum().backward()
            optimizer.step()
        expected = reference(kind, hvd.size(), dtype, op, passes, halves)
        assert same_bits(bits_of(model), bits_of(expected)), (bucket_size, passes)


@pytest.mark.parametrize("ways", ["synchronize", "closure", "twice"])
def test_gradients_can_be_looked_at_between_reduction_and_step(hvd, ways):
    model, expected = net(), reference("momentum", hvd.size(), torch.float32, "Average", 1, False)
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](model.parameters()))
    for step in range(STEPS):

        def loss():
            optimizer.zero_grad()
            value = model(batch_of(hvd.rank(), step)).square().sum()  # noqa: B023
            value.backward()
            return value

        if ways == "closure":
            optimizer.step(loss)
            continue
        loss()
        optimizer.synchronize()
        assert all(same_bits(each, other) for each, other in _gathered(hvd, model))
        if ways == "synchronize":
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            with pytest.warns(UserWarning, match="skip_synchronize"):
                optimizer.step()
    assert same_bits(bits_of(model), bits_of(expected))


def _gathered(hvd, model):
    for parameter in model.parameters():
        rows = hvd.allgather(parameter.grad[None])
        yield from ((row, rows[0]) for row in rows)


class Branches(torch.nn.Module):
    """A model of which each rank uses another part."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.ways = torch.nn.ModuleList(torch.nn.Linear(8, 2) for _ in range(5))
        self.unused = torch.nn.Parameter(torch.ones(3))

    def forward(self, values):
        return self.ways[int(values[0, 0] * 0)](self.first(values))


@pytest.mark.parametrize("bucket_size", [32, 1 << 20])
def test_ranks_may_leave_out_different_parameters_and_call_other_operations_meanwhile(hvd, bucket_size):
    hvd.communicator().bucket_size = bucket_size
    torch.manual_seed(0)
    model = Branches()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    for step in range(4):
        optimizer.zero_grad()
        way = (hvd.rank() + step) % 5
        model.ways[way](model.first(batch_of(hvd.rank(), step))).sum().backward()
        assert hvd.allreduce(torch.tensor(1.0), op=hvd.Sum).item() == hvd.size()  # some buckets have begun
        optimizer.step()
    everyone = hvd.allgather(bits_of(model)[None])
    assert all(same_bits(row, everyone[0]) for row in everyone)
    if hvd.size() > 1:
        assert model.unused.grad is not None and not model.unused.grad.any()


def test_what_is_frozen_stays_and_what_is_unfrozen_later_is_reduced(hvd):
    model = net()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    for step in range(4):
        if step == 2:
            assert same_bits(model[0].weight, before)
            model[0].requires_grad_(True)
        optimizer.zero_grad()
        model(batch_of(hvd.rank(), step)).square().sum().backward()
        optimizer.step()
    assert not torch.equal(model[0].weight, before)
    everyone = hvd.allgather(bits_of(model)[None])
    assert all(same_bits(row, everyone[0]) for row in everyone)


@pytest.mark.parametrize("factor", [0.5, 4.0])
def test_predividing_by_a_power_of_two_changes_no_bit(hvd, factor):
    model = net()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), gradient_predivide_factor=factor)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch_of(hvd.rank(), step)).square().sum().backward()
        optimizer.step()
    assert same_bits(bits_of(model), bits_of(reference("sgd", hvd.size(), torch.float32, "Average", 1, False)))


@pytest.mark.parametrize("kind", ["sparse adam", "sgd"])
def test_sparse_gradients_stay_sparse(hvd, kind):
    def steps(gradient_of):
        torch.manual_seed(0)
        table = torch.nn.Embedding(9, 4, sparse=True)
        make = torch.optim.SparseAdam if kind == "sparse adam" else lambda given: torch.optim.SGD(given, 0.1)
        return table, make(list(table.parameters())), gradient_of

    def loss(table, rank, step):
        return table(torch.tensor([rank % 9, (rank + step) % 9, 3])).square().sum()

    table, optimizer, _ = steps(None)
    optimizer = hvd.DistributedOptimizer(optimizer, sparse_as_dense=True)
    twin, other, _ = steps(None)
    for step in range(3):
        optimizer.zero_grad()
        loss(table, hvd.rank(), step).backward()
        optimizer.step()
        assert table.weight.grad.is_sparse
        everyone = []
        for rank in range(hvd.size()):
            twin.zero_grad()
            loss(twin, rank, step).backward()
            everyone.append(twin.weight.grad.to_dense())
        mean = everyone[0] if hvd.size() == 1 else folded(everyone, "Average")
        twin.weight.grad = mean.to_sparse(1)
        other.step()
    assert torch.allclose(table.weight, twin.weight, rtol=1e-6)


class Signs:
    """A program's own compressor: 8 bits of sign."""

    @staticmethod
    def compress(tensor):
        return torch.sign(tensor).to(torch.int8), tensor.dtype

    @staticmethod
    def decompress(tensor, context):
        return tensor.to(context)


def test_a_programs_own_compressor_is_used(hvd):
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), compression=Signs, op=hvd.Sum)
    own = gradients_of(model, hvd.rank(), [0], torch.float32)
    everyone = [gradients_of(model, rank, [0], torch.float32) for rank in range(hvd.size())]
    model(batch_of(hvd.rank(), 0)).square().sum().backward()
    optimizer.synchronize()
    for index, parameter in enumerate(model.parameters()):
        votes = folded([torch.sign(each[index]) for each in everyone], "Sum")
        assert torch.equal(parameter.grad, own[index] if hvd.size() == 1 else votes)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_adasum_adds_up_the_ranks_steps(hvd, kind):
    model, twin = net(), net()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()), op=hvd.Adasum)
    others = [OPTIMIZERS[kind](twin.parameters()) for _ in range(hvd.size())]
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch_of(hvd.rank(), step)).square().sum().backward()
        optimizer.step()
        starts = [each.detach().clone() for each in twin.parameters()]
        moves = []
        for rank, other in enumerate(others):
            for parameter, gradient in zip(
                twin.parameters(), gradients_of(twin, rank, [step], torch.float32), strict=True
            ):
                parameter.grad = gradient
            other.step()
            moves.append([(each.detach() - start) for each, start in zip(twin.parameters(), starts, strict=True)])
            with torch.no_grad():
                for each, start in zip(twin.parameters(), starts, strict=True):
                    each.copy_(start)
        with torch.no_grad():
            for index, each in enumerate(twin.parameters()):
                rows = [move[index].double().reshape(-1).numpy() for move in moves]
                each.add_(torch.from_numpy(adasum(rows)).to(each.dtype).reshape(each.shape))
    assert torch.allclose(bits_of(model), bits_of(twin), rtol=1e-6, atol=1e-8)
    everyone = hvd.allgather(bits_of(model)[None])
    assert all(same_bits(row, everyone[0]) for row in everyone)


@pytest.mark.parametrize("op", ["Average", "Sum"])
@pytest.mark.parametrize("order", ["rising", "falling", "none"])
def test_joined_ranks_count_as_zero_until_all_have_joined(hvd, op, order):
    ranks = hvd.size()
    batches = {"rising": list(range(1, ranks + 1)), "falling": list(range(ranks, 0, -1)), "none": [2] * ranks}[order]
    if order == "rising":
        batches[0] = 0  # a rank without any batch
    model, twin = net(), net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), op=getattr(hvd, op))
    other = torch.optim.SGD(twin.parameters(), 0.1)
    for _epoch in range(2):
        for step in range(batches[hvd.rank()]):
            optimizer.zero_grad()
            model(batch_of(hvd.rank(), step)).square().sum().backward()
            optimizer.step()
        last = hvd.join()
        assert last == max(rank for rank in range(ranks) if batches[rank] == max(batches))
        hvd.broadcast_parameters(model.state_dict(), last)
        for step in range(max(batches)):
            everyone = [gradients_of(twin, rank, [step], torch.float32) for rank in range(ranks)]
            for rank in range(ranks):
                if step >= batches[rank]:
                    everyone[rank] = [torch.zeros_like(each) for each in everyone[rank]]
            for parameter, own in zip(twin.parameters(), zip(*everyone, strict=True), strict=True):
                parameter.grad = own[0] if ranks == 1 else folded(list(own), op)
            other.step()
        assert same_bits(bits_of(model), bits_of(twin))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_another_operation_while_ranks_have_joined_is_an_error(hvd, op):
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), op=getattr(hvd, op))
    for step in range(2 if hvd.rank() else 1):
        optimizer.zero_grad()
        model(batch_of(hvd.rank(), step)).square().sum().backward()
        optimizer.step()
        if step:
            with pytest.raises(ArgumentError) as caught:
                hvd.allreduce(torch.ones(2))
            assert "while ranks have joined" in one_line(caught)
    assert hvd.join() == hvd.size() - 1
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


def test_a_state_and_a_schedule_made_before_are_kept(hvd):
    model = net()
    plain = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    model(batch_of(0, 0)).sum().backward()
    plain.step()
    schedule = torch.optim.lr_scheduler.StepLR(plain, 1, 0.1)
    optimizer = hvd.DistributedOptimizer(plain)
    assert optimizer.state_dict()["state"][0]["momentum_buffer"].any()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch sees no step of the optimizer that was wrapped
        optimizer.zero_grad()
        model(batch_of(hvd.rank(), 1)).sum().backward()
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    own = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    optimizer.zero_grad()
    model(batch_of(hvd.rank(), 1)).sum().backward()
    optimizer.step()
    own.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_wrapping_anew_leaves_nothing_of_the_old_one(hvd):
    model = net()
    for _ in range(3):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
        for step in range(2):
            optimizer.zero_grad()
            model(batch_of(hvd.rank(), step)).square().sum().backward()
            optimizer.step()
        del optimizer
    everyone = hvd.allgather(bits_of(model)[None])
    assert all(same_bits(row, everyone[0]) for row in everyone)


def test_gradients_count_in_the_programs_stats(hvd):
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    for step in range(3):
        optimizer.zero_grad()
        model(batch_of(hvd.rank(), step)).square().sum().backward()
        optimizer.step()
    total = hvd.communicator().stats.total("all_reduce", "gradients")
    nbytes = sum(each.numel() * 4 for each in model.parameters())
    if hvd.size() > 1:
        assert total["calls"] == 3 and 3 * nbytes <= total["bytes"] <= 3 * (nbytes + 4)
        assert total["pack_s"] > 0 and total["unpack_s"] > 0
    else:
        assert total["calls"] == 0


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
        "groups": (lambda model: wrapped(model, num_groups=-1), "num_groups: expected", False),
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
@pytest.mark.parametrize("kind", ["shape", "number", "op"])
def test_ranks_with_other_models_all_get_the_same_error(hvd, kind):
    is_odd = hvd.rank() == hvd.size() - 1
    model = torch.nn.Linear(4, 3 if is_odd and kind == "shape" else 2, bias=not (is_odd and kind == "number"))
    with pytest.raises(MismatchError) as caught:
        op = hvd.Sum if is_odd and kind == "op" else hvd.Average
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), op=op)
    assert len(set(hvd.allgather_object(one_line(caught)))) == 1


@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 4), (3, 2, 4, 4)])
@pytest.mark.parametrize("affine", [True, False])
def test_synchronised_batch_norm_is_that_of_the_whole_batch(hvd, shape, affine):
    whole = [tensor_of(rank, (shape[0] + rank, *shape[1:]), torch.float64) for rank in range(hvd.size())]
    ours = hvd.SyncBatchNorm(shape[1], affine=affine).double()
    kind = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d}[len(shape)]
    theirs = kind(shape[1], affine=affine).double()
    for _ in range(2):
        own = whole[hvd.rank()].clone().requires_grad_()
        everyone = torch.cat(whole).requires_grad_()
        found, expected = ours(own), theirs(everyone)
        found.pow(3).sum().backward()
        expected.pow(3).sum().backward()
    first = sum(shape[0] + rank for rank in range(hvd.rank()))
    rows = slice(first, first + shape[0] + hvd.rank())
    torch.testing.assert_close(found, expected[rows])
    torch.testing.assert_close(own.grad, everyone.grad[rows])
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    ours.eval(), theirs.eval()
    torch.testing.assert_close(ours(own), theirs(own))
