"""`clcomm top`: what it shows of jobs that run, end, cannot be read, or belong to somebody else."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.comm.stats import events
from clcomm.comm.stats.events import Collective
from clcomm.comm.stats.flight_recorder import FlightRecorder
from clcomm.comm.watch import figures, running_jobs
from clcomm.comm.watch.other_hosts import packed, unpacked
from clcomm.comm.watch.running_jobs import find_jobs, job_description
from clcomm.comm.watch.status_page import FORMAT, NAME, RankStatus, StatusPage
from clcomm.jobs.top import view
from clcomm.jobs.top.view import rows_of
from clcomm.tools import cli
from tests.faults.launch import ROOT, clean_environment, mpiexec
from tests.helpers import one_line
from tests.multihost.two_hosts import TwoHosts, environment, refusal
from tests.other_user import as_nobody

FIGURES = {
    "step": 1234, "steps_per_s": 12.5, "samples": 39488, "samples_per_s": 400.0, "phase": "forward_backward",
    "collectives": 99, "communication": 0.39, "waiting": 0.12, "waits_for": 2, "memory": 312 << 20, "cores": 0.98,
}  # fmt: skip


class OneRank:
    """A communicator of one rank, for `StatusPage.of_host`."""

    def Get_rank(self) -> int:
        return 0

    def bcast(self, value: Any, root: int) -> Any:
        return value

    def allgather(self, value: Any) -> list[Any]:
        return [value]


def public_page(**about: Any) -> StatusPage:
    """Return the open page of a made-up job of one rank, this process's."""
    page = StatusPage.of_host(OneRank(), [0], 0, public_size=1)
    page.describe(job_description([0], 1, 1, None) | about)
    page.write(0, 0, "", "train.py:5 in main", json.dumps(FIGURES))
    return page


def own_jobs(monkeypatch) -> None:
    """Let this process see its own pages alone, whatever else runs on the machine."""
    every = running_jobs._open_pages
    monkeypatch.setattr(running_jobs, "_open_pages", lambda: (each for each in every() if each[0] == os.getpid()))


# --- finding jobs ---


def test_a_board_is_found_until_it_is_hidden(monkeypatch):
    own_jobs(monkeypatch)
    page = public_page()
    ((job,), problems) = find_jobs()
    assert (job.pid, job.size, job.ranks, problems) == (os.getpid(), 1, [0], [])
    (row,) = rows_of(job.lines())
    assert (row.step, row.samples_per_s, row.doing, row.state) == (1234, 400.0, "forward_backward", "running")
    page.hide()
    assert find_jobs() == ([], [])


def test_the_board_of_a_part_is_not_found(monkeypatch):
    own_jobs(monkeypatch)
    page = StatusPage.of_host(OneRank(), [0], 0)
    page.describe(job_description([0], 2, 1, None))
    assert find_jobs() == ([], []) and not page.is_public


def test_another_user_finds_nothing():
    page, parent = public_page(), os.getpid()
    assert parent in {pid for pid, _ in running_jobs._open_pages()}

    def found() -> bool:
        return parent in {pid for pid, _ in running_jobs._open_pages()}

    assert not as_nobody(found)

    def opened() -> bool:
        return any(os.access(f"/proc/{parent}/fd/{number}", os.R_OK) for number in range(200))

    assert not as_nobody(opened), "nor does the kernel let it look"
    page.hide()


@contextmanager
def memory_file(content: bytes) -> Iterator[int]:
    descriptor = os.memfd_create(NAME)
    os.write(descriptor, content)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def content_of(page: StatusPage, cut_to: int | None = None, **words: int) -> bytes:
    content = bytearray(page._common_line[0]) + bytearray(page._common_line[1])
    for line in page._lines:
        content += bytes(line[0]) + bytes(line[1])
    content += bytes(page._description)
    for index, value in words.items():
        at = 8 * int(index.removeprefix("word_"))
        content[at : at + 8] = value.to_bytes(8, sys.byteorder)
    return bytes(content[:cut_to])


@pytest.mark.parametrize(
    ("cut_to", "words", "said"),
    [
        (None, {"word_2": FORMAT + 1}, rf"its format is {FORMAT + 1}, this clcomm reads {FORMAT}"),
        (100, {}, "it is cut off"),
        (2048, {}, "it is cut off"),
        (5000, {"word_4": 8000}, "it is cut off"),
        (None, {"word_3": 10**6}, "it is cut off"),
        (None, {"word_4": 5}, r".*"),
    ],
)
def test_a_board_that_cannot_be_read_is_one_line(cut_to, words, said, monkeypatch):
    own_jobs(monkeypatch)
    page = public_page()
    content = content_of(page, cut_to, **words)
    page.hide()
    with memory_file(content), pytest.raises(view.NoJobError) as caught:
        view.choose(None)
    line = one_line(caught)
    assert re.fullmatch(
        rf"top: the job of process {os.getpid()} cannot be read: {said}; use the clcomm of that job", line
    )
    assert caught.value.exit_code == 1


def test_no_job_is_one_line(monkeypatch):
    own_jobs(monkeypatch)
    with pytest.raises(view.NoJobError) as caught:
        cli.main(["top", "--once"])
    assert "no job of yours" in one_line(caught) and "mpiexec -n 4 python train.py" in one_line(caught)


def test_of_several_jobs_one_is_chosen(monkeypatch, capsys):
    own_jobs(monkeypatch)
    pages = [public_page(pid=pid, program=f"train{pid}.py") for pid in (11, 12)]
    with pytest.raises(ArgumentError) as caught:
        view.choose(None)
    assert "2 jobs run here: " in one_line(caught) and "(train11.py, 1 ranks)" in one_line(caught)
    assert cli.main(["top", "--once", "--job", "12"]) == 0
    assert capsys.readouterr().out.startswith("train12.py: ")
    with pytest.raises(ArgumentError) as caught:
        view.choose(13)
    assert one_line(caught).startswith("--job: expected one of ")
    for page in pages:
        page.hide()


# --- what a rank does ---


def line(rank: int, **given: Any) -> RankStatus:
    defaults = {"beat_ns": time.perf_counter_ns(), "key": 0, "began_ns": 0, "dumped": False, "state": "running",
                "text": "", "place": "a.py:1 in f", "figures": FIGURES}  # fmt: skip
    return RankStatus(rank, **{**defaults, **given})


def test_who_waits_long_waits_for_those_that_are_elsewhere():
    at = time.perf_counter_ns()
    waiting = {"beat_ns": at, "key": 9, "began_ns": at - 3 * 10**9, "text": "barrier #4"}
    rows = rows_of([line(0, **waiting), line(1, **waiting), line(2), line(3, key=8, began_ns=at)])
    assert [row.waits_for for row in rows] == [(2, 3), (2, 3), (), (2,)]
    assert [row.doing for row in rows][:3] == ["barrier #4 for 3 s", "barrier #4 for 3 s", "forward_backward"]


@pytest.mark.parametrize(
    ("given", "state", "shown"),
    [
        ({"state": "stopped"}, "stopped", "stopped: forward_backward"),
        ({"state": "dead"}, "dead", "dead: forward_backward"),
        ({"state": "unknown", "figures": {}}, "unknown", "its host does not answer"),
        ({"text": "has left the program"}, "left", "has left the program"),
        ({"beat_ns": 1}, "silent", r"silent for \d+ s: forward_backward"),
        ({"figures": {}}, "starting", "starting: a.py:1 in f"),
        ({"figures": {"step": "x", "waits_for": [1], "memory": None}}, "running", "a.py:1 in f"),
        ({"figures": {"phase": ""}, "place": "<frozen x>:1 in g, from b.py:2 in h"}, "running", "b.py:2 in h"),
    ],
)
def test_states_of_ranks(given, state, shown):
    (row,) = rows_of([line(0, **given)])
    assert row.state == state and re.fullmatch(shown, view.cells(row)[-1])


def test_steps_are_those_of_one_moment():
    """Ranks that take 50 steps a second together, seen at moments up to a second apart; rank 3 is dead since long."""
    at = time.perf_counter_ns()

    def seen(rank: int, ago_s: float, **given: Any) -> RankStatus:
        step, before = (int(50 * (100.0 - each)) for each in (ago_s, ago_s + 1.0))
        figures = {**FIGURES, "step": step, "samples": 32 * step, "before": [before, 32 * before, 1.0]}
        return line(rank, beat_ns=at - int(ago_s * 1e9), figures=figures, **given)

    rows = rows_of([seen(0, 0.04), seen(1, 0.38), seen(2, 0.9), seen(3, 30.0, state="dead")])
    assert all(abs(row.step - 50 * 99.1) <= 1 and row.samples == 32 * row.step for row in rows[:3])
    assert rows[3].step == 50 * 70


@pytest.mark.parametrize("before", [None, [1], ["x", 0, 1.0], [2000, 0, 1.0], [10, 0, 0.0], [1234, 0, 1.0]])
def test_a_look_without_one_before_it_shows_its_own_step(before):
    assert rows_of([line(0, figures={**FIGURES, "before": before}), line(1, beat_ns=1)])[0].step == 1234


def test_a_collective_is_shown_with_its_bucket():
    doing = "all_reduce 'gradients' #8458 (mean of 118,400 float32, bucket 0, prepared as number 1) for 2 s"
    assert view.brief(doing) == "all_reduce 'gradients' (bucket 0) for 2 s" and view.brief("barrier #4") == "barrier"


def test_tables_fit_any_width(monkeypatch):
    own_jobs(monkeypatch)
    page = public_page()
    ((job,), _) = find_jobs()
    rows = rows_of([line(rank, figures={**FIGURES, "step": 10**rank}) for rank in range(12)])
    for width in (40, 80, 120, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        shown = str(view.table(job, rows)).splitlines()
        assert max(map(len, shown)) <= width and "\x1b" not in "".join(shown)
    few = str(
        view.table(job, rows_of([line(rank, state="running" if rank != 9 else "stopped") for rank in range(12)]), 3)
    )
    assert "stopped" in few and "9 more ranks" in few
    assert json.loads(view.json_line(job, rows))["ranks"][3]["step"] == 1000
    page.hide()


def test_figures_reach_other_hosts():
    (sent,) = packed([line(5)])
    (row,) = rows_of(unpacked(sent))
    assert (row.rank, row.step, row.memory) == (5, 1234, 312 << 20)
    assert unpacked(b'[[1,2,3,4,false,"a","b","c",5]]') == []


# --- figures ---


class Watched:
    sequence = 7

    def communicated(self) -> float:
        return 0.0


def test_rates_are_those_of_the_steps_begins(monkeypatch):
    for name in ("step", "step_ns", "samples", "numbered"):
        monkeypatch.setattr(events.NOW, name, getattr(events.NOW, name))
    taken = figures.Figures(FlightRecorder())
    begin = time.perf_counter_ns() - 3 * 10**9
    for number in range(4):
        events.NOW.numbered, events.NOW.step, events.NOW.step_ns = True, 10 + 5 * number, begin + number * 10**9
        events.NOW.samples = 160 * number
        found = json.loads(taken.take(Watched(), None))
    assert (found["step"], found["steps_per_s"], found["samples_per_s"]) == (25, 5.0, 160.0)
    assert found["collectives"] == 7 and found["memory"] > 1 << 20 and found["waits_for"] == -1
    events.NOW.step, events.NOW.step_ns = 1, time.perf_counter_ns()  # another run
    assert json.loads(taken.take(Watched(), None))["steps_per_s"] == 0.0
    before = events.NOW.step
    events.count_step(1)
    assert events.NOW.step == before, "the program numbers its steps"


def test_optimizers_that_take_turns_count_once(monkeypatch):
    for name, value in (("step", 0), ("step_ns", 0), ("numbered", False), ("stepped", set())):
        monkeypatch.setattr(events.NOW, name, value)
    begun = [events.count_step(which) for _ in range(12) for which in (1, 2, 3)]
    assert events.NOW.step == sum(begun) == 12


def test_waits_name_the_rank_that_came_last():
    recorder = FlightRecorder()
    taken = figures.Figures(recorder)
    began_s = time.perf_counter()
    for last, wait_s in ((1, 0.001), (2, 0.004), (1, 0.001)):
        recorder.collective_finished(
            Collective("all_reduce", "", 8, wait_s, "shared", 1, began_s=began_s, wait_s=wait_s, last_rank=last)
        )
    time.sleep(0.02)
    found = json.loads(taken.take(Watched(), None))
    assert found["waits_for"] == 2 and 0 < found["waiting"] < 0.4
    assert json.loads(taken.take(Watched(), None))["waits_for"] == -1, "no collective since"


@pytest.mark.mpi(min_size=2)
def test_ranks_find_their_job(auto):
    """Each rank of a host finds the one page of its job, with all ranks; a part has none."""
    part = auto.split(auto.rank % 2)
    auto.barrier()
    mine = {os.getpid() for _ in (0,)} and set(auto.all_gather_object(os.getpid()))
    jobs = [job for job in find_jobs()[0] if job.about["pid"] in mine]
    assert [job.size for job in jobs] == [auto.size]
    assert [line.rank for line in jobs[0].lines()] == list(range(auto.size))
    auto.all_reduce(np.ones(3, np.float32))
    assert (part is not None and not part.world.status_page) or not part.world.status_page.is_public


# --- whole jobs ---

LOOP = """
import time
from clcomm import Communicator
from clcomm.comm.watch import note_samples, note_step, run
import numpy as np

def main():
    comm = Communicator()
    for step in range(1, 100_000):
        note_step(step)
        note_samples(32)
        with comm.phase("forward_backward"):
            time.sleep(0.02 if comm.rank else 0.03)
        comm.all_reduce(np.ones(100, np.float32))

run(main)
"""


@contextmanager
def running(command: list[str], **more: Any) -> Iterator[subprocess.Popen]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                          **{"env": clean_environment(), **more}) as job:  # fmt: skip
        try:
            yield job
        finally:
            os.killpg(job.pid, signal.SIGKILL)


def looked_at(program: str, command: list[str], **more: Any) -> dict[str, Any]:
    """Return what `top --once --json` says of the job of a program, once all of its ranks have taken steps."""
    deadline = time.monotonic() + 60
    while True:
        pids = [job.pid for job in find_jobs()[0] if program in job.program]
        if pids:
            done = subprocess.run(
                [*command, "--once", "--json", "--job", str(pids[0])],
                capture_output=True,
                text=True,
                timeout=60,
                **more,
            )
            report = json.loads(done.stdout) if done.returncode == 0 else {"ranks": []}
            if report["ranks"] and all(rank["steps_per_s"] > 0 for rank in report["ranks"]):
                return report
        assert time.monotonic() < deadline, "no figures"
        time.sleep(0.3)


TOP = [sys.executable, "-m", "clcomm", "top"]


def test_a_running_job_and_its_end(tmp_path):
    script = tmp_path / "watched.py"
    script.write_text(LOOP)
    with running([mpiexec(), "-n", "2", sys.executable, str(script)]) as job:
        report = looked_at(str(script), TOP, cwd=ROOT, env=clean_environment())
        assert report["size"] == 2 and [rank["rank"] for rank in report["ranks"]] == [0, 1]
        for rank in report["ranks"]:
            assert rank["state"] == "running" and rank["memory"] > 1 << 20 and rank["samples"] == 32 * rank["step"]
            assert rank["doing"] == "forward_backward" or rank["doing"].startswith("all_reduce")
        assert 0 in report["ranks"][1]["waits_for"], "rank 0 is slower"
        command = [*TOP, "--interval", "0.2", "--job", str(report["pid"])]
        with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, cwd=ROOT, env=clean_environment()) as looking:
            assert looking.stdout is not None
            assert "watched.py" in looking.stdout.readline()
            os.killpg(job.pid, signal.SIGKILL)
            _, said = looking.communicate(timeout=60)
    assert (said, looking.returncode) == (f"the job of process {report['pid']} has ended\n", 0)


def test_ranks_of_another_host_are_shown_too(tmp_path):
    reason = refusal()
    if reason is not None:
        pytest.skip(reason)
    script = tmp_path / "on_hosts.py"
    script.write_text(LOOP)
    with TwoHosts() as hosts, running(hosts.command((1, 2), [str(script)]), env=environment()):
        inside = ["ip", "netns", "exec", hosts.names[0], *TOP]
        report = looked_at(str(script), inside, cwd=ROOT, env=environment())
    assert report["hosts"] == 2 and [rank["rank"] for rank in report["ranks"]] == [0, 1, 2]
    assert all(rank["state"] == "running" and rank["step"] > 0 for rank in report["ranks"])
