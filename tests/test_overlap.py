"""Overlap: buckets begin while backward goes on, with the same bits as without, and refuse what would spoil them."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer
from clcomm.distributed_optimizer import DistributedOptimizer
from clcomm.engine import CrossEntropyLoss, Device, Generator, Linear, Module, Replay, Tensor
from clcomm.errors import ArgumentError, NonFiniteError
from clcomm.optim import SGD
from clcomm.transport import mpi as mpi_module
from tests.helpers import Recorder, one_line
from tests.transport.references import pretended_host

torch = pytest.importorskip("torch")

#: (use_bucketing, bucket_size, first_bucket_size, split_tensors)
CUTS = [
    (True, "1MiB", None, False), (True, 700, 64, True), (False, "1MiB", None, False),
]  # fmt: skip


class Net(Module):
    """Three layers, of which the second can be left out."""

    def __init__(self, device):
        rng = Generator(0)
        self.first = Linear(12, 40, device=device, rng=rng)
        self.second = Linear(40, 40, device=device, rng=rng)
        self.third = Linear(40, 3, device=device, rng=rng)

    def forward(self, x, whole=True):
        x = self.first(x).relu()
        return self.third(self.second(x).relu() if whole else x)


def batch(rank: int, step: int):
    rng = np.random.default_rng([rank, step])
    return rng.standard_normal((4, 12)).astype(np.float32), rng.integers(0, 3, 4).astype(np.int32)


class Native:
    """Trains a Net, recorded and queued again."""

    def __init__(self, device, rank: int = 0):
        self.device, self.rank = device, rank
        self.model = Net(device)
        self.model.flat_space()
        loss_fn = CrossEntropyLoss()

        def run(x, y, whole):
            loss_fn(self.model(x, whole), y).backward()

        self.run = Replay(run)
        self.optimizer = SGD(self.model, 0.1, momentum=0.9)

    def backward(self, step: int, whole: bool = True) -> None:
        x, y = batch(self.rank, step)
        self.run(Tensor(x, self.device), Tensor(y, self.device), whole)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bits(self) -> list[bytes]:
        return [value.tobytes() for value in self.model.state_dict().values()]


class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(12, 40), torch.nn.Linear(40, 40)
        self.third = torch.nn.Linear(40, 3)

    def forward(self, x, whole=True):
        x = self.first(x).relu()
        return self.third(self.second(x).relu() if whole else x)


class Torch:
    """Trains the same with PyTorch."""

    def __init__(self, device, rank: int = 0):
        self.rank = rank
        torch.manual_seed(0)
        self.model = TorchNet()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)

    def backward(self, step: int, whole: bool = True) -> None:
        x, y = batch(self.rank, step)
        torch.nn.functional.cross_entropy(self.model(torch.tensor(x), whole), torch.tensor(y).long()).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bits(self) -> list[bytes]:
        return [value.numpy().tobytes() for value in self.model.state_dict().values()]


@pytest.fixture(scope="module")
def device():
    return Device.select("cpu")


KINDS = ["native", "queued", "staged", "torch"]


def trained(kind: str, comm, device, monkeypatch, steps: int = 5, micro_batches: int = 1, **options) -> tuple:
    """Return the bits after some steps, and the Synchronizer."""
    if kind in ("queued", "staged"):  # as a device that computes by itself, and one with memory of its own
        monkeypatch.setattr(device, "runs_in_caller", False)
    if kind == "staged":
        monkeypatch.setattr(device, "shares_host_memory", False)
    side = (Torch if kind == "torch" else Native)(device, comm.rank)
    sync = Synchronizer(comm, options.pop("use_bucketing", True), **options)
    sync.broadcast_parameters(side.model)
    for step in range(steps):
        for micro in range(micro_batches - 1):
            with sync.no_sync():
                side.backward(100 * step + micro, whole=micro % 2 == 0)
                sync.sync_gradients(side.model)
        side.backward(100 * step + 99, whole=step != 3)
        sync.sync_gradients(side.model)
        side.update()
    monkeypatch.undo()
    return side.bits(), sync


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_without_overlap_however_buckets_are_cut(comm, device, monkeypatch, kind):
    expected, _ = trained(kind, comm, device, monkeypatch)
    for use_bucketing, size, first, split in CUTS:
        options = {"use_bucketing": use_bucketing, "bucket_size": size}
        options |= {"first_bucket_size": first, "split_tensors": split, "overlap": True}
        assert trained(kind, comm, device, monkeypatch, **options)[0] == expected, options


@pytest.mark.parametrize("kind", KINDS)
def test_accumulated_micro_batches_have_the_bits_without_overlap(comm, device, monkeypatch, kind):
    options = {"micro_batches": 3, "bucket_size": 1500}
    expected, _ = trained(kind, comm, device, monkeypatch, **options)
    assert trained(kind, comm, device, monkeypatch, overlap=True, **options)[0] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_compressed_bucket_has_the_bits_without_overlap(comm, device, monkeypatch, kind):
    options = {"compression": "powersgd:2", "bucket_size": 1500}
    expected, _ = trained(kind, comm, device, monkeypatch, **options)
    assert trained(kind, comm, device, monkeypatch, overlap=True, **options)[0] == expected


@pytest.mark.mpi(min_size=2)
def test_shared_memory_and_mpi_have_the_same_bits_with_overlap(device, monkeypatch):
    results = []
    for transport in ("auto", "mpi"):
        with Communicator(transport=transport) as comm:
            results.append(trained("native", comm, device, monkeypatch, bucket_size=1500, overlap=True)[0])
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_buckets_begin_in_backward_and_are_counted_alike(comm, device, monkeypatch, kind):
    if kind == "native" and not device.runs_in_caller:
        pytest.skip("this device queues its kernels")
    side = (Torch if kind == "torch" else Native)(device, comm.rank)
    sync = Synchronizer(comm, bucket_size=1500, overlap=True)
    sync.broadcast_parameters(side.model)
    seen = Recorder()
    for step in range(4):
        if step == 3:
            comm.add_observer(seen)
        side.backward(step)
        if step == 3:
            handles = sync._spaces[id(side.model)].overlap.overlap._handles
            assert len(handles) == len(sync.bucket_plan(side.model)) > 1
        sync.sync_gradients(side.model)
        side.update()
    comm.remove_observer(seen)
    events = [event for event in seen.events if event.label == "gradients"]
    assert [event.bucket for event in events] == [bucket.index for bucket in sync.bucket_plan(side.model)]
    assert [event.nbytes for event in events] == [bucket.nbytes for bucket in sync.bucket_plan(side.model)]
    assert all(0 <= event.exposed_s <= event.seconds for event in events)


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_a_second_backward_before_the_synchronisation_is_refused(comm, device, monkeypatch, kind):
    side = (Torch if kind == "torch" else Native)(device, comm.rank)
    monkeypatch.setattr(device, "runs_in_caller", True)
    sync = Synchronizer(comm, overlap=True)
    sync.broadcast_parameters(side.model)
    for step in range(3):
        side.backward(step)
        sync.sync_gradients(side.model)
        side.update()
    side.backward(3)
    with pytest.raises(ArgumentError) as caught:
        side.backward(4)
    assert "as its average is on the way; with overlap, all but the last micro-batch belong in" in one_line(caught)


def test_a_device_that_computes_by_itself_takes_any_number_of_backwards(comm, device, monkeypatch):
    """The second one may add to a bucket that it does not complete: then the first one's mark is not its end."""
    results = []
    monkeypatch.setattr(device, "runs_in_caller", False)
    for overlap in (False, True):
        side = Native(device, comm.rank)
        sync = Synchronizer(comm, bucket_size=1500, overlap=overlap)
        sync.broadcast_parameters(side.model)
        for step in range(4):
            side.backward(step)
            side.backward(step + 50, whole=step % 2 == 0)
            sync.sync_gradients(side.model)
            side.update()
        results.append(side.bits())
    assert results[0] == results[1]


def test_gradients_on_their_way_are_not_forgotten_or_stepped_with(comm, device, monkeypatch):
    monkeypatch.setattr(device, "runs_in_caller", True)
    side = Native(device, comm.rank)
    sync = Synchronizer(comm, overlap=True)
    sync.broadcast_parameters(side.model)
    for step in range(2):
        side.backward(step)
        sync.sync_gradients(side.model)
        side.update()
    side.backward(2)
    for refused in (side.optimizer.zero_grad, side.optimizer.step):
        with pytest.raises(ArgumentError, match=r"^gradient: expected sync_gradients\(\) after the last backward"):
            refused()
    sync.sync_gradients(side.model)
    side.update()


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_a_gradient_that_is_not_finite_is_found_with_overlap_too(comm, device, kind):
    side = (Torch if kind == "torch" else Native)(device, comm.rank)
    sync = Synchronizer(comm, bucket_size=1500, overlap=True, check_finite=True)
    sync.broadcast_parameters(side.model)
    for step in range(2):
        side.backward(step)
        sync.sync_gradients(side.model)
        side.update()
    bias = dict(side.model.named_parameters())["third.bias"]
    if kind == "torch":
        with torch.no_grad():
            bias[0] = float("nan")
    else:
        bias.copy_from(np.array([np.nan, 0, 0], np.float32))
    side.backward(2)
    with pytest.raises(NonFiniteError):
        sync.sync_gradients(side.model)


def test_ranks_whose_backward_differs_still_agree(comm, device, monkeypatch):
    """A rank without the second layer's gradients begins its bucket in sync_gradients."""
    results = []
    for overlap in (False, True):
        side = Native(device, comm.rank)
        sync = Synchronizer(comm, bucket_size=1500, overlap=overlap)
        sync.broadcast_parameters(side.model)
        for step in range(5):
            side.backward(step, whole=(step + comm.rank) % 2 == 0)
            sync.sync_gradients(side.model)
            side.update()
        results.append(side.bits())
    assert results[0] == results[1]


# --- whether to ---


def test_auto_decides_at_once_where_nothing_can_be_gained(comm, device, monkeypatch):
    _, sync = trained("native", comm, device, monkeypatch, overlap="auto", steps=3)
    if comm.size == 1 or (comm.cores == 1 and device.runs_in_caller):
        (decision,) = sync.decisions()
        assert (decision.what, decision.chosen, decision.evidence) == ("overlap", "off", ())
        assert str(decision).startswith("overlap: off, chosen at step 2 without measuring: ")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["queued", "torch"])
def test_auto_measures_both_and_keeps_one_on_all_ranks_with_the_same_bits(several, device, monkeypatch, kind):
    monkeypatch.setattr(several, "cores", 2)
    expected, _ = trained(kind, several, device, monkeypatch, steps=26)
    monkeypatch.setattr(several, "cores", 2)
    bits, sync = trained(kind, several, device, monkeypatch, steps=26, overlap="auto")
    assert bits == expected
    (decision,) = sync.decisions()
    assert several.all_gather_object(decision) == [decision] * several.size
    off, on = decision.evidence
    assert decision.chosen == ("on" if on.measured_s < 0.98 * off.measured_s else "off")
    assert (off.name, on.name, off.steps, on.steps) == ("off", "on", 8, 8)


@pytest.mark.parametrize("kind", ["native", "torch"])
@pytest.mark.mpi(min_size=2)
def test_auto_is_off_where_backwards_accumulate_without_being_told(several, device, monkeypatch, kind):
    monkeypatch.setattr(several, "cores", 2)
    results = []
    for overlap in (False, "auto"):
        side = (Torch if kind == "torch" else Native)(device, several.rank)
        sync = Synchronizer(several, overlap=overlap)
        sync.broadcast_parameters(side.model)
        for step in range(4):
            side.backward(step)
            side.backward(50 + step)
            sync.sync_gradients(side.model)
            side.update()
        results.append(side.bits())
    assert results[0] == results[1]
    assert "several backwards came before a synchronisation" in str(sync.decisions()[0])


def test_a_replayed_function_of_two_backwards_runs_as_it_is(comm, device):
    """Where its first backward completes a bucket a replay could not know that the second adds to it."""
    net, loss_fn = Net(device), CrossEntropyLoss()
    net.flat_space()

    def twice(x, y):
        for _ in range(2):
            loss_fn(net(x), y).backward()

    sync, run = Synchronizer(comm, overlap=True), Replay(twice)
    sync.broadcast_parameters(net)
    x, y = (Tensor(array, device) for array in batch(comm.rank, 0))
    for _ in range(2):
        net.zero_grad()
        with sync.no_sync():
            run(x, y)
        sync.sync_gradients(net)
    for _ in range(2):
        net.zero_grad()
        with sync.no_sync():
            run(x, y)
    assert run.refusal == "it runs backward more than once"


@pytest.mark.parametrize("setting", ["on", None, 2])
def test_refused_settings(setting):
    with Communicator(transport="solo") as comm, pytest.raises(ArgumentError) as caught:
        Synchronizer(comm, overlap=setting)
    assert one_line(caught) == f"overlap: expected True, False or 'auto', got {setting!r}"


def test_gradients_that_are_weighed_and_overlap_exclude_each_other(comm, device):
    for setting, refused in ((True, True), ("auto", False)):
        side, sync = Torch(device, comm.rank), Synchronizer(comm, overlap=setting)
        sync.broadcast_parameters(side.model)
        side.backward(0)
        if refused:
            with pytest.raises(ArgumentError, match=r"^samples: expected None with overlap, .*; use overlap=False$"):
                sync.sync_gradients(side.model, samples=4)
        else:
            sync.sync_gradients(side.model, samples=4)


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("layout", ["halves", "first-alone"])
def test_between_hosts_the_bits_are_those_without_overlap(device, monkeypatch, layout):
    results = []
    for options in ({}, {"overlap": True, "bucket_size": 1500}, {"overlap": True, "use_bucketing": False}):
        monkeypatch.setattr(mpi_module, "host_of", lambda comm: pretended_host(layout, comm))
        with Communicator() as comm:
            assert comm.hosts == 2
            results += [trained(kind, comm, device, monkeypatch, **options)[0] for kind in ("native", "queued")]
    assert all(result == results[0] for result in results)


def test_a_sharded_update_and_overlap_exclude_each_other(comm, device):
    side = Native(device, comm.rank)
    with pytest.raises(ArgumentError) as caught:
        DistributedOptimizer(SGD(side.model, 0.1), Synchronizer(comm, overlap=True))
    assert one_line(caught) == "sync: expected one without overlap for a sharded update, got overlap=True"
    sync = Synchronizer(comm, overlap="auto")
    sync.broadcast_parameters(side.model)
    optimizer = DistributedOptimizer(SGD(side.model, 0.1), sync)
    for step in range(3):
        side.backward(step)
        sync.sync_gradients(side.model)
        optimizer.step()
        optimizer.zero_grad()
    assert sync.decisions() == ()
