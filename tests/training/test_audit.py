"""Runs with --audit-every: the same bits as without, no false alarm, and a fault is named on every rank."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError, DivergenceError
from clcomm.comm.communicator import Communicator
from clcomm.engine import Linear, Module, RandomStream, Sequential, Tensor, nn
from clcomm.optim import SGD
from clcomm.parallel import SyncBatchNorm
from clcomm.parallel.audit import Audit
from clcomm.sync.synchronizer import Synchronizer
from tests.helpers import cpu_device, one_line
from tests.numpy_models import small_model
from tests.training.test_logical_shards import OPTIONS, drops_and_normalises, ends_with  # noqa: F401 - a fixture
from training.text_options import TextOptions

PLAIN = replace(OPTIONS, logical_shards=None)


@pytest.fixture
def audits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that were audited."""
    found: list[int] = []
    check = Audit._check_work

    def noting(self: Audit, *given: object) -> None:
        found.append(self._step)
        check(self, *given)

    monkeypatch.setattr(Audit, "_check_work", noting)
    return found


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "options",
    [
        PLAIN, replace(PLAIN, grad_accumulation=3, overlap="on", precision="bf16", loss_scaling=True),
        replace(OPTIONS, grad_accumulation=2, max_steps=5, overlap="on"),
    ],
)  # fmt: skip
def test_audits_change_no_bit_and_find_nothing(auto: Communicator, audits: list[int], options) -> None:
    expected = ends_with(auto, options)
    assert not audits
    assert ends_with(auto, replace(options, audit_every=2)) == expected
    assert audits and all(step % 2 == 0 for step in audits)


class Fixture:
    """A rank's job whose gradients have a flipped bit wherever `is_wrong(calls so far)`."""

    def __init__(self, comm: Communicator, device, is_wrong, **settings):
        nn.manual_seed(4)
        self.model = Sequential(Linear(6, 5, device=device), nn.ReLU(), Linear(5, 3, device=device))
        self.sync, self.device, self.calls = Synchronizer(comm, **settings), device, 0
        self.sync.broadcast_parameters(self.model)
        self.is_wrong, self.optimizer = is_wrong, SGD(self.model, 0.1, momentum=0.9)
        self.audit = Audit(self.sync, self.model, self.optimizer, self.compute, 2)

    def compute(self, batch: np.ndarray) -> float:
        loss = self.model(Tensor(batch, self.device)).sum()
        loss.backward()
        self.calls += 1
        if self.is_wrong(self.calls):
            gradient = self.model[0].weight.grad
            values = gradient.numpy().copy()
            values.view(np.uint32)[2, 3] ^= 1 << 7
            gradient.copy_from(values)
        return loss.item()

    def train(self, steps: int) -> None:
        for step in range(1, steps + 1):
            self.audit.begin(step)
            self.audit.run(
                np.random.default_rng([step, self.sync.comm.rank]).standard_normal((4, 6)).astype(np.float32)
            )
            self.sync.sync_gradients(self.model)
            self.audit.check_gradients()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.audit.check_update()


#: A rank's second call is its own batch of the step that is audited, the third another rank's batch.
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("kind", "call"), [("cpu", 2), ("cpu", 3), ("gpu", 2)])
def test_a_passing_fault_is_named_with_rank_step_and_parameter(auto: Communicator, kind: str, call: int) -> None:
    rank = auto.size - 1
    job = Fixture(auto, cpu_device(kind), lambda calls: auto.rank == rank and calls == call)
    with pytest.raises(DivergenceError) as caught:
        job.train(4)
    line = one_line(caught)
    assert line.startswith("audit of step 2: expected the same bits from every rank that computes rank ")
    assert f"but rank {rank} got others in the gradient of '0.weight', in one try of two; look at proc" in line
    assert auto.all_gather_object(line) == [line] * auto.size


def test_a_lasting_fault_is_named_as_such_or_two_ranks_cannot_tell(several: Communicator, device) -> None:
    job = Fixture(several, device, lambda calls: several.rank == 1)
    with pytest.raises(DivergenceError) as caught:
        job.train(4)
    if several.size == 2:
        assert "but ranks 0 and 1 differ each time in the gradient of '0.weight', which" in one_line(caught)
    else:
        assert "but rank 1 got others in the gradient of '0.weight', and rank 1 in the second" in one_line(caught)


def test_a_run_that_is_to_go_on_logs_each_fault(several: Communicator, device, caplog) -> None:
    job = Fixture(several, device, lambda calls: several.rank == 0 and calls == 2, on_divergence="rebroadcast")
    with caplog.at_level(logging.WARNING, logger="clcomm"):
        job.train(6)
    assert len(job.audit.findings) == 1
    logged = [record.getMessage() for record in caplog.records if "audit" in record.getMessage()]
    assert logged == (job.audit.findings if several.rank == 0 else [])


def test_one_rank_is_told_that_nobody_audits_it(device, caplog) -> None:
    with caplog.at_level(logging.WARNING, logger="clcomm"):
        Fixture(Communicator(transport="solo"), device, lambda calls: False).train(2)
    assert any("audit: there is no other rank" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("every", [-1, True, 1.5])
def test_only_whole_numbers_of_steps_are_accepted(every: object) -> None:
    with pytest.raises(ArgumentError, match="every: expected a number of steps, 0 for no audits, got"):
        Audit(Synchronizer(Communicator(transport="solo")), None, None, float, every)


def test_what_no_other_rank_can_compute_is_refused(several: Communicator, device) -> None:
    def linear() -> Linear:
        return Linear(4, 2, device=device)

    dropout = nn.Dropout(0.5)
    dropout.stream = RandomStream(device)
    mixing = SyncBatchNorm.convert_sync_batchnorm(Sequential(nn.BatchNorm1d(4, device=device)), several)
    refused = {
        "a model of clcomm.engine": (Synchronizer(several), small_model()),
        "no compression": (Synchronizer(several, compression="fp16"), linear()),
        "no policy": (Synchronizer(several, policy="diloco"), linear()),
        "no layers with a RandomStream": (Synchronizer(several), Sequential(linear(), dropout)),
        "a model without SyncBatchNorm": (Synchronizer(several), mixing),
    }
    for expected, (sync, model) in refused.items():
        with pytest.raises(ArgumentError, match=f"audit: expected {expected}") as caught:
            Audit(sync, model, None, float, 3)
        one_line(caught)


@pytest.mark.parametrize(
    ("named", "given"),
    [
        ("--engine torch", {"engine": "torch"}), ("--uneven-inputs join", {"uneven_inputs": "join"}),
        ("--balance auto", {"balance": "auto"}), ("--compression", {"compression": "fp16"}), ("--zero", {"zero": 1}),
    ],
)  # fmt: skip
def test_options_whose_gradients_depend_on_more_than_a_batch_are_refused(named: str, given: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match=f"--audit-every: expected no {named} with it"):
        replace(PLAIN, audit_every=2, **given)
    with pytest.raises(ArgumentError, match="--tp: expected no --audit-every with it"):
        TextOptions(tp=2, audit_every=2)


def test_a_model_is_left_in_training_with_its_gradients(several: Communicator, device) -> None:
    job = Fixture(several, device, lambda calls: False)
    job.audit.begin(2)
    job.audit.run(np.ones((4, 6), np.float32) * several.rank)
    job.sync.sync_gradients(job.model)
    before = {name: each.grad.numpy() for name, each in job.model.named_parameters()}
    job.audit.check_gradients()
    for name, each in job.model.named_parameters():
        np.testing.assert_array_equal(each.grad.numpy(), before[name])
    assert isinstance(job.model, Module) and job.model.training
