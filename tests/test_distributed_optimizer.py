"""The sharded update: the plain optimizer's bits on any number of ranks, in a part of its memory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer
from clcomm.checkpoint import Checkpoint, load
from clcomm.checkpoint_series import CheckpointSeries, load_newest
from clcomm.distributed_optimizer import DistributedOptimizer
from clcomm.engine import CrossEntropyLoss, Device, Generator, Linear, Tensor
from clcomm.errors import ArgumentError, MismatchError, NonFiniteError
from clcomm.optim import SGD, Adam, AdamW, Optimizer, RMSProp
from models import MLP, ConvNet
from tests.examples.test_examples import run
from tests.helpers import cpu_device, one_line
from tests.training.test_trainer import assert_same_bits, make_trainer, train
from training import options as command_line
from training.snapshot import restore_snapshot, save_snapshot

KINDS = {
    "sgd": lambda model: SGD(model, 0.05, weight_decay=0.01),
    "momentum": lambda model: SGD(model, 0.05, momentum=0.9, nesterov=True),
    "adam": lambda model: Adam(model, 2e-3),
    "adamw": lambda model: AdamW(model, 2e-3),
    "rmsprop": lambda model: RMSProp(model, 1e-3, momentum=0.9, centered=True),
}
SHAPE = (1, 8, 8)


def cpu() -> Device:
    return cpu_device("cpu")


def discrete() -> Device:
    """A device whose memory counts as its own."""
    return cpu_device("gpu")


class Job:
    """A model with its optimizer on a rank, and batches that are the rank's own."""

    def __init__(self, comm, kind="momentum", sharded=True, model=MLP, make_device=cpu, **options):
        self.comm, self.device = comm, make_device()
        self.model = model(SHAPE, 10, device=self.device, seed=comm.rank)
        self.sync = Synchronizer(comm, **options)
        self.optimizer = KINDS[kind](self.model)
        if sharded:
            self.optimizer = DistributedOptimizer(self.optimizer, self.sync)
        self.sync.broadcast_parameters(self.model)

    def step(self, number, micro_batches=1):
        for micro in range(micro_batches):
            rng = np.random.default_rng([number, self.comm.rank, micro])
            images = rng.standard_normal((3, *SHAPE)).astype(np.float32)
            labels = Tensor(rng.integers(0, 10, 3).astype(np.int32), self.device)
            CrossEntropyLoss()(self.model(Tensor(images, self.device)), labels).backward(1 / micro_batches)
            if micro < micro_batches - 1:
                with self.sync.no_sync():
                    self.sync.sync_gradients(self.model)
        self.sync.sync_gradients(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, steps, start=0, **options):
        for number in range(start, start + steps):
            self.step(number, **options)
        return self.model.state_dict()


@pytest.mark.parametrize(
    ("kind", "model"), [*((kind, MLP) for kind in KINDS), ("momentum", ConvNet), ("adam", ConvNet)]
)
def test_parameters_have_the_plain_optimizers_bits(comm, kind, model):
    plain, sharded = Job(comm, kind, sharded=False, model=model), Job(comm, kind, model=model)
    assert_same_bits(sharded.run(3), plain.run(3))
    sharded.optimizer.lr = plain.optimizer.lr = 1e-3
    assert_same_bits(sharded.run(2, 3, micro_batches=2), plain.run(2, 3, micro_batches=2))
    assert sharded.optimizer.steps == 5 and sharded.optimizer.lr == 1e-3
    sharded.sync.check_replicas(sharded.model)


def test_a_device_with_memory_of_its_own(comm):
    plain, sharded = (Job(comm, "adam", each, make_device=discrete) for each in (False, True))
    assert_same_bits(sharded.run(4), plain.run(4))


def test_whole_state_is_the_plain_optimizers(comm):
    plain, sharded = Job(comm, "rmsprop", sharded=False), Job(comm, "rmsprop")
    plain.run(3), sharded.run(3)
    assert_same_bits(sharded.optimizer.state_dict(), plain.optimizer.state_dict())


@pytest.mark.parametrize(("kind", "buffers"), [("sgd", 0), ("momentum", 1), ("adam", 2), ("rmsprop", 3)])
def test_each_rank_keeps_its_part_of_the_state(comm, kind, buffers):
    job = Job(comm, kind)
    span, alignment = job.model.flat_space().layout.span, job.model.flat_space().layout.alignment
    everyone = comm.all_gather(np.array([job.optimizer.state_nbytes]))
    assert everyone.sum() == buffers * span
    assert everyone.max() <= buffers * (span / comm.size + alignment)
    job.run(1)  # the state is made at its first use
    assert len(job.optimizer.optimizer._state) == buffers
    assert all(b.size == max(4, job.optimizer.state_nbytes // buffers) for b in job.optimizer.optimizer._state.values())


def test_more_ranks_than_blocks_leaves_some_without_a_part(comm):
    rows = []
    for sharded in (False, True):
        model = tiny_model(comm.rank)
        sync, optimizer = Synchronizer(comm), Adam(model, 0.1)
        optimizer = DistributedOptimizer(optimizer, sync) if sharded else optimizer
        sync.broadcast_parameters(model)
        for number in range(3):
            model(Tensor(np.full((2, 3), number + comm.rank, np.float32))).sum().backward()
            sync.sync_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        rows.append((model.state_dict(), optimizer.state_dict()))
    assert_same_bits(rows[0][0], rows[1][0])
    assert_same_bits(rows[0][1], rows[1][1])


def tiny_model(seed):
    return Linear(3, 2, rng=Generator(seed))


def test_traffic_is_one_reduce_scatter_and_one_all_gather_a_step(comm):
    job = Job(comm)
    comm.stats.reset()
    job.run(5)
    nbytes = job.model.flat_space().layout.nbytes
    for operation, label in (("reduce_scatter", "gradients"), ("all_gather", "parameters")):
        total = comm.stats.total(operation, label)
        assert (total["calls"], total["bytes"]) == (5, 5 * nbytes)
    assert comm.stats.total("all_reduce")["calls"] == 0


@pytest.mark.mpi(min_size=2)
def test_parameters_are_one_memory_of_the_ranks_where_they_share_any(auto):
    job = Job(auto)
    job.run(1)
    assert auto.is_common(job.sync.space_of(job.model.flat_space()).arrays.params)
    first = job.model.state_dict()
    auto.barrier()
    if auto.rank == auto.size - 1:
        job.model.load_state_dict({name: value + 1 for name, value in first.items()})
    auto.barrier()
    assert_same_bits(job.model.state_dict(), {name: value + 1 for name, value in first.items()})


def test_a_missing_gradient_counts_as_zero(comm):
    results = []
    for sharded in (False, True):
        job = Job(comm, "adam", sharded)
        if comm.rank == comm.size - 1 and comm.size > 1:
            job.sync.sync_gradients(job.model)
            job.optimizer.step()
            job.optimizer.zero_grad()
        else:
            job.step(0)
        results.append(job.run(1, 1))
    assert_same_bits(*results)


# --- checkpoints ---


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["momentum", "adam"])
@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_a_state_of_all_ranks_goes_on_with_fewer(several, tmp_path, kind, transport):
    """Saved by all, resumed by two ranks and by one: what the plain optimizer does from there."""
    path = several.broadcast_object(str(tmp_path / "state.npz"))
    job = Job(several, kind)
    job.run(3)
    state = job.optimizer.state_dict()
    checkpoint = Checkpoint()
    checkpoint.add_group("parameter", job.model.state_dict())
    checkpoint.add_group("optimizer", state)
    CheckpointSeries(several, path).save(checkpoint)
    for ranks in {1, 2, several.size}:
        part = several.comm.Split(several.rank // ranks, several.rank)
        if part.Get_size() == ranks:
            with Communicator(part, transport=transport) as fewer:
                resumed = [_resumed(fewer, path, kind, sharded).run(3, 10) for sharded in (False, True)]
                assert_same_bits(*resumed)
        part.Free()


def _resumed(comm, path, kind, sharded):
    job, checkpoint = Job(comm, kind, sharded), load_newest(comm, path)[1]
    job.model.load_state_dict(checkpoint.group("parameter"))
    job.optimizer.load_state_dict(checkpoint.group("optimizer"))
    assert int(job.optimizer.state_dict()["steps"]) == 3
    return job


def test_resuming_has_the_bits_of_an_uninterrupted_run_also_across_kinds(comm, tmp_path: Path):
    path = comm.broadcast_object(str(tmp_path / "run.npz"))
    samples = 60 * comm.size
    whole = train(make_trainer(comm, samples, optimizer="adam"), 12)
    for before, after in ((True, True), (True, False), (False, True)):
        first = make_trainer(comm, samples, optimizer="adam", sharded=before)
        train(first, 5)
        save_snapshot(CheckpointSeries(comm, path), first, {})
        resumed = make_trainer(comm, samples, optimizer="adam", sharded=after)
        restore_snapshot(path, resumed, {})
        assert_same_bits(train(resumed, 12), whole)


# --- the command line ---


def test_the_option_cuts_the_state_and_changes_no_bit(tmp_path: Path):
    found = []
    for arguments in ([], ["--sharded-optimizer"]):
        report, saved = tmp_path / "report.json", tmp_path / "run.npz"
        run(
            "examples.mnist", "--data", "synthetic", "--model", "mlp", "--optimizer", "adam", "--max-steps", "4",
            "--no-eval", "--report", str(report), "--checkpoint", str(saved), *arguments, ranks=2,
        )  # fmt: skip
        arrays = load(saved).arrays
        kept = {name: array for name, array in arrays.items() if not name.startswith("random/")}
        found.append((json.loads(report.read_text())["optimizer_state_bytes"], kept))
    (plain_bytes, plain), (sharded_bytes, sharded) = found
    assert plain_bytes / 2 <= sharded_bytes <= plain_bytes / 2 + 2 * 512  # two buffers, each within the alignment
    assert_same_bits(sharded, plain)


def test_other_engines_have_no_such_option():
    options = command_line.parser("x", "").parse_args(["--sharded-optimizer", "--engine", "torch"])
    with pytest.raises(ArgumentError, match="--sharded-optimizer: needs --engine native, got torch"):
        command_line.check(options)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--overlap", "on"], "--overlap on"),
        (["--compression", "fp16"], "--compression"),
        (["--no-bucketing"], "--no-bucketing"),
        (["--first-bucket-size", "64KiB"], "--first-bucket-size"),
        (["--split-tensors"], "--split-tensors"),
    ],
)
def test_options_of_buckets_are_refused_on_the_command_line(arguments, name):
    options = command_line.parser("x", "").parse_args(["--sharded-optimizer", *arguments])
    with pytest.raises(ArgumentError) as caught:
        command_line.check(options)
    assert one_line(caught) == f"--sharded-optimizer: expected no {name} with it; use one of the two"


def test_what_auto_asks_for_is_decided_at_once_as_there_are_no_buckets(comm):
    job = Job(comm, bucket_size="auto", overlap="auto")
    DistributedOptimizer(SGD(tiny_model(0), 0.1), job.sync)  # of another model: told once
    job.run(2)
    assert [str(decision) for decision in job.sync.decisions()] == [
        "overlap: off, chosen at step 0 without measuring: a sharded update has no buckets",
        "bucket_size: none, chosen at step 0 without measuring: a sharded update has no buckets",
    ]
    assert Job(comm).sync.decisions() == Job(comm, use_bucketing=False, bucket_size="auto").sync.decisions() == ()


# --- what is refused ---


def test_other_optimizers_are_refused():
    with Communicator(transport="solo") as comm, pytest.raises(ArgumentError) as caught:
        DistributedOptimizer(object(), Synchronizer(comm))
    assert "optimizer: expected one of clcomm.optim, whose state can be cut, got object" in one_line(caught)


def test_a_model_that_the_synchronizer_has_not_seen_is_refused():
    with Communicator(transport="solo") as comm:
        optimizer = DistributedOptimizer(SGD(tiny_model(0), 0.1), Synchronizer(comm))
        with pytest.raises(ArgumentError) as caught:
            optimizer.step()
    assert "call broadcast_parameters(model) first" in one_line(caught)


def test_two_synchronizers_for_one_model_are_refused():
    with Communicator(transport="solo") as comm:
        job = Job(comm)
        job.run(1)
        Synchronizer(comm).broadcast_parameters(job.model)
        with pytest.raises(ArgumentError) as caught:
            job.run(1)
    assert "another Synchronizer took its model's memory over" in one_line(caught)


def test_a_hook_is_refused_in_either_order():
    def hook(gradient, comm, out, bucket):
        raise AssertionError("nothing calls it")

    with Communicator(transport="solo") as comm:
        job = Job(comm)
        with pytest.raises(ArgumentError) as caught:
            job.sync.register_comm_hook(hook)
        assert one_line(caught).startswith("hook: expected None with a DistributedOptimizer, which reduces without")
        job.sync.register_comm_hook(None)
        job.run(1)
        plain = Job(comm, sharded=False)
        plain.sync.register_comm_hook(hook)
        with pytest.raises(ArgumentError, match="sync: expected one without compression for a sharded update"):
            DistributedOptimizer(plain.optimizer, plain.sync)


@pytest.mark.parametrize("bounds", [(-128, 0), (0, 1 << 40), (256, 128), (0, 100)])
def test_bad_ranges_are_refused(bounds):
    with pytest.raises(ArgumentError) as caught:
        SGD(MLP(SHAPE, 10, device=cpu()), 0.1).restrict(*bounds)
    assert one_line(caught).startswith("range: expected multiples of 128 within [0, ")


def test_a_restricted_optimizer_takes_no_step_of_its_own_and_no_other_range():
    optimizer: Optimizer = Adam(MLP(SHAPE, 10, device=cpu()), 0.1)
    optimizer.restrict(0, 256)
    with pytest.raises(ArgumentError) as caught:
        optimizer.step()
    assert "step its DistributedOptimizer" in one_line(caught)
    optimizer.state_dict()
    with pytest.raises(ArgumentError) as caught:
        optimizer.restrict(0, 128)
    assert "before the first step" in one_line(caught)


@pytest.mark.mpi(min_size=2)
def test_other_settings_on_some_rank_are_an_error_on_every_rank(several):
    job = Job(several)
    job.optimizer.lr = 0.1 + several.rank
    with pytest.raises(MismatchError) as caught:
        job.run(1)
    assert "sharded update: expected the same on every rank, but entry 2 is 'lr 0.1' on rank 0" in one_line(caught)


@pytest.mark.mpi(min_size=2)
def test_replicas_that_differ_are_an_error_before_they_share_memory(several):
    job = Job(several)
    if several.rank == 0:
        job.model.load_state_dict({name: value + 1 for name, value in job.model.state_dict().items()})
    with pytest.raises(MismatchError, match="replicas: expected the same parameters on every rank"):
        job.run(1)


def test_nan_ends_the_step_on_every_rank(comm):
    job = Job(comm, check_finite=True)
    job.run(1)
    culprit = comm.size - 1
    if comm.rank == culprit:
        job.model(Tensor(np.full((3, *SHAPE), np.inf, np.float32), job.device)).sum().backward()
    with pytest.raises(NonFiniteError, match=rf"has \d+ NaN and \d+ Inf on rank {culprit}"):
        job.optimizer.step()
