"""The status page on which a host's ranks note what they do."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from clcomm.comm.watch import status_page
from clcomm.comm.watch.status_page import StatusPage

BYTES = 2048


def pages(ranks: int) -> list[StatusPage]:
    memory = memoryview(bytearray(BYTES * (1 + ranks)))
    return [StatusPage(memory, range(4, 4 + ranks), rank) for rank in range(4, 4 + ranks)]


def test_lines_are_read_as_they_were_written() -> None:
    first, second, _ = pages(3)
    first.write(77, 123, "all_reduce #1", "train.py:5 in main")
    second.write(0, 0, "", "x" * 5000)
    one, two, three = second.read()
    assert (one.rank, one.key, one.began_ns, one.text, one.place) == (4, 77, 123, "all_reduce #1", "train.py:5 in main")
    assert one.waits and one.state == "running" and not one.dumped and one.beat_ns > 0
    assert (two.text, two.waits) == ("", False) and len(two.place) == BYTES - 129, "cut where its space ends"
    assert (three.rank, three.beat_ns, three.text, three.place) == (6, 0, "", "")
    first.write(0, 0, "", "b")
    assert first.read()[0].place == "b"


def test_what_all_have_in_common() -> None:
    first, second = pages(2)
    assert (second.reported_ns, second.dump_folder) == (0, "")
    first.note_report()
    first.dump_folder = "/somewhere/ä"
    first.note_dump()
    assert second.reported_ns > 0 and second.dump_folder == "/somewhere/ä"
    assert [line.dumped for line in second.read()] == [True, False]


def test_one_of_several_ranks_says_why_the_job_ends(monkeypatch) -> None:
    for _ in range(3):
        several = pages(4)
        with ThreadPoolExecutor(4) as pool:
            assert sum(pool.map(StatusPage.claim_end, several)) == 1
        assert not any(page.claim_end() for page in several)
        monkeypatch.setattr(status_page, "_GRANTED_S", 0.0)  # that one has not ended it
        assert several[2].claim_end()
        monkeypatch.undo()


def test_stopped_and_dead_processes_are_known() -> None:
    page, _ = pages(2)
    child = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], stdout=-1)
    assert child.stdout is not None
    child.stdout.readline()
    words, _ = page._lines[1]
    with open(f"/proc/{child.pid}/stat") as file:
        words[1], words[2] = child.pid, int(file.read().rpartition(")")[2].split()[19])

    def becomes(state: str) -> bool:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if page.read()[1].state == state:
                return True
            time.sleep(0.01)
        return False

    assert becomes("running")
    os.kill(child.pid, signal.SIGSTOP)
    assert becomes("stopped")
    child.kill()
    assert becomes("dead"), "a zombie is dead"
    child.wait()
    child.stdout.close()
    assert becomes("dead")
    words[1], words[2] = os.getpid(), words[2] - 1
    assert becomes("dead"), "another process with its number is not it"


#: Takes all descriptors, then looks at itself, at a child that runs, and at one that has ended and is collected.
WITHOUT_DESCRIPTORS = """
import os, resource, subprocess, sys
from clcomm.base.host.rank_process import ancestors
from clcomm.comm.watch.exit_monitor_process import is_gone
from clcomm.comm.watch.status_page import StatusPage
from clcomm.comm.watch import worlds
from clcomm.comm.watch.other_hosts import Address, StatusClient
from clcomm.comm.watch.running_jobs import find_jobs
from clcomm.jobs.top.view import NoJobError, choose
from pathlib import Path
from tests.job.test_status_page import BYTES

page = StatusPage(memoryview(bytearray(BYTES * 4)), [0, 1, 2], 0)
children = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
for rank, child in enumerate(children, 1):
    page._lines[rank][0][1], page._lines[rank][0][2] = child.pid, int(
        Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
children[1].kill()
children[1].wait()
folder = Path(sys.argv[1])
os.mkfifo(worlds.pipe(folder))
listening = os.open(worlds.pipe(folder), os.O_RDWR)
client = StatusClient(bytes(16), [{3: Address(["127.0.0.1"], 9)}])
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
taken = []
while True:
    try:
        taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        break
found = [line.state for line in page.read()], [is_gone(os.getpid()), *(is_gone(each.pid) for each in children)]
found += [line.state for line in client.ask()], ancestors(os.getpid())[1]
said = []
for what in (lambda: worlds.tell(folder, worlds.JOINED, 0), lambda: choose(None)):
    try:
        what()
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
told = worlds.tell(folder, worlds.COPIED, 0)
for each in taken:
    os.close(each)
print([*found, *said, told])
children[0].kill()
"""


def test_without_a_free_descriptor_no_process_is_taken_for_dead(tmp_path) -> None:
    program = [sys.executable, "-c", WITHOUT_DESCRIPTORS, str(tmp_path)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    states, gone, others, launcher, tells, looks, copied = ast.literal_eval(ended.stdout)
    assert states == ["running", "running", "dead"] and gone == [False, False, True]
    assert others == ["unknown"] and launcher == 0 and not copied
    assert tells.startswith("ShortageError: ") and looks.startswith("NoJobError: ")
    assert all("Too many open files" in each for each in (tells, looks))
