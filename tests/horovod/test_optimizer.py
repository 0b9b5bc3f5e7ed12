"""DistributedOptimizer against one process that computes all ranks' gradients: the same bits, whatever is set."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from clcomm.base.errors import ArgumentError  # noqa: E402
from tests.helpers import one_line  # noqa: E402
from tests.horovod.training import OPTIMIZERS, STEPS, batch_of, bits_of, gradients_of, net, reference  # noqa: E402
from tests.horovod.values import folded, same_bits  # noqa: E402
from tests.sync.adaptive_sum import adaptive_sum  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=1)


@pytest.mark.sampled(10)
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


@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_a_rank_outside_of_the_process_set_steps_by_itself(hvd, op):
    members = hvd.add_process_set(range(hvd.size() - 1)) if hvd.size() > 1 else hvd.global_process_set
    model, twin = net(), net()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model.parameters()), op=getattr(hvd, op), process_set=members
    )
    alone = OPTIMIZERS["momentum"](twin.parameters())
    for step in range(STEPS):
        for each, own in ((optimizer, model), (alone, twin)):
            each.zero_grad()
            own(batch_of(hvd.rank(), step)).square().sum().backward()
            each.step()
    everyone = hvd.allgather(bits_of(model)[None])
    assert all(same_bits(row, everyone[0]) for row in everyone[: members.size()])
    if not members.included() or members.size() == 1:
        assert same_bits(bits_of(model), bits_of(twin))


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
                rows = [move[index].reshape(-1).numpy() for move in moves]
                each.add_(torch.from_numpy(adaptive_sum(rows)).to(each.dtype).reshape(each.shape))
    assert torch.allclose(bits_of(model), bits_of(twin), rtol=1e-6, atol=1e-8)
    everyone = hvd.allgather(bits_of(model)[None])
    assert all(same_bits(row, everyone[0]) for row in everyone)


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


def calls_for_join(hvd):
    rows = hvd.communicator().stats.as_dict()["operations"]
    return sum(row["calls"] for row in rows if row["label"] == "join")


def test_an_optimizer_made_anew_takes_the_older_ones_place(hvd):
    """Schedulers keep the older one alive: it must neither raise in backward nor count as a second one."""
    gc.collect()  # other tests' optimizers
    model = net()
    older = hvd.DistributedOptimizer(OPTIMIZERS["adam"](model.parameters()))
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()))
    made = calls_for_join(hvd)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch_of(hvd.rank(), step)).square().sum().backward()
        optimizer.step()
    assert same_bits(bits_of(model), bits_of(reference("sgd", hvd.size(), torch.float32, "Average", 1, False)))
    assert calls_for_join(hvd) == made  # no step was announced
    if hvd.size() > 1:
        with pytest.raises(ArgumentError) as caught:
            older.step()
        assert "expected the DistributedOptimizer that these parameters got last" in one_line(caught)
    assert hvd.join() == hvd.size() - 1


def test_backward_passes_per_step_is_an_attribute(hvd):
    model = net()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), backward_passes_per_step=2)
    assert optimizer.backward_passes_per_step == 2
    optimizer.backward_passes_per_step = 3
    for _ in range(optimizer.backward_passes_per_step):
        model(batch_of(hvd.rank(), 0)).square().sum().backward()
    optimizer.step()
    optimizer.set_backward_passes_per_step(1)
    assert optimizer.backward_passes_per_step == 1
