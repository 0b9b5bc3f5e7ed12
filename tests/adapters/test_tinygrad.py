"""tinygrad's models: steps within a TinyJit, memory that nothing is copied to, and what is refused in one line."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("tinygrad", reason="tinygrad is not installed; pip install -e '.[tinygrad]'")

from clcomm.tinygrad import data_parallel  # before tinygrad opens its device  # isort: skip
from tinygrad import Context, Device, Tensor, TinyJit, nn
from tinygrad.runtime import ops_cl
from tinygrad.runtime.ops_cl import CLAllocator

from clcomm import Communicator, Synchronizer, clip_grad_norm
from clcomm.base.errors import ArgumentError
from clcomm.jobs.checkpoint.file import Checkpoint, load, save
from clcomm.sync.adapters import adapter_of
from clcomm.sync.adapters import tinygrad_runtime as runtime
from tests.faults.launch import finish, start
from tests.helpers import one_line

ROWS, STEPS = 4, 5


class Net:
    """Two layers and batch norm's untrained tensors, or without these a model whose gradients are sums over samples."""

    def __init__(self, norm: bool = False):
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.norm = nn.BatchNorm(8) if norm else lambda x: x

    def __call__(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)).tanh())


def made(norm: bool = False) -> Net:
    Tensor.manual_seed(3)
    return Net(norm)


def batch(step: int, ranks: int) -> np.ndarray:
    return np.random.default_rng(step).standard_normal((ROWS * ranks, 6)).astype(np.float32)


def train(model: Net, optimizer, jit: bool, comm: Communicator | None, ranks: int, first: int = 0) -> None:
    """Train on this rank's rows of each batch, or on all of them without a comm."""

    @Context(TRAINING=1)
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean().backward()
        return loss.realize(*optimizer.schedule_step())

    run = TinyJit(step) if jit else step
    for number in range(first, first + STEPS):
        rows = batch(number, ranks)
        run(Tensor(rows if comm is None else rows[comm.rank * ROWS : (comm.rank + 1) * ROWS])).item()


@pytest.mark.mpi(min_size=2)  # one rank alone has PoCL's other driver, whose programs tinygrad builds
@pytest.mark.parametrize("failures", [1, 2])
def test_a_build_that_fails_once_is_repeated(monkeypatch: pytest.MonkeyPatch, failures: int):
    """As one does where ranks build a new program at the same time, by PoCL's cache."""
    real, left = ops_cl.cl.clBuildProgram, [failures]

    def build(*arguments: object) -> int:
        left[0] -= 1
        return ops_cl.cl.CL_BUILD_PROGRAM_FAILURE if left[0] >= 0 else real(*arguments)

    factor = 3.0 + os.getpid() + failures  # of no program before
    x = Tensor([1.0, 2.0]).realize()
    monkeypatch.setattr(ops_cl.cl, "clBuildProgram", build)
    if failures == 1:
        assert (x * factor).tolist() == [factor, 2 * factor]
    else:
        with pytest.raises(RuntimeError, match="CL_BUILD_PROGRAM_FAILURE"):
            (x * factor).tolist()


def momentum(model: Net):
    return nn.optim.SGD(nn.state.get_parameters(model), lr=0.1, momentum=0.9)


def values(model: object) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in nn.state.get_state_dict(model).items()}


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("shares", [True, False])
def test_ranks_train_as_one_does_on_the_whole_batch_with_the_same_bits_in_any_buckets(jit, shares, monkeypatch):
    comm = Communicator()
    monkeypatch.setattr("clcomm.sync.adapters.tinygrad.shares_memory", lambda device: shares)
    whole = made()
    train(whole, momentum(whole), jit, None, comm.size)
    found = []
    for bucket_size in ("64", "1MiB", None):
        model = made()
        sync = Synchronizer(comm, use_bucketing=bucket_size is not None, bucket_size=bucket_size)
        train(model, data_parallel(model, momentum(model), sync=sync), jit, comm, comm.size)
        found.append(values(model))
    for name, expected in values(whole).items():
        np.testing.assert_allclose(found[0][name], expected, rtol=1e-5, atol=1e-6, err_msg=name)
        assert len({each[name].tobytes() for each in found}) == 1, name
        assert len(set(comm.all_gather_object(found[0][name].tobytes()))) == 1, name


def grouped(model: Net, averaged, way: str):
    """Return a group of two kinds of optimizers; `averaged` makes what is given data-parallel."""
    trained = {name: each for name, each in nn.state.get_state_dict(model).items() if each.is_param}
    kinds = [[each for name, each in trained.items() if ("bias" in name) == is_bias] for is_bias in (True, False)]
    members = nn.optim.SGD(kinds[0], lr=0.1), nn.optim.LARS(kinds[1], lr=0.2, momentum=0.9, weight_decay=0.01)
    group = averaged(nn.optim.OptimizerGroup(*members))
    return nn.optim.OptimizerGroup(*reversed(members)) if way == "regrouped" else group


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("way", ["group", "regrouped", "LAMB"])
def test_any_optimizers_and_groups_of_them_use_the_mean(jit, way):
    def optimizer_of(model, averaged=lambda each: each):
        if way in ("group", "regrouped"):
            return grouped(model, averaged, way)
        return averaged(
            getattr(nn.optim, way)([each for each in nn.state.get_parameters(model) if each.is_param], lr=0.01)
        )

    comm, whole, model = Communicator(), made(), made()
    train(whole, optimizer_of(whole), jit, None, comm.size)
    train(model, optimizer_of(model, lambda each: data_parallel(model, each, comm)), jit, comm, comm.size)
    for name, expected in values(whole).items():
        found = values(model)[name]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5, err_msg=name)
        assert len(set(comm.all_gather_object(found.tobytes()))) == 1, name


@pytest.mark.mpi(min_size=1)
def test_nothing_is_copied_where_the_device_shares_the_hosts_memory(monkeypatch):
    comm = Communicator()
    model, sync = made(norm=True), Synchronizer(comm)
    optimizer = data_parallel(model, momentum(model), sync=sync)
    train(model, optimizer, True, comm, comm.size)
    copied, phases = [], []
    sync.comm.add_observer(type("Seen", (), {"collective_finished": print, "phase_finished": phases.append})())
    for name in ("_copyin", "_copyout"):
        monkeypatch.setattr(CLAllocator, name, lambda *arguments, name=name: copied.append(name))
    for _ in range(2):
        sync.sync_gradients(model)
    assert not copied and not [each for each in phases if each.name in ("pack", "unpack")]
    arrays = sync.models.of(model).space.arrays
    for tensor in (each for each in nn.state.get_parameters(model) if each.is_param):
        assert np.shares_memory(tensor.uop.buffer.clcomm_array, arrays.params)


@pytest.mark.mpi(min_size=1)
def test_all_ranks_begin_with_rank_0s_tensors_and_draw_different_numbers():
    comm = Communicator()
    Tensor.manual_seed(comm.rank)
    model = Net(norm=True)
    model.norm.running_mean.assign(Tensor.full((8,), float(comm.rank))).realize()
    data_parallel(model, momentum(model), comm)
    assert len(set(comm.all_gather_object(repr(values(model))))) == 1
    assert not model.norm.running_mean.numpy().any()
    assert len(set(comm.all_gather_object(Tensor.rand(4).numpy().tobytes()))) == comm.size


@pytest.mark.mpi(min_size=1)
def test_what_was_made_of_a_mean_keeps_its_value_and_a_changed_gradient_is_this_ranks_own():
    comm = Communicator()
    model, sync = made(), Synchronizer(comm)
    weight = model.second.weight
    (weight * float(comm.rank)).sum().backward()
    sync.sync_gradients(model)
    mean = (comm.size - 1) / 2
    twice, kept = weight.grad * 2, weight.grad  # neither is computed yet
    if comm.rank == 0:
        weight.grad.assign(weight.grad + 1).realize()
    comm.barrier()
    assert (weight.grad.numpy() == mean + (comm.rank == 0)).all()
    weight.grad = Tensor.full(weight.shape, 10.0)
    sync.sync_gradients(model)
    assert (weight.grad.numpy() == 10).all()
    assert (twice.numpy() == 2 * mean).all() and (kept.numpy() == mean + (comm.rank == 0)).all()


@pytest.mark.mpi(min_size=1)
def test_training_goes_on_from_a_checkpoint(tmp_path):
    comm, runs = Communicator(), []
    path = comm.bcast(tmp_path / "checkpoint.npz")
    for stops in (False, True):
        model = made(norm=True)
        optimizer = data_parallel(model, momentum(model), comm)
        train(model, optimizer, True, comm, comm.size)
        if stops:
            if comm.rank == 0:
                written = Checkpoint()
                written.add_group("model", values(model)), written.add_group("optimizer", values(optimizer))
                save(path, written)
            comm.barrier()
            model = Net(norm=True)
            optimizer = momentum(model)
            for owner, group in ((model, "model"), (optimizer, "optimizer")):
                for name, tensor in nn.state.get_state_dict(owner).items():
                    tensor.assign(Tensor(load(path).group(group)[name])).realize()
            optimizer = data_parallel(model, optimizer, comm)
        train(model, optimizer, True, comm, comm.size, first=STEPS)
        runs.append(values(model))
    for name, expected in runs[0].items():  # tinygrad may add in another order in another run
        if "running" in name and comm.rank:
            continue  # the checkpoint has rank 0's
        np.testing.assert_allclose(runs[1][name], expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_values_that_load_state_dict_brings_are_trained_on():
    model, other, sync = made(), Net(), Synchronizer(Communicator(transport="solo"))
    sync.broadcast_parameters(model)
    nn.state.load_state_dict(model, {n: Tensor(v) for n, v in values(other).items()}, verbose=False)
    sync.broadcast_parameters(model)
    for name, value in values(other).items():
        assert values(model)[name].tobytes() == value.tobytes()
    slot = sync.models.of(model).space.adapter._slots["first.weight"]
    assert runtime.lies_on(model.first.weight.uop.buffer, slot.value)


@pytest.mark.parametrize("case", ["device", "library", "dtype", "nothing", "broadcast", "clip", "optimizer", "part"])
def test_bad_use_is_refused_in_one_line(case):
    comm, model = Communicator(transport="solo"), made()
    sync = Synchronizer(comm)
    if case == "device":
        model.second.weight = model.second.weight.to("PYTHON")
        expected, call = r"'second\.weight': expected on device CL", lambda: adapter_of(model)
    elif case == "library":
        from clcomm.engine import Linear

        model.third = [Linear(2, 2)]
        expected, call = "expected tinygrad's, .* got clcomm's", lambda: adapter_of([model, Linear(2, 2).weight])
    elif case == "dtype":
        model.second.weight = Tensor([1.0]).cast("fp8e4m3")
        expected, call = "expected float16, bfloat16", lambda: adapter_of(model)
    elif case == "nothing":
        expected, call = "with is_param", lambda: adapter_of([Tensor([1, 2])])
    elif case == "optimizer":
        expected, call = r"one of tinygrad's nn\.optim, got dict", lambda: data_parallel(model, {}, comm)
    elif case == "part":
        optimizer = nn.optim.SGD([model.first.weight])
        expected, call = r"got none for 'first\.bias'; give an nn\.optim", lambda: data_parallel(model, optimizer, comm)
    else:
        sync.sync_gradients(model)

        def moves(x: Tensor) -> Tensor:
            sync.broadcast_parameters(model) if case == "broadcast" else clip_grad_norm(sync, model, 1.0)
            return (x + 1).realize()

        step = TinyJit(moves)
        step(Tensor([1.0]).realize())
        expected, call = "expected to be moved outside of a TinyJit", lambda: step(Tensor([1.0]).realize())
    with pytest.raises(ArgumentError, match=expected) as caught:
        call()
    one_line(caught)


MISSING = """
import clcomm.tinygrad
from tests.adapters.test_tinygrad import made, momentum, train
comm = Communicator()
model = made()
optimizer = clcomm.tinygrad.data_parallel(model, momentum(model), comm)
train(model, optimizer, True, comm, comm.size)
if comm.rank == 1:
    failing()
    sys.exit(0)
train(model, optimizer, True, comm, comm.size)
"""


def test_a_rank_that_runs_a_jit_less_often_is_named_in_one_line(tmp_path):
    path = os.pathsep.join([".", *(each for each in sys.path if each)])
    ended = finish(start(tmp_path, MISSING, ranks=2, PYTHONPATH=path))
    assert ended.code and len(ended.clcomm_lines()) == 1 and "rank 1" in ended.err, ended.err


def test_clcomm_alone_imports_no_tinygrad():
    program = (
        "import sys, clcomm, clcomm.sync.adapters; print([name for name in sys.modules if name.startswith('tinygrad')])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


def test_the_default_device_is_opencls():
    assert Device.DEFAULT == "CL" and os.path.exists(os.environ["OPENCL_PATH"])
