"""Parts of a Communicator: `split` by colors and keys, each part with memory of its own and named everywhere."""

from __future__ import annotations

import gzip
import json
import os
import re
import threading
import time

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.base.errors import ArgumentError, ClcommError, MismatchError
from clcomm.comm.stats.comm_stats import bus_factor
from clcomm.comm.transport import mpi_communicators
from clcomm.insight.trace import Trace
from tests.helpers import Recorder, one_line
from tests.transport.references import drawn, folded, layout_hosts, pretended_host, same_bits

#: What each rank asks for: its color and key, by its rank and their number; None: it is in no part.
SPLITS = {
    "all": lambda rank, size: (0, None),
    "alone": lambda rank, size: (rank, None),
    "reversed": lambda rank, size: (3, -rank),
    "odd and even": lambda rank, size: (rank % 2, -rank),
    "halves": lambda rank, size: (rank * 2 // size, 0),
    "without rank 0": lambda rank, size: (None if rank == 0 else 7, None),
    "none": lambda rank, size: (None, None),
}


def members(how: str, rank: int, size: int) -> list[int]:
    asked = [SPLITS[how](other, size) for other in range(size)]
    own = asked[rank][0]
    chosen = [other for other in range(size) if own is not None and asked[other][0] == own]
    return sorted(chosen, key=lambda other: (other if asked[other][1] is None else asked[other][1], other))


@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("name", ["", "dp"])
def test_a_part_reduces_over_its_ranks_in_its_order(comm, how, name):
    part = comm.split(*SPLITS[how](comm.rank, comm.size), name=name)
    its = members(how, comm.rank, comm.size)
    if not its:
        assert part is None
        return
    assert (part.rank, part.size, part.name) == (its.index(comm.rank), len(its), name)
    assert part.shares_memory == (comm.shares_memory and len(its) > 1)
    rows = [drawn(rank, 1001, "float32") for rank in its]
    for source in (rows[part.rank].copy(), part.allocate(4004).view(np.float32)):
        source[:] = rows[part.rank]
        assert same_bits(part.all_reduce(source), folded(rows, "sum"))
        source[:] = rows[part.rank]
        assert same_bits(part.all_reduce_async(source, "mean").wait(), folded(rows, "mean"))
    assert part.settings() == comm.settings() | {"name": name, "observers": (), "transport": part.transport}


def test_parts_of_parts(comm):
    whole = comm
    while whole.size > 1:
        whole = whole.split(whole.rank % 2, name="half")
        assert whole.all_gather_object(comm.rank) == [r for r in range(comm.size) if r % _stride(comm, whole) ==
                                                      comm.rank % _stride(comm, whole)]  # fmt: skip


def _stride(comm, part) -> int:
    stride = 1
    while -(-(comm.size - comm.rank % stride) // stride) != part.size or stride == 1:
        stride *= 2
    return stride


def test_a_part_is_closed_with_the_whole_and_may_be_closed_before(comm):
    first, second = comm.split(0, name="a"), comm.split(comm.rank, name="b")
    inner = first.split(0, name="c")
    second.finalize()
    comm.barrier()
    comm.finalize()
    for part in (first, second, inner):
        with pytest.raises(ArgumentError, match="expected an open one"):
            part.barrier()
        part.finalize()  # does nothing


@pytest.mark.mpi(min_size=2)
def test_nothing_is_left_in_shared_memory():
    def used() -> int:
        stat = os.statvfs("/dev/shm")
        return (stat.f_blocks - stat.f_bavail) * stat.f_frsize

    comm = Communicator()
    comm.split(0).finalize()
    comm.barrier()
    before = min(comm.all_gather_object(used()))
    for _ in range(20):
        parts = [comm.split(comm.rank % 2, name="dp"), comm.split(0, name="tp")]
        for part in parts:
            part.allocate(1 << 20)
        for part in parts:
            part.finalize()
    comm.barrier()
    assert min(comm.all_gather_object(used())) - before < 20 << 20  # 40 MiB a rank were allocated; others use it too


@pytest.mark.parametrize(
    ("color", "key", "name", "message"),
    [
        (-1, None, "", r"color: expected a number from 0 up, or None for no part, got -1"),
        ("a", None, "", r"color: expected a number from 0 up, or None for no part, got 'a'"),
        (0, 1.5, "", r"key: expected a number, got 1\.5"),
        (0, None, 3, r"name: expected text, got 3"),
    ],
)
def test_a_bad_argument_is_refused_on_all_ranks(comm, color, key, name, message):
    last = comm.size - 1
    arguments = (color, key, name) if comm.rank == last else (0, None, "")
    with pytest.raises(ArgumentError, match=f"^{message} \\(on rank {last}\\)$") as caught:
        comm.split(*arguments[:2], name=arguments[2])
    one_line(caught)
    assert comm.split(0).size == comm.size


@pytest.mark.mpi(min_size=2)
def test_a_part_whose_ranks_name_it_differently_is_refused(several):
    with pytest.raises(MismatchError, match="name"):
        several.split(0, name="dp" if several.rank == 0 else "tp")


@pytest.mark.mpi(min_size=2)
def test_a_part_has_a_transport_of_its_own(several):
    through_mpi = several.split(0, transport="mpi")
    assert (through_mpi.transport, through_mpi.shares_memory) == ("mpi", False)
    assert several.split(0).transport == several.transport
    with pytest.raises(ArgumentError, match=r"^transport: expected one of auto, shared, mpi, solo, got 'tcp'$"):
        several.split(0, transport="tcp")
    with pytest.raises(MismatchError, match=r"^transport: expected the same on every rank"):
        several.split(0, transport="mpi" if several.rank == 0 else "auto")


# --- names ---


def test_the_whole_counts_what_its_named_parts_do_under_their_names(comm):
    seen = Recorder()
    comm.add_observer(seen)
    part, unnamed = comm.split(0, -comm.rank, name="dp"), comm.split(0)
    before_s = comm.communicated()
    for each in (part, unnamed):
        memory = each.allocate(4000).view(np.float32)
        each.all_reduce(memory, label="gradients")
        each.barrier()
    with part.phase("forward", "x"):
        pass
    rows = {(row["operation"], row["label"], row["part"]): row for row in comm.stats.as_dict()["operations"]}
    assert rows["all_reduce", "gradients", "dp"]["bytes"] == 4000 and rows["barrier", "", "dp"]["calls"] == 1
    assert ("all_reduce", "gradients", "") not in rows and "gradients on dp" in str(comm.stats.table())
    events = [event for event in seen.events if event.label == "gradients"]
    assert [(event.part, event.part_size) for event in events] == [("dp", comm.size)]
    assert comm.communicated() - before_s >= events[0].seconds
    assert comm.stats.as_dict()["phases"][0]["label"] == "x"
    assert part.stats.total("all_reduce", "gradients")["calls"] == 1
    assert "Communication on dp per rank" in str(part.stats.table())
    assert "Communication on dp per rank" in str(part.merged_stats().table())


@pytest.mark.mpi(min_size=2)
def test_the_last_rank_is_named_by_its_number_in_the_whole(auto):
    seen = Recorder()
    auto.add_observer(seen)
    part = auto.split(0, -auto.rank, name="dp")
    memory = part.allocate(400).view(np.float32)
    part.barrier()
    if part.rank == part.size - 1:  # rank 0 of the whole
        time.sleep(0.05)
    part.all_reduce(memory, label="late")
    (event,) = [event for event in seen.events if event.label == "late"]
    assert event.last_rank == 0


@pytest.mark.mpi(min_size=3)
def test_bandwidth_is_that_of_the_part(auto):
    part = auto.split(min(auto.rank, 1), name="dp")  # rank 0, and the others
    part.all_reduce(np.ones(1000), label="x")
    row = auto.stats.total("all_reduce", "x")
    if auto.rank == 0:
        assert row["busbw_bytes_per_s"] is None
    else:
        factor = bus_factor("all_reduce", auto.size - 1)
        assert row["busbw_bytes_per_s"] == pytest.approx(row["algbw_bytes_per_s"] * factor)
        merged = type(auto.stats).merged([auto.stats.state()] * 2, auto.size)
        assert merged.total("all_reduce", "x")["busbw_bytes_per_s"] == pytest.approx(row["busbw_bytes_per_s"])


@pytest.mark.mpi(min_size=2)
def test_a_mismatch_names_the_part_its_ranks_and_those_of_the_world(several):
    part = several.split(0, -several.rank, name="dp")
    last = several.size - 1
    with pytest.raises(MismatchError) as caught:
        part.all_reduce(np.ones(3 + (part.rank == 0)), label="gradients")
    assert re.search(rf"dp rank 0 \(world rank {last}\) in all_reduce 'gradients' #1 \(sum of 4 ", one_line(caught))
    with pytest.raises(ArgumentError, match=rf"a reason \(on dp rank 0 \(world rank {last}\)\)"):
        if part.rank == 0:
            part.runner.refuse("a reason")
        part.barrier()


@pytest.mark.mpi(min_size=2)
def test_a_stalled_collective_names_the_part(capfd):
    comm = Communicator(stall_warning_s=0.3)
    part = comm.split(0, -comm.rank, name="dp")
    page = part.world.status_page
    if part.rank == 0:  # the last rank of the whole comes when another has reported that it is missing
        deadline = time.monotonic() + 20
        while not page.reported_ns and time.monotonic() < deadline:
            time.sleep(0.01)
    part.all_reduce(np.ones(5), label="ours")
    lines = [line for lines in comm.all_gather_object(capfd.readouterr().err.splitlines()) for line in lines]
    last = comm.size - 1
    expected = (
        rf"clcomm: dp rank \d+ \(world rank \d+\) has waited [\d.]+ s in all_reduce 'ours' #1 \([^)]*\) of dp "
        rf"\(world ranks [^)]* and 0\), called at .*; missing: .*dp ranks? 0\b[^(]*\(world ranks? {last}\b"
    )  # a busy machine may keep other ranks away too
    assert [line for line in lines if re.match(expected, line)], lines


@pytest.mark.mpi(min_size=2)
def test_a_timeline_names_the_part_and_its_arrows_stay_within_it(auto, tmp_path):
    folder = auto.broadcast_object(str(tmp_path))
    part = auto.split(auto.rank % 2, name="dp")
    path = f"{folder}/t.json.gz"
    with Trace(auto, path):
        for _ in range(5):
            part.all_reduce(part.allocate(4000).view(np.float32), label="gradients")
    if auto.rank:
        return
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    slices = [event for event in events if event["name"] == "all_reduce gradients on dp"]
    assert len(slices) == 5 * auto.size and {each["args"]["ranks of part"] for each in slices} <= {1, 2}
    flows: dict[str, set[int]] = {}
    for event in events:
        if "bind_id" in event:
            flows.setdefault(event["bind_id"], set()).add((event["pid"] - 1000) % 2)
    assert all(len(parities) == 1 for parities in flows.values())


def test_a_thread_of_the_program_may_split(comm):
    found = []
    thread = threading.Thread(target=lambda: found.append(comm.split(0)))
    thread.start()
    thread.join()
    assert found[0].size == comm.size


def test_no_copies(comm):
    with pytest.raises(ClcommError):
        comm.split(0, name="dp").__reduce__()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["halves", "first-alone", "interleaved", "crossed"])
def test_a_part_over_several_hosts_sums_host_by_host(monkeypatch, name):
    monkeypatch.setattr(mpi_communicators, "host_of", lambda comm: pretended_host(name, comm))
    whole = Communicator()
    part = whole.split(0, -whole.rank, name="dp")
    hosts = layout_hosts(name, part.size)
    assert part.hosts == len(hosts)
    rows = [drawn(rank, 5001, "float32") for rank in range(part.size)]
    nested = len(hosts) > 1 and any(len(ranks) > 1 for ranks in hosts)
    source = part.allocate(rows[0].nbytes).view(np.float32)
    source[:] = rows[part.rank]
    assert same_bits(part.all_reduce(source), folded(rows, "sum", hosts if nested else None))
