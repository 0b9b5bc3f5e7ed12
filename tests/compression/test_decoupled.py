"""DeMo: its steps as SciPy's transforms and one process compute them, its bytes, and its state."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.fft import dctn, idctn

from clcomm import Synchronizer
from clcomm.base.host.arrays import from_bfloat16, to_bfloat16
from clcomm.optim import SGD
from tests.helpers import Recorder
from tests.sync.test_local_sgd import backward, network

STEPS, COUNT = 5, 32


def train(comm, steps=STEPS, state=None, count=COUNT):
    model, sync = network(), Synchronizer(comm, compression=f"demo:{count}")
    sync.broadcast_parameters(model)
    optimizer = SGD(model, 0.01)
    taken = []
    for step in range(steps):
        backward(model, comm.rank, step)
        own = np.concatenate([parameter.grad.numpy().ravel() for parameter in model.parameters()])
        sync.sync_gradients(model)
        taken.append((own, np.concatenate([parameter.grad.numpy().ravel() for parameter in model.parameters()])))
        optimizer.step()
        optimizer.zero_grad()
    return model, sync, taken


def test_all_frequencies_of_one_rank_are_the_sign_of_its_gradients(comm):
    """What is sent leaves the momentum: with all of it a step is the sign of the mean gradient."""
    for own, step in train(comm, count=4096)[2]:
        mean = np.mean(comm.all_gather(own).astype(np.float64), 0)
        clear = np.abs(mean) > 0.05 * np.abs(mean).max()  # what is sent has 8 bits
        assert (np.sign(mean) == step)[clear].all()


def test_steps_are_those_of_one_process(comm):
    model, sync, taken = train(comm)
    plan, momenta = sync.bucket_plan(model), {}
    places = {place.name: place for bucket in plan for place in bucket.ranges}
    names = [name for name, _ in model.named_parameters()]
    is_parameter = np.zeros(model.flat_space().layout.span // 4)
    for place in places.values():
        is_parameter[place.start // 4 : place.stop // 4] = 1
    for own, step in taken:
        everyone, at = comm.all_gather(own), 0
        spaces = np.zeros((2, comm.size, model.flat_space().layout.span // 4), np.float32)
        for name in names:
            place, count = places[name], places[name].nbytes // 4
            spaces[0, :, place.start // 4 : place.stop // 4] = everyone[:, at : at + count]
            spaces[1, :, place.start // 4 : place.stop // 4] = step[at : at + count]
            at += count
        for bucket in plan:
            part = slice(bucket.start // 4, bucket.stop // 4)
            total = 0
            for rank in range(comm.size):
                momentum = 0.999 * momenta.get((bucket.start, rank), 0) + spaces[0, rank, part]
                squares = np.zeros(-(-len(momentum) // 4096) * 4096)
                squares[: len(momentum)] = momentum
                found = dctn(squares.reshape(-1, 64, 64), axes=(1, 2), norm="ortho")
                rows = found.reshape(len(found), -1)
                least = np.sort(np.abs(rows), axis=1)[:, -COUNT, None]
                rows[np.abs(rows) < least] = 0
                found = from_bfloat16(to_bfloat16(found)).astype(np.float64)
                rest = momentum - idctn(found, axes=(1, 2), norm="ortho").ravel()[: len(momentum)]
                momenta[bucket.start, rank] = rest * is_parameter[part]
                total = total + found
            expected = idctn(total, axes=(1, 2), norm="ortho").ravel()[: part.stop - part.start]
            clear = (np.abs(expected) > 1e-3 * np.abs(expected).max()) & (is_parameter[part] > 0)
            assert (np.sign(expected) == spaces[1, 0, part])[clear].mean() > 0.999


def test_ranks_stay_alike_and_send_few_bytes(comm):
    recorder = Recorder()
    comm.add_observer(recorder)
    model, sync, _ = train(comm)
    comm.remove_observer(recorder)
    sync.check_replicas(model)
    sent = [event.wire_nbytes for event in recorder.events if event.label == "gradients"]
    squares = sum(-(-(bucket.stop - bucket.start) // (4 * 4096)) for bucket in sync.bucket_plan(model))
    assert comm.size == 1 or sum(sent) == STEPS * squares * COUNT * 4


def test_a_run_goes_on_from_its_momentum(comm):
    whole, sync, _ = train(comm, 4)
    state, values = sync.state_dict(whole), whole.state_dict()
    again, other, _ = train(comm, 0)
    again.load_state_dict(values)
    other.load_state_dict(again, state)
    for model, each in ((whole, sync), (again, other)):
        backward(model, comm.rank, 4)
        each.sync_gradients(model)
    for ours, theirs in zip(whole.parameters(), again.parameters(), strict=True):
        assert ours.grad.numpy().tobytes() == theirs.grad.numpy().tobytes()


@pytest.mark.parametrize("text", ["demo", "demo:0", "demo:4097", "demo:x"])
def test_bad_counts_are_refused(text):
    from clcomm.base.errors import ArgumentError
    from clcomm.sync.compression import parse_compression

    with pytest.raises(ArgumentError, match=r"demo:COUNT with a count such as 32, got"):
        parse_compression(text)
