"""The watchdog: who is missing, where they are, and the end of a job that hangs."""

from __future__ import annotations

import math
import re
import time

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.comm.stats.events import Call
from clcomm.comm.stats.flight_recorder import FlightRecorder
from clcomm.comm.watch import collective_watchdog
from clcomm.comm.watch.collective_watchdog import Watchdog
from clcomm.comm.watch.job import Limits
from clcomm.comm.watch.stall_message import describe
from clcomm.comm.watch.status_page import StatusPage

CALL = Call("all_reduce", "gradients", "shared", 4000, op="mean", count=1000, dtype=np.dtype("float32"), bucket=3)
NO_LOOKING = Limits(1000.0, math.inf)  # the tests look by themselves


class Watched:
    current = interrupt = None
    size = 3
    unfinished = staticmethod(list)


@pytest.fixture
def dogs():
    """Three ranks' watchdogs in one process, which share a page."""
    memory = memoryview(bytearray(2048 * 4))
    made = [Watchdog(Watched, StatusPage(memory, range(3), rank), NO_LOOKING, FlightRecorder()) for rank in range(3)]
    yield made
    for dog in made:
        dog.stop()


def entered(seconds_ago: float, sequence: int = 12, call: Call = CALL):
    return call, sequence, time.perf_counter() - seconds_ago


def test_ranks_elsewhere_in_the_program_are_named_with_their_place(dogs) -> None:
    dogs[0].look(entered(7))
    dogs[1].look(None)
    dogs[2].look(entered(3))
    message = describe(0, dogs[0]._page.read(), 7.04)
    assert message.startswith(
        "rank 0 has waited 7.0 s in all_reduce 'gradients' #12 (mean of 1,000 float32, bucket 3), called at "
        "job/test_collective_watchdog.py:"
    )
    assert "; missing: rank 1 (in no collective but at job/test_collective_watchdog.py:" in message
    assert "rank 2" not in message


def test_ranks_in_another_collective_are_named_with_it(dogs) -> None:
    dogs[0].look(entered(7))
    for rank in (1, 2):
        dogs[rank].look(entered(2, sequence=13, call=Call("barrier", "", "shared")))
    assert "; missing: ranks 1 and 2 (in barrier #13 at job/" in describe(0, dogs[0]._page.read(), 7)


def test_a_collective_that_all_are_in_has_no_rank_missing(dogs) -> None:
    for dog in dogs:
        dog.look(entered(7))
    assert describe(1, dogs[1]._page.read(), 7).endswith("; no rank is missing")


def test_the_lowest_waiting_rank_reports_once(dogs, capfd) -> None:
    for dog in dogs:
        dog.limits = Limits(5.0, 60.0)
    stalls = {1: entered(6), 2: entered(7)}
    dogs[0].look(None)
    for _ in range(3):
        for rank, current in stalls.items():
            dogs[rank].look(current)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("clcomm: rank 1 has waited 6.0 s in ")
    assert lines[0].endswith("; after 60 s the job ends")


def test_every_rank_dumps_once_when_the_job_ends(dogs, capfd, tmp_path) -> None:
    dogs[0]._page.dump_folder = str(tmp_path)
    for _ in range(2):
        for dog in dogs:
            dog.look(entered(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.json", "rank-1.json", "rank-2.json"]
    assert capfd.readouterr().err.count("last operations: none") == 3
    assert all(line.dumped for line in dogs[0]._page.read())


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_a_rank_that_comes_late_is_named(transport, capfd) -> None:
    with Communicator(transport=transport, stall_warning_s=0.3) as comm:
        if comm.rank == comm.size - 1:
            comm.lifetime.watchdog.look(None)  # so that its place is known
            deadline = time.monotonic() + 60
            while not comm.world.status_page.reported_ns and time.monotonic() < deadline:
                time.sleep(0.01)
        comm.all_reduce(np.zeros(4), label="late")
        lines = [line for line in capfd.readouterr().err.splitlines() if "in all_reduce 'late' #1" in line]
        lines = [line for part in comm.all_gather_object(lines) for line in part]
        assert lines, "no rank has reported"
        here = rf"\brank {comm.size - 1} \(in no collective but at job/test_collective_watchdog.py:"
        for line in lines:  # whichever of the others comes first
            assert re.match(r"clcomm: rank \d has waited [\d.]+ s in ", line) and re.search(
                f"; missing: .*{here}", line
            )


UNCOUNTED, RECV = Call("adopt", "", "mpi", is_counted=False), Call("recv", "", "mpi", is_counted=False, peer=1)
RECV_FROM_ANY = Call("recv", "", "mpi", is_counted=False, takes_any=True)


@pytest.mark.parametrize(
    ("call", "left", "missed"),
    [
        (CALL, {1: 11, 2: 12}, 1),
        (CALL, {1: 12, 2: 13}, None),
        (UNCOUNTED, {2: 12}, 2),
        (UNCOUNTED, {2: 13}, None),
        (RECV, {1: 99}, 1),
        (RECV, {2: 0}, None),
        (RECV_FROM_ANY, {1: 99}, None),
        (RECV_FROM_ANY, {1: 99, 2: 0}, 1),
    ],
)
def test_a_rank_that_has_left_is_missed_where_a_call_needs_it(call: Call, left: dict, missed: int | None) -> None:
    assert call.misses(left, 3, 12) == missed


def test_its_own_failure_is_no_reason_for_the_job_to_end(monkeypatch, caplog) -> None:
    watched = Watched()
    dog = Watchdog(watched, StatusPage.alone(0), Limits(0.04, math.inf), FlightRecorder())
    monkeypatch.setattr(dog, "look", lambda current: 1 / 0)
    dog._thread.join(20)
    assert not dog._thread.is_alive() and "goes on unwatched" in caplog.text


def test_its_release_uses_no_name_of_its_module() -> None:
    """What it watches may end with Python itself, when the names of modules are gone."""
    assert not set(Watchdog._release.__code__.co_names) & set(vars(collective_watchdog))


def test_it_does_not_keep_what_it_watches_alive() -> None:
    watched = Watched()
    dog = Watchdog(watched, StatusPage.alone(0), Limits(0.04, math.inf), FlightRecorder())
    del watched
    dog._thread.join(20)
    assert not dog._thread.is_alive()


@pytest.mark.mpi(min_size=2)
def test_the_thread_ends_with_the_communicator(several) -> None:
    thread = several.lifetime.watchdog._thread
    assert thread.is_alive()
    several.finalize()
    assert not thread.is_alive()
