"""Where PyTorch's gradients lie: a family of training loops against one process that averages by the formula.

The reference runs every rank's batches on one model, folds the gradients in rank order and divides: the same bits.
"""

from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from clcomm import Communicator, Synchronizer  # noqa: E402
from clcomm.adapters.torch_slots import _COUNTS  # noqa: E402
from clcomm.errors import NonFiniteError  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=1)

STEPS = 4


class Net(torch.nn.Module):
    """Shared, frozen, unused, narrow and complex parameters, beside plain ones."""

    def __init__(self, dtype=torch.float32, exotic=False):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = torch.nn.Embedding(6, 5, sparse=exotic)
        self.first = torch.nn.Linear(5, 7)
        self.shared = torch.nn.Linear(7, 7)
        self.unused = torch.nn.Linear(3, 2)
        self.frozen = torch.nn.Linear(7, 7)
        self.to(dtype)
        if exotic:
            self.wave = torch.nn.Parameter(torch.randn(7, dtype=torch.complex64))
            self.narrow = torch.nn.Parameter(torch.randn(7).to(torch.bfloat16))
            self.last = torch.nn.Parameter(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))
        self.frozen.requires_grad_(False)
        self.alias = self.shared

    def forward(self, x):
        x = torch.tanh(self.first(self.embedding(x)))
        x = torch.tanh(self.frozen(self.alias(torch.tanh(self.shared(x)))))
        if hasattr(self, "wave"):
            scale = torch.tanh(self.narrow.float() * self.last.square().mean())
            x = x * torch.tanh((self.wave * self.wave.conj()).real) + self.wave.imag * scale
        return x.square().mean()


def batch(rank, step, part):
    generator = torch.Generator().manual_seed(rank + 10 * step + 1000 * part)
    return torch.randint(6, (4,), generator=generator)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
}


def mean_of(gradients):
    """The mean over ranks by the formula, in rank order, as bits; a rank without a gradient counts as zero."""
    total = gradients[0].clone()
    for gradient in gradients[1:]:
        total += gradient
    return total / len(gradients)


def wide(gradient, parameter):
    """A gradient as the ranks exchange it: dense, float32 where it was narrow, zero where there is none."""
    if gradient is None:
        gradient = torch.zeros_like(parameter)
    gradient = (gradient.to_dense() if gradient.is_sparse else gradient).detach().clone()
    return gradient.float() if gradient.dtype in (torch.bfloat16, torch.float16) else gradient


def reference(make, size, optimizer, set_to_none, parts, clip, **backward):
    """Train on one process as `size` ranks would; return the parameters and all gradients that `step` saw."""
    model = make()
    parameters = [p for p in model.parameters() if p.requires_grad]
    stepper = OPTIMIZERS[optimizer](parameters)
    seen = []
    for step in range(STEPS):
        ranks = []
        for rank in range(size):
            model.zero_grad(set_to_none=set_to_none)
            for part in range(parts):
                model(batch(rank, step, part)).backward(**backward)
            ranks.append([wide(p.grad, p) for p in parameters])
        for parameter, gradients in zip(parameters, zip(*ranks, strict=True), strict=True):
            parameter.grad = mean_of(gradients).to(parameter.dtype)
        if clip:
            torch.nn.utils.clip_grad_norm_(parameters, 1e-3)
        seen.append([p.grad.detach().clone() for p in parameters])
        stepper.step()
    return model, seen


def ours(comm, make, optimizer, set_to_none, parts, clip, model=None, check=None, settings=None, **backward):
    """The same on this job's ranks."""
    model = make() if model is None else model
    parameters = [p for p in model.parameters() if p.requires_grad]
    sync = Synchronizer(comm, **(settings or {}))
    sync.broadcast_parameters(model)
    stepper = OPTIMIZERS[optimizer](parameters)
    seen = []
    for step in range(STEPS):
        stepper.zero_grad(set_to_none=set_to_none)
        with sync.no_sync():
            for part in range(parts - 1):
                model(batch(comm.rank, step, part)).backward(**backward)
        model(batch(comm.rank, step, parts - 1)).backward(**backward)
        sync.sync_gradients(model)
        if clip:
            torch.nn.utils.clip_grad_norm_(parameters, 1e-3)
        seen.append([p.grad.detach().clone() for p in parameters])
        if check is not None:
            check(step, sync, model)
        stepper.step()
    return model, seen


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same_bits(one, other):
    for step, (mine, theirs) in enumerate(zip(one[1], other[1], strict=True)):
        for index, (got, wanted) in enumerate(zip(mine, theirs, strict=True)):
            assert bits(got) == bits(wanted), f"gradient {index} at step {step}"
    for (name, got), wanted in zip(one[0].named_parameters(), other[0].parameters(), strict=True):
        assert bits(got) == bits(wanted), name


CASES = list(
    itertools.product(
        (True, False),  # set_to_none
        (1, 3),  # backwards for a step
        (False, True),  # overlap
        (None, "64", "1MiB"),  # bucket size, None: per tensor
        (torch.float32, torch.float64),
        (False, True),  # clip
        tuple(OPTIMIZERS),
    )
)
SAMPLE = [CASES[at] for at in np.random.default_rng(15).permutation(len(CASES))[:40]]


@pytest.mark.parametrize("set_to_none, parts, overlap, bucket, dtype, clip, optimizer", SAMPLE)
def test_loops_have_the_bits_of_the_formula(set_to_none, parts, overlap, bucket, dtype, clip, optimizer):
    comm = Communicator()

    def make():
        return Net(dtype)

    settings = {"overlap": overlap, "use_bucketing": bucket is not None, "bucket_size": bucket}
    found = ours(comm, make, optimizer, set_to_none, parts, clip, settings=settings)
    assert_same_bits(found, reference(make, comm.size, optimizer, set_to_none, parts, clip))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("set_to_none, parts", [(True, 1), (True, 2), (False, 1)])
def test_sparse_narrow_complex_and_channels_last_gradients(set_to_none, parts, overlap):
    comm = Communicator()

    def make():
        return Net(exotic=True)

    found = ours(comm, make, "sgd", set_to_none, parts, False, settings={"overlap": overlap, "bucket_size": "256"})
    wanted = reference(make, comm.size, "sgd", set_to_none, parts, False)
    for (name, got), expected in zip(found[0].named_parameters(), wanted[0].parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-2 if name == "narrow" else 1e-5, atol=1e-6, msg=name)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_graph_of_gradients_may_be_created():
    comm = Communicator()
    found = ours(comm, Net, "sgd", True, 1, False, create_graph=True)
    assert_same_bits(found, reference(Net, comm.size, "sgd", True, 1, False))
    found[0].zero_grad()


def lying_in_grads(sync, model):
    """The names of parameters whose gradient lies in the memory that other ranks read."""
    grads = sync.space_for(model).arrays.grads
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
    every = {name for name, p in Net().named_parameters() if p.requires_grad}
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
            if parameter.requires_grad:
                parameter.grad.fill_(comm.rank)
        comm.barrier()
        for name, parameter in model.named_parameters():
            assert not parameter.requires_grad or (parameter.grad == comm.rank).all(), name
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
            kept = {name: KEEPERS[keep](p.grad) for name, p in parameters.items()}
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
    from clcomm.adapters.torch_slots import ModuleTree

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
