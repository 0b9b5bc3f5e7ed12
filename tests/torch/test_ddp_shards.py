"""`for x, y in ddp.shards(batch)`: PyTorch's models end with the same bits on any number of ranks, or are refused."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402

from clcomm import Communicator, DistributedDataParallel  # noqa: E402
from clcomm.base.errors import ArgumentError, MismatchError  # noqa: E402
from tests.helpers import one_line  # noqa: E402
from tests.shard_steps import first_ranks  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=1)
LENGTH, SHARDS = 90, 8


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Noisy(nn.Module):
    """Draws from PyTorch's, NumPy's and Python's generators, and has buffers on which its output depends."""

    def __init__(self):
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8))
        self.norm, self.drop, self.last = nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)

    def forward(self, values):
        noise = torch.from_numpy(np.random.standard_normal(8).astype(np.float32)) * random.random()
        return self.last(self.drop(torch.relu(self.norm(self.first(values) + noise))))


def dataset():
    drawn = torch.Generator().manual_seed(3)
    return torch.utils.data.TensorDataset(
        torch.randn(LENGTH, 6, generator=drawn), torch.randint(3, (LENGTH,), generator=drawn)
    )


class Training:
    """Epochs of a loop as a user writes it, which a checkpoint can leave and another number of ranks go on with."""

    def __init__(self, comm, seed=0, shards=SHARDS, accumulates=1, sets_to_none=True):
        torch.manual_seed(seed)
        self.ddp = DistributedDataParallel(Noisy(), comm, shards=shards)
        self.optimizer = torch.optim.Adam(self.ddp.parameters(), 1e-2)
        self.batches = self.ddp.batches(LENGTH, 2 * shards, seed=1)
        self.loader = torch.utils.data.DataLoader(dataset(), batch_sampler=self.batches)
        self.accumulates, self.sets_to_none, self.done = accumulates, sets_to_none, 0

    def run(self, epochs=2, stop_after=None):
        ddp, first = self.ddp, self.done % len(self.batches)
        for epoch in range(self.done // len(self.batches), epochs):
            self.batches.set_epoch(epoch)
            for number, batch in enumerate(self.loader):
                if number < first:
                    continue
                for inputs, targets in ddp.shards(batch):
                    (nn.functional.cross_entropy(ddp(inputs), targets) / self.accumulates).backward()
                self.done += 1
                if self.done % self.accumulates == 0:
                    nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
                    self.optimizer.step()
                    self.optimizer.zero_grad(set_to_none=self.sets_to_none)
                if self.done == stop_after:
                    return self
            first = 0
            ddp.eval()
            ddp(torch.ones(3, 6))
            ddp.train()
        return self

    def state(self):
        return {
            "model": self.ddp.state_dict(), "optimizer": self.optimizer.state_dict(), "done": self.done,
            "shards": self.ddp.synchronizer.state_dict(self.ddp.module),
        }  # fmt: skip

    def load(self, state):
        self.ddp.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done = state["done"]
        self.ddp.synchronizer.load_state_dict(self.ddp.module, state["shards"])
        return self

    def hash(self):
        states = (value for state in self.optimizer.state.values() for value in state.values())
        values = [*self.ddp.state_dict().values(), *states]
        return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in values)).hexdigest()


@pytest.mark.parametrize(("accumulates", "sets_to_none"), [(1, True), (1, False), (2, True), (3, False)])
def test_every_rank_has_the_bits_of_one_rank(several, accumulates, sets_to_none):
    given = {"accumulates": accumulates, "sets_to_none": sets_to_none}
    expected = Training(Communicator(transport="solo"), **given).run().hash()
    for count in range(1, several.size + 1):
        with first_ranks(several, count) as part:
            # Ranks may seed their own numbers, and draw others between the steps: rank 0's count.
            assert part is None or Training(part, seed=part.rank, **given).run().hash() == expected, count


@pytest.mark.parametrize("stops", [3, 7])
def test_a_checkpoint_goes_on_with_the_same_bits_on_another_number_of_ranks(several, tmp_path, stops):
    expected = Training(Communicator(transport="solo")).run().hash()
    path = several.broadcast_object(str(tmp_path / "checkpoint.pt"))
    with first_ranks(several, max(1, several.size - 1)) as part:
        if part is not None:
            training = Training(part).run(stop_after=stops)
            if part.rank == 0:
                torch.save(training.state(), path)
    several.barrier()
    state = torch.load(path, weights_only=False)
    several.barrier()
    assert Training(several, seed=several.rank).load(state).run().hash() == expected


def begun(comm, shards=None):
    """Return a wrapped layer, and samples for this rank's shards, two each."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(3, 2), comm, shards=shards or 2 * comm.size)
    return ddp, torch.ones(2 * len(ddp.synchronizer.shards.own), 3)


def refused(match, error=ArgumentError):
    return pytest.raises(error, match=match)


def test_computing_outside_of_the_shards_is_refused_on_every_rank(auto):
    line = r"expected forward and backward within `for x, y in ddp.shards\(batch\): loss_fn\(ddp\(x\), y\).backward"
    ddp, inputs = begun(auto)
    with refused(f"forward: {line}") as caught:
        ddp(inputs)
    one_line(caught)
    with refused(f"weight|bias: {line}"):
        ddp.module(inputs).sum().backward()
    kept = [ddp(part).sum() for part in ddp.shards(inputs)]
    with refused(f"weight|bias: {line}"):
        sum(kept).backward()
    ddp.eval()
    ddp(inputs)


def test_one_rank_s_plain_call_is_an_error_on_all(auto):
    ddp, inputs = begun(auto)
    with refused("forward: expected forward and backward within"):
        if auto.rank == auto.size - 1:
            ddp(inputs)
        for part in ddp.shards(inputs):
            ddp(part).sum().backward()


def test_a_loop_that_was_left_steps_nothing_and_is_refused_next(auto):
    ddp, inputs = begun(auto)
    for part in ddp.shards(inputs):
        ddp(part).sum().backward()
        break
    assert all(each.grad is None for each in ddp.parameters())
    with refused("shards: expected each loop over them to run to its end, got one that was left before") as caught:
        ddp.shards(inputs)
    one_line(caught)


def test_batches_that_the_shards_do_not_divide_are_refused_on_every_rank(auto):
    ddp, inputs = begun(auto)
    for batch, match in (
        (inputs[1:], r"batch: expected samples for 2 shards of \d+ on rank \d, as many for each, got 3;"),
        ([inputs, inputs[2:]], "as many for each, got 2 and 4;"),
        ([], "got no tensor;"),
        ({"x": inputs, "name": "text"}, "batch: expected tensors of samples in tuples, lists and mappings, got 'text'"),
        (torch.tensor(1.0), "batch: expected tensors of samples in tuples, lists and mappings, got tensor"),
    ):
        with refused(match) as caught:
            ddp.shards(batch)
        one_line(caught)
    with refused(f"batch_size: expected a multiple of the {2 * auto.size} shards, got {2 * auto.size + 1}"):
        ddp.batches(100, 2 * auto.size + 1)
    with refused("shards: expected a Synchronizer with logical shards"):
        DistributedDataParallel(nn.Linear(3, 2), auto).shards(inputs)


@pytest.mark.mpi(min_size=2)
def test_shards_of_other_sizes_and_too_few_are_refused_on_every_rank(auto):
    ddp, inputs = begun(auto)
    with refused(r"shards: .*'2 samples a shard'.*'4 samples a shard'|'4 samples.*'2 samples", MismatchError) as caught:
        ddp.shards(torch.cat([inputs, inputs]) if auto.rank else inputs)
    one_line(caught)
    with refused(f"shards: expected a whole number from {auto.size} up"):
        DistributedDataParallel(nn.Linear(3, 2), auto, shards=auto.size - 1)


def test_the_mean_is_the_formula_s_and_is_added_to_earlier_gradients(auto):
    """A gradient of the k-th shard alone is its inputs' sum; the mean divides the sum in the shards' order."""
    ddp, _ = begun(auto, auto.size + 3)
    drawn = torch.randn(ddp.synchronizer.shards.count, 2, 3)
    own = ddp.synchronizer.shards.own
    for _ in range(2):
        for part in ddp.shards({"x": drawn[own.start : own.stop].reshape(-1, 3)}):
            ddp(part["x"]).sum().backward()
    total = torch.zeros(3)
    for shard in drawn:
        total = total + shard.sum(0)
    mean = total / len(drawn)
    assert torch.allclose(ddp.module.weight.grad, (mean + mean).expand(2, 3), rtol=1e-6, atol=1e-6)


def products(comm, shards):
    """Return the gradient of a layer behind products whose bits depend on where in memory their operands lie."""
    torch.manual_seed(2)
    ddp, samples = DistributedDataParallel(nn.Linear(9, 2), comm, shards=shards), torch.randn(3 * shards, 9, 17)
    own = ddp.synchronizer.shards.own
    for (part,) in ddp.shards((samples[3 * own.start : 3 * own.stop].clone(),)):
        ddp(part @ part.transpose(1, 2)).square().sum().backward()
    return ddp.module.weight.grad


def test_a_shard_s_bits_do_not_depend_on_its_place_in_the_batch(several):
    shards = several.size + 5
    assert torch.equal(products(several, shards), products(Communicator(transport="solo"), shards))


def test_batches_are_those_of_a_sampler_of_all_shards(auto):
    ddp, _ = begun(auto, auto.size + 2)
    count, own = ddp.synchronizer.shards.count, ddp.synchronizer.shards.own
    batches = ddp.batches(50, 3 * count, shuffle=False)
    rounded = -(-50 // count) * count
    order = np.arange(rounded) % 50
    expected = [
        [order[count * row + shard] for shard in own for row in range(first, min(first + 3, rounded // count))]
        for first in range(0, rounded // count, 3)
    ]
    assert list(batches) == expected and len(batches) == len(expected)
