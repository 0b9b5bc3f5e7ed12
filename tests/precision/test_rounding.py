"""What is stored is PyTorch's rounding, to nearest and ties to even; precisions that do not fit are refused."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Synchronizer
from clcomm.base.errors import ArgumentError, MismatchError
from clcomm.base.flat_space.parameters import PRECISIONS, parse_precision
from clcomm.engine import Linear, Parameter, Sequential, Tensor, no_grad
from clcomm.engine.nn.module import Module
from clcomm.engine.parameter import Storage
from clcomm.optim import SGD
from tests.families.stored import same, special_values, value_of
from tests.helpers import cpu_device, one_line
from tests.numpy_models import small_model
from tests.precision.jobs import Job
from training.expected_memory import expected_memory


class One(Module):
    """A model of one parameter."""

    def __init__(self, values):
        self.weight = Parameter(values, cpu_device("cpu"))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_stored_values_are_pytorchs(comm, precision):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed; pip install -e '.[torch]'")
    kept = parse_precision(precision)
    values = special_values(np.random.default_rng(comm.rank), 1 << 17, kept)
    bits = Storage(cpu_device("cpu"), kept).narrowed(values)
    expected = torch.from_numpy(values).to({"bf16": torch.bfloat16, "fp16": torch.float16}[precision])
    assert same(value_of(bits, kept), expected.float().numpy())


def test_a_parameter_is_read_and_written_as_what_is_stored(comm):
    values = np.array([1.0, 1 / 3, 1e-40, 3e38, -np.inf, np.nan], np.float32)
    model = One(values)
    model.flat_space().store_in(PRECISIONS["bf16"])
    expected = np.array([1.0, 0.333984375, 1e-40, 3e38, -np.inf, np.nan], np.float32)
    found = model.weight.numpy()
    np.testing.assert_allclose(found, expected, rtol=2**-8, atol=1e-40)
    assert found[1] == expected[1] and np.asarray(model.weight).tobytes() == found.tobytes()
    model.weight.copy_from(found[::-1].copy())
    assert model.weight.numpy().tobytes() == found[::-1].tobytes()
    assert (model.weight * 2.0).numpy()[4] == 2 * found[1]
    with pytest.raises(ArgumentError, match="expected an array of shape"):
        model.weight.copy_from(found[:2])
    with no_grad():
        model.weight.fill_(0.5)
        model.weight[2:4] = 1.25
        model.weight.mul_(2.0)
    assert model.weight.tolist() == [1.0, 1.0, 2.5, 2.5, 1.0, 1.0]
    with pytest.raises(ArgumentError, match="data: expected a parameter with float32 memory of its own"):
        model.weight.data.zero_()


def test_memory_is_half(comm):
    job = Job(comm, "adam", False, precision="bf16")
    space = job.model.flat_space()
    assert space.params_nbytes == space.layout.span // 2 == space.params.size
    assert job.sync.models.of(job.model).space.arrays.params.nbytes == space.layout.span // 2
    assert job.optimizer.state_nbytes == 3 * space.layout.span  # mean, square and master
    comm.stats.reset()
    job.sync.broadcast_parameters(job.model)
    assert comm.stats.total("broadcast", "parameters")["bytes"] == space.layout.nbytes // 2


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_expected_and_measured_bytes_agree(comm, zero):
    job = Job(comm, "adam", True, precision="bf16", zero=zero, bucket_size="4KiB")
    job.run(2)
    expected = expected_memory(job.sync, job.model, 3)
    slack = 2048 * comm.size * len(job.sync.bucket_plan(job.model))
    assert job.optimizer.memory()[:3] == pytest.approx(expected[:3], abs=slack)
    if zero == 3:
        assert job.optimizer.memory().parameters <= job.model.flat_space().layout.span / 2 / comm.size + slack


@pytest.mark.parametrize("precision", ["half", "float16", "", None, 16])
def test_unknown_names_are_refused(comm, precision):
    with pytest.raises(ArgumentError, match=r"^precision: expected one of float32, bf16, fp16, got") as caught:
        Synchronizer(comm, precision=precision)
    one_line(caught)


def test_fp16_is_refused_on_all_ranks_where_one_rank_lacks_it(comm, monkeypatch):
    device = cpu_device("cpu")
    monkeypatch.setattr(device, "has_half", comm.rank != comm.size - 1)
    sync, model = Synchronizer(comm, precision="fp16"), One(np.ones(3, np.float32))
    kind = ArgumentError if comm.size == 1 else MismatchError
    with pytest.raises(kind, match=r"precision: expected bf16 or float32 on .*half_fp_config is 0") as caught:
        sync.broadcast_parameters(model)
    assert "fp16" in one_line(caught)


def test_ranks_with_different_precisions_are_told(comm):
    if comm.size == 1:
        pytest.skip("needs two ranks")
    sync = Synchronizer(comm, precision="bf16" if comm.rank else "float32")
    with pytest.raises(MismatchError, match="stored in bf16") as caught:
        sync.broadcast_parameters(One(np.ones(3, np.float32)))
    one_line(caught)


def test_other_libraries_models_and_second_precisions_are_refused(comm):
    with pytest.raises(ArgumentError, match="expected float32 for other libraries' models") as caught:
        Synchronizer(comm, precision="bf16").broadcast_parameters(small_model())
    one_line(caught)
    model = One(np.ones(3, np.float32))
    Synchronizer(comm).broadcast_parameters(model)
    with pytest.raises(ArgumentError, match="in which the parameters are stored already") as caught:
        Synchronizer(comm, precision="bf16").broadcast_parameters(model)
    one_line(caught)


def test_parameters_stay_in_their_flat_space(comm):
    model = Sequential(Linear(3, 5, device=cpu_device("cpu")), Linear(5, 2, device=cpu_device("cpu")))
    next(iter(model.parameters())).requires_grad = False
    optimizer = SGD(model, 0.1)
    model.flat_space().store_in(PRECISIONS["bf16"])
    model(Tensor(np.ones((2, 3)), cpu_device("cpu"))).sum().backward()
    optimizer.step()
    next(iter(model.parameters())).requires_grad = True
    with pytest.raises(ArgumentError, match="stay the same once they are stored in bf16") as caught:
        optimizer.step()
    one_line(caught)
