"""The page of a running job: what it shows, who gets it, and that it follows the job."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from clcomm.base.errors import ArgumentError
from clcomm.comm.watch.running_jobs import find_jobs
from clcomm.insight.report.formats import as_html
from clcomm.insight.report.live import LiveReport, PageServer, causes
from clcomm.jobs.top.view import NoJobError, RankRow
from clcomm.tools import cli
from tests.browser import SPACE, TAB, browser, needs_driver, waited_for
from tests.faults.launch import ROOT, clean_environment, mpiexec
from tests.top.test_top import LOOP, own_jobs, public_page, running


def row(rank: int, step: int = 10, **more: Any) -> RankRow:
    plain = RankRow(rank, "running", "optimizer", (), step, 12.5, 32 * step, 400.0, 0.4, 0.1, 1 << 28, 0.9, 99, 0.5, "")
    return plain._replace(**more)


def test_causes_name_who_is_awaited_and_who_does_not_run():
    rows = [row(0, waits_for=(2,), waiting=0.3), row(1, waits_for=(2,), waiting=0.1), row(2, state="stopped")]
    assert causes(rows) == [
        "Rank 2 is stopped: optimizer.",
        "Rank 2 keeps others waiting: ranks 0 and 1 waited for it most, 30% of the last second; it is in optimizer.",
    ]
    assert causes([row(0), row(1)]) == ["No rank keeps another waiting for more than 2% of the time."]
    assert causes([row(0, state="left"), row(1, state="left")])[0] == "Rank 0 has left the program: optimizer."


def test_curves_have_a_point_for_each_look_with_new_steps(monkeypatch):
    own_jobs(monkeypatch)
    page = public_page()
    live = LiveReport(find_jobs()[0][0])
    page.hide()
    assert len(live.look([row(0), row(1)]).charts) == 1, "no curve of one point"
    for step in (10, 12, 15):
        report = live.look([row(0, step), row(1, step)])
    assert report.charts[1].steps == (10, 12, 15)
    assert live.look([row(0, 3)]).charts[1:] == [], "another run has begun"
    text = as_html(report, "1 < 2")
    assert "<script>1 < 2</script>" in text and "script-src 'sha256-" in text and "<h1>" in text
    assert "script" not in as_html(report)


def test_only_the_whole_address_has_the_page():
    with PageServer(0) as server, PageServer(0) as other:
        server.page = "<p>figures"
        assert urllib.request.urlopen(server.address, timeout=10).read() == b"<p>figures"
        token = server.address.split("/")[-2]
        assert len(token) > 20 and token not in other.address
        for path in ("/", f"/{token}", f"/{token[:-1]}/", f"/x/{token}/", f"/{token}/x"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}{path}", timeout=10)
            assert refused.value.code == 403 and b"figures" not in refused.value.read()
        with pytest.raises(ArgumentError, match=rf"--serve: expected a free port, got {server.server_port}: "):
            PageServer(server.server_port)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ([], ArgumentError, "report: expected FILE, or --serve"),
        (["--job", "3", "run.json"], ArgumentError, "report: expected FILE, or --serve"),
        (["--serve", "0", "run.json"], ArgumentError, "--serve: shows a running job"),
        (["--serve", "-o", "x.html"], ArgumentError, "--serve: shows a running job"),
        (["--serve", "65536"], ArgumentError, "--serve: expected a whole number up to 65535"),
        (["--serve"], NoJobError, "report --serve: no job of yours with several ranks runs on this host; start one"),
    ],
)
def test_what_is_refused(arguments, error, said, monkeypatch):
    own_jobs(monkeypatch)
    with pytest.raises(error, match=said):
        cli.main(["report", *arguments])


@contextmanager
def served_job(tmp_path) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str], str]]:
    """Yield a job of two ranks, the command that serves its page, and the page's address."""
    script = tmp_path / "watched.py"
    script.write_text(LOOP)
    with running([mpiexec(), "-n", "2", sys.executable, str(script)]) as job:
        found = waited_for(lambda: [each.pid for each in find_jobs()[0] if str(script) in each.program], lambda: "")
        command = [sys.executable, "-m", "clcomm", "report", "--serve", "--job", str(found[0])]
        with subprocess.Popen(
            command, stdout=-1, stderr=-1, text=True, cwd=ROOT, env=clean_environment()
        ) as serving:  # fmt: skip
            assert serving.stdout is not None
            said = serving.stdout.readline() + serving.stdout.readline()
            address = re.search(r"^(http://127\.0\.0\.1:\d+/\S+/) has its page until Ctrl-C$", said, re.MULTILINE)
            assert address, said
            for thread in os.listdir(f"/proc/{serving.pid}/task"):
                with suppress(PermissionError):  # at idle priority a busy machine may leave it no time for a minute
                    os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))
            try:
                yield job, serving, address[1]
            finally:
                serving.kill()


def step_of(page: str) -> int:
    found = re.search(r"<b>([\d,]+)</b> <span>steps</span>", page)
    assert found, page
    return int(found[1].replace(",", ""))


def test_the_page_follows_the_job_until_ctrl_c(tmp_path):
    with served_job(tmp_path) as (_, serving, address):

        def fetched() -> str:
            return urllib.request.urlopen(address, timeout=30).read().decode()

        first = waited_for(lambda: (page := fetched()) and step_of(page) and page, fetched)
        waited_for(lambda: step_of(fetched()) > step_of(first), fetched)
        waited_for(lambda: "Rank 0 keeps others waiting: rank 1 " in fetched(), fetched)
        serving.send_signal(signal.SIGINT)
        _, said = serving.communicate(timeout=120)
    assert re.fullmatch(r"the page of process \d+'s job is no longer served\n", said) and serving.returncode == 0


@needs_driver
def test_a_browser_shows_the_progress_and_the_end(tmp_path):
    number = "return Number(document.querySelector('.tiles b').textContent.replaceAll(',', ''))"
    with served_job(tmp_path) as (job, serving, address), browser(tmp_path) as page:
        page.open(address)
        first = page.wait_for(number)
        page.wait_for(f"{number} > {first}")
        page.press(TAB, SPACE)
        assert page.run("return document.body.innerText").startswith("Go on\n\nPaused.")
        page.press(SPACE)
        page.wait_for(f"{number} > {page.run(number)}")
        os.killpg(job.pid, signal.SIGKILL)
        page.wait_for("return document.querySelector('[role=status]').textContent.includes('has ended')")
        _, said = serving.communicate(timeout=120)
    assert re.fullmatch(r"the job of process \d+ has ended\n", said) and serving.returncode == 0
