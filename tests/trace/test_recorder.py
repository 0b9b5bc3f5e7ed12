"""The trace of real work on any number of ranks: what is in it, its limit, its sampling, and what failures leave."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.base.errors import ArgumentError
from clcomm.comm.transport.hosts import measure_offset
from clcomm.engine import Device
from clcomm.insight.trace import Trace
from clcomm.insight.trace.part_file import part_path
from clcomm.tools.cli import main
from tests.helpers import largest_file, one_line
from tests.trace import rules

#: Markers tell the device's clock as well as the machine lets them: mostly to a microsecond, but not on a busy one.
CLOCKS_APART_NS = 50_000


@pytest.fixture
def path(comm, tmp_path) -> Path:
    """One file for all ranks."""
    return Path(comm.broadcast_object(str(tmp_path / "trace.json")))


@pytest.fixture(scope="module")
def device():
    return Device.select("cpu", cores=1)


def fill(device, value: float, count: int = 4096) -> None:
    buffer = device.allocate(4 * count)
    device.launch(device.kernel("elementwise", "fill"), *device.grid(count), buffer, value, np.int32(count))


def steps(comm, device, count: int) -> None:
    """Run steps of two kernels and a bucket's all-reduce each."""
    gradients = np.ones(1000, np.float32)
    for _ in range(count):
        with comm.phase("step"):
            with comm.phase("forward_backward"):
                fill(device, 1.0)
                fill(device, 2.0)
                device.finish()
            comm.all_reduce(gradients, label="gradients", bucket=0)


def read(comm, path: Path) -> dict:
    """Return the trace, checked by rank 0; the same on every rank."""
    return comm.broadcast_object(rules.load(path) if comm.rank == 0 else None)


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_all_ranks_are_in_one_trace(comm, device, path, suffix):
    path = path.with_suffix(suffix)
    began = time.perf_counter_ns()
    with Trace(comm, path, device=device):
        steps(comm, device, 3)
        fill(device, 3.0)  # nobody waits for this one
    seconds = (time.perf_counter_ns() - began) * 1e-9
    trace = read(comm, path)
    for rank in range(comm.size):
        assert [e["name"] for e in rules.on_thread(trace, "steps", rank)] == ["step", "forward_backward"] * 3
        assert [e["name"] for e in rules.on_thread(trace, "device", rank)] == ["fill"] * 7
        reductions = [e for e in rules.on_thread(trace, "communication", rank) if e["name"] == "all_reduce bucket 0"]
        assert len(reductions) == 3 and all("flow_in" in event for event in reductions)
        whole = [e for e in rules.on_thread(trace, "steps", rank) if e["name"] == "step"]
        for step, reduction in zip(whole, reductions, strict=True):
            assert rules.common_ns([step], [reduction]) == rules.ns(reduction)[1] - rules.ns(reduction)[0]
    assert max(e["ts"] + e["dur"] for e in rules.on_thread(trace, "steps")) < 1e6 * seconds
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert [name.split(":")[0] for name in names] == [f"rank {rank}" for rank in range(comm.size)]
    comm.barrier()
    assert [each.name for each in path.parent.iterdir()] == [path.name]  # no parts are left


def test_kernels_ran_within_what_the_host_saw(comm, device, path):
    with Trace(comm, path, device=device):
        steps(comm, device, 5)
    trace = read(comm, path)
    for rank in range(comm.size):
        phases = [e for e in rules.on_thread(trace, "steps", rank) if e["name"] == "forward_backward"]
        kernels = rules.on_thread(trace, "device", rank)
        for number, phase in enumerate(phases):
            (begin, end), own = rules.ns(phase), kernels[2 * number : 2 * number + 2]
            assert begin - CLOCKS_APART_NS <= rules.ns(own[0])[0] and rules.ns(own[1])[1] <= end + CLOCKS_APART_NS


def test_overlap_in_a_trace_is_the_time_that_is_reported_as_hidden(comm, device, path):
    gradients = np.ones(1 << 18, np.float32)
    comm.stats.reset()
    with Trace(comm, path, device=device):
        for _ in range(8):
            handle = comm.all_reduce_async(gradients, label="gradients", bucket=0)
            with comm.phase("computing"):
                fill(device, 1.0, 1 << 22)
                device.finish()
            handle.wait()
        reported_s = comm.all_gather_object(comm.stats.total("all_reduce", "gradients")["hidden_s"])
    trace = read(comm, path)
    for rank in range(comm.size):
        communication, kernels = rules.on_thread(trace, "communication", rank), rules.on_thread(trace, "device", rank)
        assert rules.hidden_ns(communication) * 1e-9 == pytest.approx(reported_s[rank], rel=1e-3, abs=1e-6)
        exposed = [event for event in communication if event["name"] == "exposed"]
        assert rules.common_ns(kernels, exposed) <= CLOCKS_APART_NS * len(exposed)
        computing = [event for event in rules.on_thread(trace, "steps", rank) if event["name"] == "computing"]
        reductions = [event for event in communication if "exposed us" in event.get("args", {})]
        for work, reduction in zip(computing, reductions, strict=True) if comm.size > 1 else ():
            overlap_ns = rules.common_ns([work], [reduction])
            assert overlap_ns == pytest.approx(rules.ns(work)[1] - rules.ns(work)[0], abs=10)
            assert overlap_ns <= 1e3 * (reduction["dur"] - reduction["args"]["exposed us"]) + 10
        assert rules.common_ns(computing, exposed) <= 10 * len(exposed)


@pytest.mark.mpi(min_size=2)
def test_clocks_are_measured_and_one_on_one_host(auto, tmp_path):
    for _ in range(3):
        offset = measure_offset(auto.comm)
        assert abs(offset.offset_ns) <= offset.uncertainty_ns  # the truth is 0 here
    path = Path(auto.broadcast_object(str(tmp_path / "trace.json")))
    with Trace(auto, path):
        auto.barrier()
    ranks = read(auto, path)["otherData"]["ranks"]
    assert [rank["rank"] for rank in ranks] == list(range(auto.size))
    for rank in ranks:
        first, last = rank["clocks"]
        assert first["at_ns"] < last["at_ns"]
        assert all(reading["offset_ns"] == 0 for reading in rank["clocks"])
        assert all(reading["measured_uncertainty_ns"] > 0 for reading in rank["clocks"]) == (rank["rank"] > 0)


@pytest.mark.mpi(min_size=2)
def test_ranks_see_a_barrier_end_after_everyone_came(auto, tmp_path):
    path = Path(auto.broadcast_object(str(tmp_path / "trace.json")))
    with Trace(auto, path):
        for rank in range(auto.size):
            if auto.rank == rank:
                time.sleep(0.002)
            auto.barrier()
    trace = read(auto, path)
    barriers = [
        [rules.ns(e) for e in rules.on_thread(trace, "communication", rank) if e["name"] == "barrier"]
        for rank in range(auto.size)
    ]
    for together in zip(*barriers, strict=True):
        assert max(begin for begin, _ in together) <= min(end for _, end in together)


def test_one_step_of_n(comm, device, path):
    with Trace(comm, path, device=device, every=4):
        steps(comm, device, 10)
        with comm.phase("evaluate"):
            pass
    trace = read(comm, path)
    for rank in range(comm.size):
        names = [event["name"] for event in rules.on_thread(trace, "steps", rank)]
        assert names == ["step", "forward_backward"] * 3 + ["evaluate"]  # the first, fifth and ninth
        assert len(rules.on_thread(trace, "device", rank)) == 6
        assert len([e for e in rules.on_thread(trace, "communication", rank) if "bucket" in e.get("args", {})]) == 3


def test_recording_ends_at_the_limit(comm, device, path, caplog):
    limit = 64 << 10
    with Trace(comm, path, device=device, limit=limit * comm.size):
        steps(comm, device, 200)
    assert path.stat().st_size <= limit * comm.size
    trace = read(comm, path)
    notes = [event for event in trace["traceEvents"] if event["ph"] == "i"]
    assert len(notes) >= comm.size
    assert all("a rank's share of the limit is 64 KiB" in event["name"] for event in notes)
    kept = len([event for event in rules.on_thread(trace, "steps", 0) if event["name"] == "step"])
    assert 20 < kept < 200


def test_a_trace_changes_no_result_and_ends(comm, device, path):
    with Trace(comm, path, device=device) as trace:
        array = comm.all_reduce(np.arange(5, dtype=np.float32) * comm.rank)
        trace.close()
        trace.close()
        comm.barrier()  # after its end: not in it
    assert array.tolist() == [value * sum(range(comm.size)) for value in range(5)]
    assert not [e for e in rules.on_thread(read(comm, path), "communication") if e["name"] == "barrier"]


def test_a_failure_leaves_parts_of_which_a_trace_can_be_made(comm, device, path, capsys):
    with pytest.raises(KeyError), Trace(comm, path, device=device):
        steps(comm, device, 2)
        raise KeyError
    comm.barrier()
    if comm.rank == 0:
        assert not path.exists()
        assert main(["trace", str(path)]) == 0
        ranks = ", ".join(map(str, range(comm.size)))
        said = f"{path}: written from the parts of rank {ranks}; open it at https://ui.perfetto.dev\n"
        assert capsys.readouterr().out == said
    trace = read(comm, path)
    assert len([e for e in rules.on_thread(trace, "steps") if e["name"] == "step"]) == 2 * comm.size
    assert all(len(rank["clocks"]) == 1 for rank in trace["otherData"]["ranks"])


def test_a_place_that_cannot_be_written_is_refused_on_every_rank(comm, tmp_path):
    blocked = tmp_path / "nowhere"
    blocked.touch()
    folder = blocked if comm.rank == comm.size - 1 else tmp_path
    with pytest.raises(ArgumentError) as caught:
        Trace(comm, folder / "trace.json")
    assert one_line(caught).startswith("trace: expected a file to write, got")
    assert "nowhere" in one_line(caught)
    assert list(tmp_path.iterdir()) == [blocked]


@pytest.mark.parametrize(
    "settings, complaint",
    [
        ({"every": 0}, "every: expected a number of steps from 1 up, got 0"),
        ({"limit": "1KiB"}, "limit: expected at least 64 KiB for 1 ranks, got 1 KiB"),
        ({"limit": "lots"}, "limit: expected a positive number of bytes"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, settings, complaint):
    with pytest.raises(ArgumentError, match=complaint):
        Trace(Communicator(transport="solo"), tmp_path / "trace.json", **settings)


def test_no_parts_no_trace(tmp_path):
    with pytest.raises(ArgumentError, match=r"expected parts of a trace beside it, .*ui\.perfetto\.dev$"):
        main(["trace", str(tmp_path / "trace.json")])


@pytest.mark.parametrize("nbytes", [0, 500, 3000])
def test_a_disk_that_fills_up_ends_the_trace_and_not_the_training(comm, device, path, nbytes, caplog):
    """On one rank: the others leave their parts too, and nobody waits for anybody."""
    steps(comm, device, 1)  # builds kernels
    trace = Trace(comm, path, device=device)
    with largest_file(nbytes) if comm.rank == comm.size - 1 else contextlib.nullcontext():
        for _ in range(3):
            steps(comm, device, 5)
            trace._flush()
        with caplog.at_level("WARNING", "clcomm"):
            trace.close()
    assert not path.exists() or comm.size > 1
    said = "\n".join(comm.all_gather_object(caplog.text))
    assert "File too large" in said
    comm.barrier()


def test_a_disk_that_is_full_at_the_end_leaves_the_parts(comm, device, path, caplog, capsys):
    trace = Trace(comm, path, device=device)
    steps(comm, device, 5)
    part = part_path(path, comm.rank)
    trace._flush()
    limit = largest_file(part.stat().st_size + 200 if comm.rank == 0 else 1 << 40)
    with limit, caplog.at_level("WARNING", "clcomm"):
        trace.close()
    if comm.rank == 0:
        assert "trace: not written" in caplog.text and "File too large" in caplog.text
        assert not path.exists()
        assert main(["trace", str(path)]) == 0
        capsys.readouterr()
    names = [event["name"] for event in rules.on_thread(read(comm, path), "steps")]
    assert names.count("step") == 5 * comm.size
