"""Where PyTorch's gradients lie, and that nobody can tell: what is kept, written or replaced has PyTorch's values."""

from __future__ import annotations

import gc

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from clcomm import Communicator, Synchronizer  # noqa: E402
from clcomm.base.errors import NonFiniteError  # noqa: E402
from clcomm.sync.adapters.torch_slots import _COUNTS  # noqa: E402
from tests.adapters.torch_loops import OPTIMIZERS, Net, batch, bits, mean_of, ours, wide  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=1)


def lying_in_grads(sync, model):
    """The names of parameters whose gradient lies in the memory that other ranks read."""
    grads = sync.models.of(model).space.arrays.grads
    first = grads.ctypes.data
    return {
        name
        for name, p in model.named_parameters()
        if p.grad is not None and first <= p.grad.data_ptr() < first + grads.nbytes
    }


@pytest.mark.skipif(not _COUNTS, reason="this PyTorch does not count references")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_gradients_that_last_lie_where_other_ranks_read_them(optimizer, overlap):
    comm, counted = Communicator(), []

    def check(step, sync, model):
        counted.append(lying_in_grads(sync, model))

    ours(comm, Net, optimizer, False, 1, False, check=check, settings={"overlap": overlap})
    every = {name for name, p in Net().named_parameters() if p.requires_grad and not name.startswith("unused")}
    assert counted[0] == set() and counted[-1] == every


def test_gradients_of_pytorchs_own_stay_so():
    def check(step, sync, model):
        assert not lying_in_grads(sync, model)

    ours(Communicator(), Net, "sgd", True, 2, False, check=check)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_what_one_rank_writes_to_its_gradients_stays_its_own(set_to_none):
    comm = Communicator()

    def check(step, sync, model):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(comm.rank)
        comm.barrier()
        for name, parameter in model.named_parameters():
            assert parameter.grad is None or (parameter.grad == comm.rank).all(), name
        comm.barrier()

    ours(comm, Net, "sgd", set_to_none, 1, False, check=check)


KEEPERS = {
    "tensor": lambda g: g,
    "view": lambda g: g.view(-1),
    "part": lambda g: g[:1],
    "detached": lambda g: g.detach(),
    "array": lambda g: g.detach().numpy(),
    "dlpack": lambda g: np.from_dlpack(g.detach()),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("keep", sorted(KEEPERS))
def test_a_gradient_that_is_kept_has_the_values_that_pytorch_gives_it(keep, when, overlap):
    """Kept from before it moved or after it, then dropped by zero_grad(): the next steps do not change it."""
    comm = Communicator()
    model, sync = Net(), Synchronizer(comm, overlap=overlap)
    sync.broadcast_parameters(model)
    kept = {}
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for step in range(7):
        model(batch(comm.rank, step, 0)).backward()
        sync.sync_gradients(model)
        if step == (0 if when == "before" else 3):
            kept = {name: KEEPERS[keep](p.grad) for name, p in parameters.items() if p.grad is not None}
        if step < 4:  # zero_grad(set_to_none=False) writes through what is kept, as in PyTorch
            dropped = {name: values.tolist() for name, values in kept.items()}
            for name, values in kept.items():
                assert values.tolist() == KEEPERS[keep](parameters[name].grad).tolist(), (name, step)
        for name, values in kept.items():
            assert values.tolist() == dropped[name], (name, step)
        model.zero_grad(set_to_none=step >= 3)
    del kept
    gc.collect()


def test_gradients_in_memory_of_the_programs_own_stay_there():
    """Flat buffers, arrays, and gradients that changed places."""
    comm = Communicator()
    models = [torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(4))) for _ in range(comm.size)]
    for model in models:
        for index, parameter in enumerate(model.parameters()):
            parameter.data.fill_(0.1 * (index + 1))
    model, sync = models[comm.rank], Synchronizer(comm, bucket_size="64")
    sync.broadcast_parameters(model)
    a, b = model[0].weight, model[1].weight
    flat, array = torch.zeros(16), np.zeros((4, 4), np.float32)
    a.grad, b.grad = flat.view(4, 4), torch.from_numpy(array)

    def step(number, swap):
        for each in models:
            each.zero_grad(set_to_none=False)
        for rank, each in enumerate(models):
            x = torch.full((2, 4), 1.0 + rank + number)
            each(x).sum().backward()
            if swap:
                third, fourth = each[2].weight, each[3].weight
                third.grad, fourth.grad = fourth.grad, third.grad
        expected = [
            mean_of([p.grad.clone() for p in same]) for same in zip(*(m.parameters() for m in models), strict=True)
        ]
        sync.sync_gradients(model)
        for parameter, wanted in zip(model.parameters(), expected, strict=True):
            assert torch.equal(parameter.grad, wanted)

    for number in range(6):
        step(number, swap=number >= 3)
        assert torch.equal(flat.view(4, 4), a.grad) and a.grad.data_ptr() == flat.data_ptr()
        assert np.array_equal(array, b.grad.numpy()) and b.grad.data_ptr() == array.ctypes.data


def test_two_synchronizers_take_turns_on_one_model():
    comm = Communicator()
    model, alone = Net(), Net()
    syncs = [Synchronizer(comm, bucket_size=size) for size in ("64", "1MiB")]
    for step in range(8):
        for each in (model, alone):
            each.zero_grad(set_to_none=False)
        model(batch(comm.rank, step, 0)).backward()
        ranks = []
        for rank in range(comm.size):
            alone.zero_grad()
            alone(batch(rank, step, 0)).backward()
            ranks.append([wide(p.grad, p) for p in alone.parameters() if p.requires_grad])
        syncs[(step // 2) % 2].sync_gradients(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        for parameter, same in zip(trained, zip(*ranks, strict=True), strict=True):
            assert bits(parameter.grad) == bits(mean_of(same))


def test_gradients_outlive_their_synchronizer():
    comm = Communicator()
    found = ours(comm, Net, "sgd", False, 1, False)
    gc.collect()
    comm.finalize()
    for parameter, last in zip((p for p in found[0].parameters() if p.requires_grad), found[1][-1], strict=True):
        assert bits(parameter.grad) == bits(last)
        if parameter.grad is not None:  # of one that no rank used
            parameter.grad.add_(1)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_rank_with_nan_is_named_where_its_gradient_lies_in_place(overlap):
    comm = Communicator()
    model, sync = Net(), Synchronizer(comm, check_finite=True, overlap=overlap)
    sync.broadcast_parameters(model)
    for step in range(4):
        model.zero_grad(set_to_none=False)
        loss = model(batch(comm.rank, step, 0))
        (loss * (float("nan") if step == 3 and comm.rank == comm.size - 1 else 1.0)).backward()
        if step < 3:
            sync.sync_gradients(model)
            continue
        with pytest.raises(NonFiniteError) as error:
            sync.sync_gradients(model)
        assert f"on rank {comm.size - 1}" in str(error.value)
        assert comm.size == 1 or "on rank 0" not in str(error.value)


def test_parameters_and_modules_that_come_go_or_freeze_are_noticed():
    from clcomm.sync.adapters.torch_slots import ModuleTree

    model = Net()
    tree = ModuleTree(model)
    assert tree.is_unchanged()
    changes = [
        lambda: model.first.bias.requires_grad_(False),
        lambda: model.frozen.requires_grad_(True),
        lambda: setattr(model, "more", torch.nn.Linear(1, 1)),
        lambda: setattr(model.first, "bias", torch.nn.Parameter(torch.zeros(7))),
        lambda: setattr(model, "first", torch.nn.Linear(5, 7)),
        lambda: delattr(model, "unused"),
        lambda: model.register_parameter("late", torch.nn.Parameter(torch.zeros(2))),
    ]
    for change in changes:
        change()
        assert not tree.is_unchanged()
        tree = ModuleTree(model)
        assert tree.is_unchanged()
