"""The last collectives in the format of PyTorch's flight recorder, as its analyser reads them."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.base.errors import OutputError
from clcomm.comm.stats.events import Call, Collective
from clcomm.comm.stats.flight_recorder import Frame, Group, trace_of
from tests.proofs.hangs import Verdict, analysers

FLOAT = np.dtype("float32")
GROUP = Group("7", "dp", (1, 3))


def event(operation: str, sequence: int, shape: tuple[int, ...] | None, nbytes: int, **more) -> Collective:
    dtype = "" if shape is None else "float32"
    return Collective(operation, "", nbytes, 1e-3, "shared", sequence, shape=shape, dtype=dtype, **more)


def entries(*finished: Collective, unfinished=(), frames=()) -> list[dict]:
    return pickle.loads(trace_of(finished, unfinished, GROUP, frames))["entries"]


@pytest.mark.parametrize(
    ("operation", "shape", "nbytes", "given", "got"),
    [
        ("all_reduce", (4, 5), 80, [[4, 5]], [[4, 5]]),
        ("all_gather", (3,), 24, [[3]], [[2, 3]]),
        ("all_gather", (10,), 40, [[5]], [[10]]),
        ("all_gather", (10,), 36, [[5]], [[10]]),
        ("reduce_scatter", (6, 2), 48, [[6, 2]], [[3, 2]]),
        ("all_to_all", None, 40, [[]], [[]]),
        ("barrier", None, 0, [[]], [[]]),
    ],
)
def test_sizes_are_what_goes_in_and_what_comes_out(operation, shape, nbytes, given, got) -> None:
    (entry,) = entries(event(operation, 4, shape, nbytes))
    assert (entry["input_sizes"], entry["output_sizes"]) == (given, got)
    assert entry["input_dtypes"] == entry["output_dtypes"] == (["float32"] if shape else [])


def test_a_rank_has_its_group_its_numbers_and_its_states() -> None:
    calls = [(Call("broadcast", "", "shared", count=8, dtype=FLOAT, nbytes=32), 12)]
    last = event("all_reduce", 11, (8,), 32, failed=True)
    ended = [
        event("all_reduce", 10, (8,), 32),
        event("send", 10, None, 9),
        event("barrier", 3, None, 0, part="tp"),
        last,
    ]
    content = pickle.loads(trace_of(ended, calls, GROUP, [Frame("step", "train.py", 7)]))
    assert content["version"] == "2.10"
    assert content["pg_config"] == {"7": {"name": "7", "desc": "dp", "ranks": "[1, 3]"}}
    found = [(each["collective_seq_id"], each["profiling_name"], each["state"]) for each in content["entries"]]
    assert found == [
        (10, "gloo:all_reduce", "completed"), (11, "gloo:all_reduce", "started"), (12, "gloo:broadcast", "started"),
    ]  # fmt: skip
    assert content["entries"][2]["frames"] == [{"name": "step", "filename": "train.py", "line": 7}]


def test_what_has_no_number_is_a_barrier_before_the_next_unless_one_with_a_number_waits() -> None:
    uncounted, counted = (
        Call("split", "", "mpi", is_counted=False),
        Call("all_reduce", "", "shared", count=8, dtype=FLOAT),
    )
    message = Call("recv", "", "mpi", is_counted=False, peer=1)
    assert [(e["record_id"], e["profiling_name"]) for e in entries(unfinished=[(uncounted, 4)])] == [
        (5, "gloo:barrier")
    ]
    named = Call("all_gather of 1,024 bytes", "", "mpi", is_counted=False)
    (entry,) = entries(unfinished=[(named, 4)])
    assert (entry["profiling_name"], entry["output_sizes"], entry["input_dtypes"]) == (
        "gloo:all_gather", [[2, 1024]], ["uint8"],
    )  # fmt: skip
    assert [e["record_id"] for e in entries(unfinished=[(uncounted, 4), (counted, 3)])] == [3]
    assert entries(unfinished=[(message, 4)]) == []


def shared_folder(comm: Communicator, tmp_path: Path) -> str:
    return comm.broadcast_object(str(tmp_path))


@pytest.mark.mpi(min_size=2)
def test_the_analyser_names_the_rank_that_has_not_started(torch, several, tmp_path) -> None:
    comm = several
    folder, last = shared_folder(comm, tmp_path), comm.rank == comm.size - 1
    for _ in range(70):  # more than are kept
        comm.all_gather(comm.reduce_scatter(np.ones((comm.size, 5), np.float32)))
    before, handle = comm.sequence, None
    if not last:
        handle = comm.all_reduce_async(np.ones(100, np.float32))
    comm.dump_operations(folder)
    (comm.all_reduce_async(np.ones(100, np.float32)) if handle is None else handle).wait()
    comm.barrier()
    sides = {frozenset({comm.size - 1}), frozenset(range(comm.size - 1))}
    assert analysers(comm.size, folder) == Verdict(before + 1, "all_reduce", frozenset(sides), "missing")
    comm.barrier()


@pytest.mark.mpi(min_size=2)
def test_a_part_has_the_worlds_ranks_and_no_fault_is_none(torch, several, tmp_path) -> None:
    comm = several
    folder = shared_folder(comm, tmp_path)
    part = comm.split(0 if comm.rank else None, name="workers")
    if part is not None and part.size == 1:
        part.dump_operations(folder)
        assert [path.name for path in Path(folder).iterdir()] == ["rank-0.json"]
    elif part is not None:
        part.all_reduce(np.ones(6))
        part.broadcast(np.ones(3, np.int32))
        part.dump_operations(folder)
        part.barrier()
        assert sorted(path.name for path in Path(folder).glob("trace_*")) == [f"trace_{r}" for r in range(1, comm.size)]
        assert analysers(comm.size, folder) == "no fault in 2 collectives"
    comm.barrier()


@pytest.mark.mpi(min_size=1)
def test_a_dump_that_cannot_be_written_is_one_line(auto, tmp_path) -> None:
    auto.dump_operations(str(tmp_path))
    with pytest.raises(OutputError, match="folder: expected a writable one without files of an earlier dump, got "):
        auto.dump_operations(str(tmp_path))
