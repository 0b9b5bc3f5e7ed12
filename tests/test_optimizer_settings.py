"""A learning rate or other setting that parts the replicas is an error on every rank, at the next synchronisation."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer
from clcomm.base.errors import MismatchError
from clcomm.engine import Tensor, nn
from clcomm.optim import SGD, AdamW
from clcomm.optim.lr_scheduler import ReduceLROnPlateau
from tests.helpers import one_line


def job(make=SGD, **options):
    comm, model = Communicator(), nn.Linear(3, 2)
    sync, optimizer = Synchronizer(comm), make(model, **options)
    sync.broadcast_parameters(model)
    return comm, model, sync, optimizer


def one_step(comm, model, sync, optimizer):
    optimizer.zero_grad()
    model(Tensor(np.full((2, 3), 1.0 + comm.rank, np.float32))).sum().backward()
    sync.sync_gradients(model)
    optimizer.step()


SETTINGS = {
    "lr": (SGD, {"lr": 0.1}, "lr", 0.2), "momentum": (SGD, {"lr": 0.1, "momentum": 0.9}, "momentum", 0.8),
    "betas": (AdamW, {}, "betas", (0.9, 0.99)), "decay": (AdamW, {}, "weight_decay", 0.5),
}  # fmt: skip


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("rank", [0, -1])
@pytest.mark.parametrize("begin", [0, 1, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_another_setting_on_one_rank_is_an_error_on_all(name, begin, rank):
    make, options, key, value = SETTINGS[name]
    comm, *rest = job(make, **options)
    with pytest.raises(MismatchError) as caught:
        for step in range(5):
            if step == begin and comm.rank == range(comm.size)[rank]:
                rest[2].param_groups[0][key] = value
            one_step(comm, *rest)
    assert step == begin + 1, "at the synchronisation after the step that used it"
    assert "optimizer" in one_line(caught)


@pytest.mark.mpi(min_size=2)
def test_a_scheduler_that_follows_a_ranks_own_loss_is_found():
    comm, *rest = job(lr=0.1)
    scheduler = ReduceLROnPlateau(rest[2], patience=0)
    with pytest.raises(MismatchError, match="optimizer"):
        for step in range(40):
            one_step(comm, *rest)
            scheduler.step(1.0 if comm.rank else 1.0 / (step + 1))


@pytest.mark.mpi(min_size=2)
def test_a_schedule_that_all_ranks_follow_costs_few_messages():
    comm, *rest = job(lr=0.1)
    counts = []
    for step in range(64):
        one_step(comm, *rest)
        rest[2].lr = 0.1 / (step + 2)
        counts.append(comm.stats.total("all_gather", "new settings of an optimizer")["calls"])
    assert counts[-1] == 16 + 63 // 16 - 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("key", "value"), [("lr", 0.2), ("betas", (0.9, 0.99)), ("weight_decay", 0.5), ("lr", None)])
def test_pytorchs_optimizers_are_compared_too(torch, key, value):
    comm, model = Communicator(), torch.nn.Linear(3, 2)
    sync, optimizer = Synchronizer(comm), torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    sync.broadcast_parameters(model)
    try:
        for step in range(12):
            optimizer.zero_grad()
            model(torch.full((2, 3), 1.0 + comm.rank)).sum().backward()
            sync.sync_gradients(model)
            if step == 5 and value is not None and comm.rank == comm.size - 1:
                optimizer.param_groups[0][key] = value
            optimizer.step()
            schedule.step()
            if comm.rank == 0:  # an optimizer of this rank's own is no difference
                own = torch.nn.Parameter(torch.ones(1))
                own.grad = torch.ones(1)
                torch.optim.SGD([own], lr=0.1 * (step + 1)).step()
    except MismatchError as error:
        assert value is not None and step == 6, "at the synchronisation after the step that used it"
        assert "optimizer" in str(error)
    else:
        assert value is None


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("library", ["engine", "torch"])
@pytest.mark.parametrize("missed", [0, 1, 3])
def test_ranks_that_were_interrupted_before_or_after_a_step_begin_anew(library, missed, request):
    """As where a rank dies in a step: some of those that are left have taken it. A new Synchronizer then meets both."""
    torch = request.getfixturevalue("torch") if library == "torch" else None
    model = torch.nn.Linear(3, 2) if torch else nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1) if torch else SGD(model, 0.1)
    comm, ended = Communicator(), 0
    for steps in (range(missed + 1), range(missed, missed + 6)):
        sync = Synchronizer(comm)
        sync.broadcast_parameters(model)
        for step in steps:
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            optimizer.zero_grad()
            values = np.full((2, 3), 1.0 + comm.rank, np.float32)
            model(torch.from_numpy(values) if torch else Tensor(values)).sum().backward()
            sync.sync_gradients(model)
            if len(steps) == 6 or step < missed or comm.rank == 0:
                optimizer.step()
                ended += 1
    sync.check_replicas(model)
    assert ended == missed + 6 + (comm.rank == 0)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("library", ["engine", "torch"])
def test_optimizers_made_anew_for_each_step_are_new_on_every_rank(library, request):
    """Whether an object gets the address of one that is gone differs between ranks, and counts for nothing."""
    torch = request.getfixturevalue("torch") if library == "torch" else None
    comm, kept = Communicator(), []
    model = torch.nn.Linear(3, 2) if torch else nn.Linear(3, 2)
    sync = Synchronizer(comm)
    sync.broadcast_parameters(model)
    for _ in range(12):
        values = np.full((2, 3), 1.0 + comm.rank, np.float32)
        model(torch.from_numpy(values) if torch else Tensor(values)).sum().backward()
        sync.sync_gradients(model)
        for rate in (0.1, 0.2, 0.3):  # several between two synchronisations
            optimizer = torch.optim.SGD(model.parameters(), rate) if torch else SGD(model, rate)
            optimizer.step()
            kept += [optimizer] * (comm.rank == 0)  # the other ranks' are gone
            del optimizer
        model.zero_grad()
    sync.check_replicas(model)


def test_settings_that_go_within_a_step_leave_pytorchs_hooks_alone(torch):
    """PyTorch walks its table of hooks in a step; what a collection of garbage ends there must not change the table."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from clcomm.comm.tensors.step_settings import StepSettings

    parameter = torch.nn.Parameter(torch.zeros(2))
    kept, again = [StepSettings([parameter])], StepSettings([parameter])
    drop = register_optimizer_step_pre_hook(lambda *_: kept.clear())
    more = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        torch.optim.SGD([parameter], 0.25).step()
    finally:
        drop.remove()
        more.remove()
    assert not kept and ["lr 0.25" in said for said in again.new.values()] == [True]
