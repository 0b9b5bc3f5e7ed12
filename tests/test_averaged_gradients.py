"""Averaged gradients that a program changes: each rank changes its own, in every way there is, on every transport.

Rank r's gradient is (r + 1) times a pattern of whole numbers, so that the mean and its half are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer, clip_grad_norm
from clcomm.base.errors import ArgumentError
from clcomm.comm.transport import mpi_communicators
from clcomm.engine import Linear, Sequential, Tensor
from clcomm.engine import functional as F
from clcomm.engine.grad_slot import REDUCED, SENT
from clcomm.optim import SGD
from tests.helpers import cpu_device
from tests.numpy_models import Model
from tests.transport.references import pretended_host

ON_RANKS = pytest.mark.mpi(min_size=1)
SHAPES = {"0.weight": (3, 4), "0.bias": (3,), "1.weight": (2, 3), "1.bias": (2,)}


@pytest.fixture(params=["alone", *(pytest.param(kind, marks=ON_RANKS) for kind in ("auto", "mpi", "hosts"))])
def comm(request, monkeypatch):
    """A Communicator of a single rank, on shared memory, on MPI, and on both with two pretended hosts."""
    if request.param == "hosts":
        monkeypatch.setattr(mpi_communicators, "host_of", lambda comm: pretended_host("first-alone", comm))
    made = Communicator(transport="mpi" if request.param == "mpi" else "auto")
    yield made
    if not request.node.has_failed:
        made.finalize()


def pattern(name: str) -> np.ndarray:
    return 2 * np.arange(1, 1 + np.prod(SHAPES[name]), dtype=np.float32).reshape(SHAPES[name])


def mean_of(name: str, size: int) -> np.ndarray:
    return pattern(name) * np.float32((size + 1) / 2)


class EngineCase:
    """A module of the native engine."""

    def __init__(self, kind: str):
        self.device = cpu_device(kind)
        self.model = Sequential(Linear(4, 3, device=self.device), Linear(3, 2, device=self.device))
        self.model.flat_space()
        self.parameters: dict[str, Any] = dict(self.model.named_parameters())

    def backward(self, factor: int) -> None:
        for name, parameter in self.parameters.items():
            (parameter * Tensor(factor * pattern(name), self.device)).sum().backward()

    def read(self, name: str) -> np.ndarray:
        return self.parameters[name].grad.numpy()


class NumpyCase:
    """A model of arrays."""

    def __init__(self, _: str):
        self.model = Model((name, np.ones(shape, np.float32)) for name, shape in SHAPES.items())
        self.parameters: dict[str, Any] = dict(self.model.parameters)

    def backward(self, factor: int) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = factor * pattern(name)

    def read(self, name: str) -> np.ndarray:
        return self.parameters[name].grad


class TorchCase:
    """A module of PyTorch's."""

    def __init__(self, _: str):
        torch = pytest.importorskip("torch", reason="PyTorch is not installed; pip install -e '.[torch]'")
        self.torch, self.model = torch, torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        self.parameters: dict[str, Any] = dict(self.model.named_parameters())

    def backward(self, factor: int) -> None:
        for name, parameter in self.parameters.items():
            (parameter * self.torch.from_numpy(factor * pattern(name))).sum().backward()

    def read(self, name: str) -> np.ndarray:
        return self.parameters[name].grad.numpy()


class NetclCase:
    """A module of netcl's."""

    def __init__(self, _: str):
        pytest.importorskip("netcl", reason="netcl is not installed")
        from clcomm.sync.adapters.netcl import NetclModel, prepare

        queue = prepare().queue
        from netcl import nn

        self.model = NetclModel(nn.Sequential(nn.Linear(queue, 4, 3), nn.Linear(queue, 3, 2)))
        names = dict(zip((name for name, _ in self.model.named_parameters()), SHAPES, strict=True))
        self.parameters: dict[str, Any] = {names[name]: p for name, p in self.model.named_parameters()}

    def backward(self, factor: int) -> None:
        for name, parameter in self.parameters.items():
            parameter.set_gradient(factor * pattern(name))

    def read(self, name: str) -> np.ndarray:
        return self.parameters[name].grad.numpy()


def _halved(p: Any) -> np.ndarray:
    return p.grad.numpy() * np.float32(0.5)


def _launch_copy(p: Any, kept: Any) -> None:
    half, device = Tensor(_halved(p), p.device), p.device
    device.launch(device.kernel("elementwise", "copy"), *device.grid(half.numel()), p.grad, half, half.numel())


def _netcl_write(p: Any, kept: Any) -> None:
    from netcl.core.transfer import write_tensor

    half = _halved(p)
    write_tensor(p.tensor.grad, half.T if p.transposed else half)


def _scale(array: np.ndarray) -> None:
    array *= np.float32(0.5)


#: How to halve a parameter's gradient: way(parameter, what `parameter.grad` was before the synchronisation).
WAYS: dict[type, dict[str, Callable[[Any, Any], Any]]] = {
    EngineCase: {
        "copy_from": lambda p, kept: p.grad.copy_from(_halved(p)),
        "assigned": lambda p, kept: setattr(p, "grad", p.grad * 0.5),
        "assigned from the host": lambda p, kept: setattr(p, "grad", Tensor(_halved(p), p.device)),
        "operator": lambda p, kept: exec("p.grad *= 0.5", {"p": p}),
        "reshape": lambda p, kept: p.grad.reshape(-1).copy_from(_halved(p).reshape(-1)),
        "flatten": lambda p, kept: F.flatten(p.grad).copy_from(_halved(p).reshape(-1)),
        "detach": lambda p, kept: p.grad.detach().copy_from(_halved(p)),
        "detached reshape": lambda p, kept: p.grad.reshape(-1).detach().copy_from(_halved(p).reshape(-1)),
        "device.write": lambda p, kept: p.device.write(p.grad.buffer, _halved(p)),
        "device.copy": lambda p, kept: p.device.copy(p.grad.buffer, Tensor(_halved(p), p.device).buffer, p.nbytes),
        "a kernel": _launch_copy,
        "backward": lambda p, kept: (p * Tensor(-_halved(p), p.device)).sum().backward(),
        "kept": lambda p, kept: kept.copy_from(_halved(p)),
        "kept, reshaped": lambda p, kept: kept.reshape(-1).copy_from(_halved(p).reshape(-1)),
    },
    NumpyCase: {
        "operator": lambda p, kept: _scale(p.grad),
        "slice": lambda p, kept: _scale(p.grad[...]),
        "assigned": lambda p, kept: setattr(p, "grad", p.grad * np.float32(0.5)),
        "out=": lambda p, kept: np.multiply(p.grad, np.float32(0.5), out=p.grad),
        "a view": lambda p, kept: _scale(p.grad.reshape(-1).view()),
        "memoryview": lambda p, kept: np.copyto(np.asarray(memoryview(p.grad)), p.grad * np.float32(0.5)),
        "kept": lambda p, kept: _scale(kept),
    },
    TorchCase: {
        "mul_": lambda p, kept: p.grad.mul_(0.5),
        "copy_": lambda p, kept: p.grad.copy_(p.grad * 0.5),
        "assigned": lambda p, kept: setattr(p, "grad", p.grad * 0.5),
        "data": lambda p, kept: p.grad.data.mul_(0.5),
        "numpy": lambda p, kept: _scale(p.grad.numpy()),
        "a view": lambda p, kept: p.grad.view(-1).mul_(0.5),
        "backward": lambda p, kept: (p * (-0.5 * p.grad)).sum().backward(),
        "kept": lambda p, kept: kept.mul_(0.5),
    },
    NetclCase: {
        "set_gradient": lambda p, kept: p.set_gradient(_halved(p)),
        "write_tensor": _netcl_write,
    },
}  # fmt: skip
#: Which ranks write (0: all, 1: the first, 2: the last) and which parameters do it.
WHO = [lambda rank, size: True, lambda rank, size: rank == 0, lambda rank, size: rank == size - 1]
WHICH = [tuple(SHAPES), ("1.bias",), ("0.weight", "1.weight")]


def combined(comm, ways: Iterable[str], *others: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return every way with every choice of the others; on more than two ranks each way with one choice of them."""
    choices = list(product(*others))
    if comm.size <= 2:
        return [(way, *choice) for way in ways for choice in choices]
    return [(way, *choices[(comm.size + number) % len(choices)]) for number, way in enumerate(ways)]


def averaged(comm, case, rounds: int = 1) -> tuple[Synchronizer, dict[str, Any]]:
    """Synchronise a case's gradients; return its Synchronizer and what `grad` was just before."""
    sync = Synchronizer(comm)
    sync.broadcast_parameters(case.model)
    for _ in range(rounds):
        case.backward(comm.rank + 1)
        kept = {name: parameter.grad for name, parameter in case.parameters.items()}
        sync.sync_gradients(case.model)
    return sync, kept


@pytest.mark.parametrize("kind", list(WAYS), ids=lambda kind: kind.__name__)
def test_a_write_changes_this_ranks_gradient_once_and_no_others(comm, kind):
    for number, (way, who, which) in enumerate(combined(comm, WAYS[kind], WHO, WHICH)):
        case = kind("gpu" if number % 8 == 4 else "cpu")
        _, kept = averaged(comm, case)
        writes = who(comm.rank, comm.size)
        for name in which if writes else ():
            WAYS[kind][way](case.parameters[name], kept[name])
        comm.barrier()
        for name in SHAPES:
            factor = np.float32(0.5 if writes and name in which else 1)
            expected = mean_of(name, comm.size) * factor
            assert case.read(name).tobytes() == expected.tobytes(), (name, way, number)


def test_the_optimizer_steps_with_what_was_written(comm):
    for way, which in combined(comm, WAYS[EngineCase], WHICH):
        case = EngineCase("cpu")
        before = {name: parameter.numpy() for name, parameter in case.parameters.items()}
        _, kept = averaged(comm, case)
        for name in which:
            WAYS[EngineCase][way](case.parameters[name], kept[name])
        SGD(case.model, lr=1.0).step()
        for name, parameter in case.parameters.items():
            expected = before[name] - mean_of(name, comm.size) * np.float32(0.5 if name in which else 1)
            assert parameter.numpy().tobytes() == expected.tobytes(), (name, way)


@pytest.mark.parametrize("way", ["copy_from", "operator", "kept", "a kernel"])
def test_a_second_synchronisation_takes_what_was_written(comm, way):
    case = EngineCase("cpu")
    sync, kept = averaged(comm, case)
    for name in SHAPES if comm.rank == 0 else ():
        WAYS[EngineCase][way](case.parameters[name], kept[name])
    sync.sync_gradients(case.model)
    for name in SHAPES:
        rows = [mean_of(name, comm.size) * np.float32(1 if rank else 0.5) for rank in range(comm.size)]
        np.testing.assert_allclose(case.read(name), np.mean(rows, 0), rtol=1e-6)


def test_reading_moves_nothing(comm):
    case = EngineCase("cpu")
    averaged(comm, case)
    space = case.model.flat_space()
    for parameter in case.parameters.values():
        parameter.grad.numpy(), repr(parameter.grad), parameter.grad.shape, Tensor(parameter.grad)
    assert {slot.state for slot in space.slots} == {REDUCED}


@pytest.mark.mpi(min_size=1)
@ON_RANKS
def test_a_gradient_on_its_way_is_not_written(auto):
    case = EngineCase("cpu")
    case.backward(1)
    for name, parameter in case.parameters.items():
        kept, parameter.slot.state = parameter.grad, SENT  # as overlap leaves it when its bucket has begun
        for way in WAYS[EngineCase].keys() - {"device.write", "device.copy", "a kernel"}:
            with pytest.raises(ArgumentError, match=r"expected sync_gradients\(\) after the last backward"):
                WAYS[EngineCase][way](parameter, kept)
        assert kept.numpy().tobytes() == pattern(name).tobytes()


def test_a_hook_may_write_its_result_as_often_as_it_likes(comm):
    def halved(gradient, comm, out, bucket):
        comm.all_reduce(gradient, "mean", out=out)
        out *= 0.5

    for kind in (EngineCase, NumpyCase):
        case, sync = kind("cpu"), Synchronizer(comm)
        sync.register_comm_hook(halved)
        for _ in range(2):
            case.backward(comm.rank + 1)
            sync.sync_gradients(case.model)
            for name in SHAPES:
                assert case.read(name).tobytes() == (mean_of(name, comm.size) * np.float32(0.5)).tobytes()
            if kind is EngineCase:
                case.model.flat_space().zero_grad()


@pytest.mark.parametrize("kind", list(WAYS), ids=lambda kind: kind.__name__)
def test_clipping_takes_what_was_written(comm, kind):
    for way, which in combined(comm, WAYS[kind], WHICH):
        case = kind("cpu")
        sync, kept = averaged(comm, case)
        for name in which:
            WAYS[kind][way](case.parameters[name], kept[name])
        written = {n: mean_of(n, comm.size).astype(np.float64) * (0.5 if n in which else 1) for n in SHAPES}
        norm = np.sqrt(sum((gradient**2).sum() for gradient in written.values()))
        for max_norm in (1e9, norm / 4):
            assert clip_grad_norm(sync, case.model, max_norm) == pytest.approx(norm, rel=1e-9)
        for name, gradient in written.items():
            np.testing.assert_allclose(case.read(name), gradient / 4, rtol=1e-6, err_msg=way)
        bits = comm.all_gather_object([case.read(name).tobytes() for name in SHAPES])
        assert bits == [bits[0]] * comm.size


@pytest.mark.parametrize("kind", [EngineCase, NumpyCase, TorchCase], ids=lambda kind: kind.__name__)
def test_a_parameter_without_a_gradient_hides_no_write_to_another(comm, kind):
    for missing in SHAPES:
        case, sync = kind("cpu"), Synchronizer(comm)
        sync.broadcast_parameters(case.model)
        case.backward(comm.rank + 1)
        case.parameters[missing].grad = None
        sync.sync_gradients(case.model)
        halved = [name for name in SHAPES if name != missing]
        for name in halved:
            WAYS[kind]["assigned"](case.parameters[name], None)
        norm = np.sqrt(sum(np.square(mean_of(name, comm.size) / 2, dtype=np.float64).sum() for name in halved))
        assert clip_grad_norm(sync, case.model, 1e9) == pytest.approx(norm, rel=1e-6), missing


#: How to forget a case's gradients: way(optimizer, case).
FORGETTING: dict[str, Callable[[SGD, EngineCase], Any]] = {
    "optimizer.zero_grad": lambda optimizer, case: optimizer.zero_grad(),
    "module.zero_grad": lambda optimizer, case: case.model.zero_grad(),
    "grad = None": lambda optimizer, case: [setattr(p, "grad", None) for p in case.parameters.values()],
    "flat_space.zero_grad": lambda optimizer, case: case.model.flat_space().zero_grad(),
}
#: How to use a gradient that was kept, or a reshape of it.
USES: dict[str, Callable[[Any, Any], Any]] = {
    "numpy": lambda p, kept: kept.numpy(),
    "repr": lambda p, kept: repr(kept),
    "operator": lambda p, kept: kept * 0.5,
    "copy_from": lambda p, kept: kept.copy_from(np.zeros(kept.shape)),
    "reshape": lambda p, kept: kept.reshape(-1).numpy(),
    "assigned again": lambda p, kept: setattr(p, "grad", kept.reshape(p.shape)),
    "added": lambda p, kept: p.grad + kept.reshape(p.shape),
    "device.read": lambda p, kept: p.device.read(kept.buffer, np.empty(kept.shape, np.float32)),
}


@pytest.mark.parametrize("forget", FORGETTING)
def test_a_gradient_that_was_forgotten_is_not_taken_for_the_next_one(comm, forget):
    for use, is_reshaped, is_averaged, comes_another in combined(comm, USES, *[(False, True)] * 3):
        if use == "added" and not comes_another:
            continue
        case = EngineCase("cpu")
        optimizer = SGD(case.model, lr=1.0)
        if is_averaged:
            averaged(comm, case)
        else:
            case.backward(1)
        kept = {name: parameter.grad for name, parameter in case.parameters.items()}
        kept = {name: gradient.reshape(-1) if is_reshaped else gradient for name, gradient in kept.items()}
        FORGETTING[forget](optimizer, case)
        if comes_another:
            case.backward(3)
        for name, parameter in case.parameters.items():
            with pytest.raises(ArgumentError, match="expected the one that the parameter has now"):
                USES[use](parameter, kept[name])
            if comes_another:
                assert case.read(name).tobytes() == (3 * pattern(name)).tobytes()
