"""Broadcasts of models, optimizers and objects, and the state of an elastic training."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from clcomm.base.errors import ArgumentError, MismatchError  # noqa: E402
from tests.helpers import one_line  # noqa: E402
from tests.horovod.values import FLOATS, INTEGERS, same_bits, tensor_of  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=1)


def model_of(rank: int):
    torch.manual_seed(rank)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Flatten(), torch.nn.Linear(8, 3)
    )


def trained(rank: int, kind=torch.optim.Adam):
    model = model_of(rank)
    optimizer = kind(model.parameters(), lr=0.1 / (rank + 1))
    for _ in range(rank):  # rank 0 has no state yet
        optimizer.zero_grad()
        model(tensor_of(rank, (2, 1, 4, 4), torch.float32)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("form", ["state_dict", "named_parameters", "parameters", "list", "mixed"])
def test_parameters_of_root_come_to_every_rank(hvd, form):
    for root in range(hvd.size()):
        model, wanted = trained(hvd.rank())[0], trained(root)[0]
        if form == "mixed":
            mine, theirs = ({str(kind): tensor_of(rank, (3, 2), kind) for kind in (*FLOATS, *INTEGERS)} | {"epoch": 7}
                            for rank in (hvd.rank(), root))  # fmt: skip
            hvd.broadcast_parameters(mine, root)
            assert all(name == "epoch" or same_bits(mine[name], theirs[name]) for name in mine)
            continue
        given = list(model.parameters()) if form == "list" else getattr(model, form)()
        hvd.broadcast_parameters(given, root_rank=root)
        compared = "state_dict" if form == "state_dict" else "parameters"
        pairs = (list(getattr(each, compared)()) for each in (model, wanted))
        if compared == "state_dict":
            assert all(same_bits(model.state_dict()[name], wanted.state_dict()[name]) for name in wanted.state_dict())
        else:
            assert all(same_bits(one, other) for one, other in zip(*pairs, strict=True))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad])
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_optimizers_state_and_settings_of_root_come_to_every_rank(hvd, kind, wrapped):
    for root in range(hvd.size()):
        optimizer, wanted = trained(hvd.rank(), kind)[1], trained(root, kind)[1]
        if wrapped:
            optimizer = hvd.DistributedOptimizer(optimizer)
        hvd.broadcast_optimizer_state(optimizer, root)
        found, expected = optimizer.state_dict(), wanted.state_dict()
        assert found["param_groups"] == expected["param_groups"]
        assert found["state"].keys() == expected["state"].keys()
        for index, state in expected["state"].items():
            for name, value in state.items():
                other = found["state"][index][name]
                assert same_bits(other, value) if isinstance(value, torch.Tensor) else other == value
    with pytest.raises(ArgumentError) as caught:
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(model_of(0).parameters()), 0)
    assert "L-BFGS" in one_line(caught)


def test_objects(hvd):
    own = {"rank": hvd.rank(), "values": list(range(hvd.rank()))}
    assert hvd.allgather_object(own, name="x") == [{"rank": r, "values": list(range(r))} for r in range(hvd.size())]
    for root in range(hvd.size()):
        assert hvd.broadcast_object(own, root)["rank"] == root
        assert hvd.broadcast_object_fn(root)(own)["rank"] == root


@pytest.mark.mpi(min_size=2)
def test_other_models_are_one_error_on_every_rank(hvd):
    is_odd = hvd.rank() == hvd.size() - 1
    with pytest.raises(MismatchError) as caught:
        hvd.broadcast_parameters(torch.nn.Linear(2, 3 + is_odd).state_dict(), 0)
    assert len(set(hvd.allgather_object(one_line(caught)))) == 1


# --- elastic ---


def state_of(hvd, rank: int):
    model, optimizer = trained(rank)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    sampler = hvd.elastic.ElasticSampler(range(50), seed=3)
    return hvd.elastic.TorchState(
        model, optimizer, schedule=schedule, sampler=sampler, epoch=rank, seen=[rank], best=0.5
    )


def contents(state):
    return {
        "model": {name: value.clone() for name, value in state.model.state_dict().items()},
        "optimizer": copy.deepcopy(state.optimizer.state_dict()),
        "rest": (state.epoch, list(state.seen), state.best, state.sampler.state_dict(), state.schedule.last_epoch),
    }


def alike(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return same_bits(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == other


def change(state):
    state.optimizer.zero_grad()
    state.model(torch.ones(2, 1, 4, 4)).sum().backward()
    state.optimizer.step()
    state.epoch += 10
    state.seen.append("more")
    state.sampler.record_batch(0, 2)
    state.schedule.last_epoch += 3


def test_a_state_goes_back_to_its_last_commit(hvd):
    state = state_of(hvd, hvd.rank())
    change(state)
    state.commit()
    kept = contents(state)
    for _ in range(2):
        change(state)
        assert not alike(contents(state), kept)
        state.restore()
        assert alike(contents(state), kept)


@pytest.mark.parametrize("newest", [0, -1])
def test_ranks_take_the_newest_commit(hvd, newest):
    state = state_of(hvd, hvd.rank())
    wanted = range(hvd.size())[newest]
    if hvd.rank() == wanted:
        change(state)
        state.commit()
    state.sync()
    everyone = hvd.allgather_object(contents(state))
    assert all(alike(each, everyone[wanted]) for each in everyone)
    assert state.epoch == wanted + 10
    change(state)
    state.restore()  # to what was taken
    assert alike(contents(state), everyone[wanted])


def test_a_commit_whose_sender_is_lost_does_not_count(hvd, monkeypatch):
    def lost(root):
        raise hvd.elastic.HorovodInternalError("a rank was lost")

    last = hvd.size() - 1
    state = hvd.elastic.ObjectState(step=0)
    if hvd.rank() == last:
        state.step = 1
        state.commit()
    with monkeypatch.context() as patched, pytest.raises(hvd.elastic.HorovodInternalError):
        patched.setattr(state, "take_from", lost)
        state.sync()
    state.sync()
    assert state.step == 1  # and not what rank 0 has


def test_a_new_model_takes_the_place_of_the_old_one(hvd):
    state = state_of(hvd, 0)
    state.model = model_of(5)
    state.commit()
    wanted = [each.clone() for each in state.model.parameters()]
    with torch.no_grad():
        state.model[3].weight.zero_()
    state.restore()
    assert all(same_bits(one, other) for one, other in zip(state.model.parameters(), wanted, strict=True))


@pytest.mark.parametrize("kind", ["lost", "hosts", "hosts without sync", "another"])
def test_an_elastic_function_is_called_again_from_the_last_commit(hvd, kind):
    state = hvd.elastic.ObjectState(step=0)
    state.register_reset_callbacks([lambda: resets.append(state.step)])
    resets, calls = [], []

    @hvd.elastic.run
    def train(state, limit, *, result):
        calls.append(state.step)
        while state.step < limit:
            state.step += 1
            if state.step % 2 == 0:
                state.commit()
            if state.step == 5 and len(calls) == 1:
                error = {
                    "lost": hvd.elastic.HorovodInternalError("a rank was lost"),
                    "hosts": hvd.elastic.HostsUpdatedInterrupt(),
                    "hosts without sync": hvd.elastic.HostsUpdatedInterrupt(skip_sync=True),
                    "another": KeyError("a mistake of the program"),
                }[kind]
                raise error
        return result

    if kind == "another":
        with pytest.raises(KeyError):
            train(state, 8, result="done")
        return
    assert train(state, 8, result="done") == "done"
    went_on = 4 if kind == "lost" else 5
    assert (calls, resets, state.step) == ([0, went_on], [went_on], 8)


@pytest.mark.parametrize("length", [1, 7, 50])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_sampler_gives_what_is_left_of_an_epoch_to_the_ranks(hvd, length, shuffle, batch):
    sampler = hvd.elastic.ElasticSampler(range(length), shuffle=shuffle, seed=5)
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        whole = [index for each in hvd.allgather_object(list(sampler)) for index in each]
        assert set(whole) == set(range(length)) and len(whole) - length < hvd.size()
        orders.append(hvd.allgather_object(list(sampler)))
        steps = min(2, len(sampler) // batch)
        done = [index for each in hvd.allgather_object(list(sampler)[: steps * batch]) for index in each]
        for step in range(steps):
            sampler.record_batch(step, batch)
        sampler.load_state_dict(sampler.state_dict())
        left = [index for each in hvd.allgather_object(list(sampler)) for index in each]
        assert len(list(sampler)) == len(sampler)
        assert set(left) == set(range(length)) - set(done) and (
            not set(left) or len(left) - len(set(left)) < hvd.size()
        )
    if shuffle and length == 50:
        assert orders[0] != orders[1]
