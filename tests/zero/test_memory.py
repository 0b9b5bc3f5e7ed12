"""What a rank keeps of a model is total / N within alignment: as allocated, as reported, and as the system counts."""

from __future__ import annotations

import gc
import json
import subprocess
import sys

import numpy as np
import pytest

from clcomm.base.flat_space.layout import FlatLayout, ShardPlan
from clcomm.base.flat_space.parameters import ParameterSpec
from tests.faults.launch import HUNG_S, ROOT, memory_environment, mpiexec
from tests.sharded_jobs import cpu, discrete
from tests.zero.dropped import window_bytes
from tests.zero.jobs import MODELS, STAGES, ZeroJob
from tests.zero.resident import LAYER_BYTES
from training.expected_memory import expected_memory

# --- arithmetic ---


@pytest.mark.parametrize("ranks", range(1, 10))
@pytest.mark.parametrize("bucket_size", [None, 1, 700, 5000, 1 << 20])
@pytest.mark.parametrize("seed", range(4))
def test_parts_cover_the_space_once_and_shards_are_equal_within_alignment(ranks, bucket_size, seed):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 900, rng.integers(1, 12))
    layout = FlatLayout([ParameterSpec(f"p{i}", (int(size),)) for i, size in enumerate(sizes)])
    plan = ShardPlan(layout, ranks, bucket_size, *([int(rng.integers(1, 3000))] if seed % 2 else []))
    assert [unit.start for unit in plan.units] == [0, *(unit.stop for unit in plan.units)][:-1]
    assert plan.units[-1].stop == layout.span
    assert plan.shard_nbytes <= layout.span / ranks + len(plan.units) * layout.alignment
    count = np.zeros(layout.span, int)
    whole = rng.standard_normal(layout.span // 4).astype(np.float32)
    shards = [np.full(plan.shard_nbytes // 4, np.nan, np.float32) for _ in range(ranks)]
    for rank, shard in enumerate(shards):
        for start, stop, offset in plan.parts(rank):
            assert start % layout.alignment == stop % layout.alignment == offset % layout.alignment == 0
            assert start >= offset, "a view of the flat space would begin before it"
            count[start:stop] += 1
            shard[offset // 4 : (offset + stop - start) // 4] = whole[start // 4 : stop // 4]
    assert (count == 1).all()
    np.testing.assert_array_equal(plan.merged(shards), whole)
    for unit in plan.units:
        inside = np.zeros(unit.nbytes, bool)
        for place in unit.ranges:
            inside[place.start - unit.start : place.stop - unit.start] = True
        for start, stop in unit.gaps():
            assert not inside[start:stop].any()
            inside[start:stop] = True
        assert inside.all()


# --- as reported, and as allocated ---


@pytest.mark.sampled(9)
@pytest.mark.parametrize("make_device", [cpu, discrete])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", MODELS)
def test_bytes_a_rank_are_the_total_divided_by_the_ranks(comm, kind, stage, make_device):
    job = ZeroJob(comm, kind, stage, make_device, bucket_size="2KiB")
    job.run(2)
    layout, use = job.model.flat_space().layout, job.optimizer.memory()
    whole, units = layout.span, len(job.sync.bucket_plan(job.model))
    part = whole / comm.size + units * layout.alignment
    buffers = len(job.optimizer.optimizer.state_names)
    shares = comm.size > 1 and comm.shares_memory and make_device is cpu
    assert use.optimizer_state <= buffers * part
    assert (use.gradients <= part) == (stage > 1 or comm.size == 1)
    assert (use.parameters <= part) == (stage > 2 or shares or comm.size == 1)
    assert (use.in_flight > 0) == (stage > 1)
    largest = max(bucket.stop - bucket.start for bucket in job.sync.bucket_plan(job.model)) + layout.alignment
    row = largest + comm.size * layout.alignment
    # Blocks of gradients (the tied weight's, one that is written, one whose turn has not come), areas, a part, and
    # with stage 3 two units in use and one on its way.
    assert use.in_flight <= 4 * largest + 3 * row + 3 * row


@pytest.mark.sampled(12)
@pytest.mark.parametrize("make_device", [cpu, discrete])
@pytest.mark.parametrize("stage", [0, *STAGES])
@pytest.mark.parametrize("kind", MODELS)
def test_what_a_rank_will_have_is_known_before(comm, kind, stage, make_device):
    job = ZeroJob(comm, kind, stage, make_device, bucket_size="2KiB")
    buffers = len(getattr(job.optimizer, "optimizer", job.optimizer).state_names)
    expected = expected_memory(job.sync, job.model, buffers)
    job.run(2)
    if not stage:
        whole = job.model.flat_space().layout.span
        assert expected.parameters == whole and expected.optimizer_state == buffers * whole
        return
    use, slack = job.optimizer.memory(), 2 * comm.size * job.model.flat_space().layout.alignment
    for name, of_each in (("parameters", 1), ("gradients", 1), ("optimizer_state", buffers)):
        assert abs(getattr(use, name) - getattr(expected, name)) <= of_each * slack, name
    if kind == "gpt":  # the tied weight's gradient is written from the head on
        assert expected.in_flight <= use.in_flight <= 2 * expected.in_flight
    else:
        assert expected.in_flight / 2 <= use.in_flight <= expected.in_flight + slack


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("make_device", [cpu, discrete])
def test_the_device_and_the_window_have_no_more(comm, stage, make_device):
    """All buffers of the device together, and all windows, are what `memory()` reports."""
    gc.collect()
    device = make_device()
    before, window = device.memory.active_bytes, window_bytes(comm)
    job = ZeroJob(comm, "mlp", stage, lambda: device, bucket_size="2KiB")
    job.run(3)
    gc.collect()
    use, layout = job.optimizer.memory(), job.model.flat_space().layout
    shares = comm.size > 1 and comm.shares_memory and make_device is cpu
    params = layout.span if shares else use.parameters  # a buffer lies on all of the host's memory
    allowed = params + use.gradients + use.optimizer_state + use.in_flight + constants(device)
    assert device.memory.active_bytes - before <= allowed
    held = window_bytes(comm) - window
    if comm.size > 1 and comm.shares_memory:
        parameters = comm.size * use.parameters if shares or stage < 3 else 0
        assert held <= parameters + comm.size * use.in_flight + 16 * 4096
    else:
        assert held == 0


def constants(device) -> int:
    return 64 * 1024 + sum(buffer.size for buffer in device.kept.values())


# --- as the system counts ---


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("ranks", "stage", "transport", "stages"), [
    (4, 0, "auto", 0), (2, 0, "mpi", 0), (3, 1, "auto", 0), (2, 1, "mpi", 0), (2, 2, "mpi", 0), (4, 2, "auto", 0),
    (3, 3, "mpi", 0), *((4, stage, "auto", 2) for stage in range(4)),
])  # fmt: skip
def test_the_system_counts_what_is_said(ranks, stage, transport, stages):
    """A model of 48 MiB a stage with Adam in fresh processes; in old ones, memory that malloc keeps would count too.

    Pages that several ranks have mapped count in equal parts for each: with stage 0 those of the first rank's
    parameters, which others read once, so that only the ranks' sums are equal.
    """
    layers = 48
    lines = lines_of("tests.zero.resident", ranks, stage, layers * max(stages, 1), transport, stages)
    assert len(lines) == ranks
    divided_by = ranks // max(stages, 1)
    whole, part = layers * LAYER_BYTES, layers * LAYER_BYTES / divided_by
    is_divided = stage > 2 or (stage > 0 and transport == "auto")
    taken = [line.pop("taken") for line in lines]
    for line, grown in zip(lines, taken, strict=True):
        assert abs(line["parameters"] - (part if is_divided else whole)) <= LAYER_BYTES
        assert abs(line["optimizer_state"] - 2 * (part if stage else whole)) <= 2 * LAYER_BYTES
        if stage > 1:
            assert abs(line["gradients"] - part) <= LAYER_BYTES
        if stage:
            assert grown == pytest.approx(sum(line.values()), rel=0.1)
    assert sum(taken) == pytest.approx(sum(sum(line.values()) for line in lines), rel=0.1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_a_model_that_is_dropped_leaves_nothing(ranks, stage):
    """Constants of the first model stay; in old processes other tests' objects would count as well."""
    lines = lines_of("tests.zero.dropped", ranks, stage)
    first, later = lines[:ranks], lines[ranks:]
    assert len(later) == 2 * ranks and not any(line["ends"] for line in lines)
    assert max(line["device"] for line in later) <= max(line["device"] for line in first)
    assert max(line["windows"] for line in later) <= max(line["windows"] for line in first) + 3 * 4096


def lines_of(module, ranks, *arguments):
    """Run a module's job, and return its lines of JSON."""
    command = [mpiexec(), "-n", str(ranks), sys.executable, "-m", module, *map(str, arguments)]
    ended = subprocess.run(command, cwd=ROOT, env=memory_environment(), capture_output=True, text=True, timeout=HUNG_S,
                           check=False)  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


# --- gathered parameters ---


@pytest.mark.mpi(min_size=2)
def test_units_are_gathered_ahead_and_released_after_use(several):
    """From the second step on the order is known, and no more than two units and the next are in memory."""
    job = ZeroJob(several, "mlp", 3, discrete, bucket_size="1KiB")
    job.run(2)
    started = count_starts(several)
    job.step(2)
    units, calls = len(job.sync.bucket_plan(job.model)), started()
    flat = job.model.flat_space()
    assert flat.params is None and flat.grads is None and not flat.gathered._held
    # Forward gathers every unit once, and backward again what is not in use any more.
    assert units <= calls["gathers"] <= 2 * units
    assert calls["ahead"] >= calls["gathers"] - 3, calls  # the first of each direction


def count_starts(comm):
    """Count all-gathers of parameters from now on, and those that were started ahead."""
    labels: list[tuple[str, str]] = []
    plain, background = comm.all_gather, comm.all_gather_async

    def at_once(*args, label="", **others):
        labels.append(("at once", label))
        return plain(*args, label=label, **others)

    def ahead(*args, label="", **others):
        labels.append(("ahead", label))
        return background(*args, label=label, **others)

    comm.all_gather, comm.all_gather_async = at_once, ahead

    def counts():
        comm.all_gather, comm.all_gather_async = plain, background
        ways = [way for way, label in labels if label == "parameters"]
        return {"gathers": len(ways), "ahead": ways.count("ahead")}

    return counts
