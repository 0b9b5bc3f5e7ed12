"""Where a job's output ends, as /proc shows it: a real launcher on a pseudo-terminal, in the ways jobs start."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
import time
from pathlib import Path

import pytest

from clcomm.base.console.terminal import LEAST_WIDTH, PLAIN_WIDTH
from tests.faults.launch import clean_environment, mpiexec

ROOT = Path(__file__).resolve().parents[2]
REPORT = """
import json, os, sys
from clcomm.base.console.terminal import output_width, terminal_of_output
found = terminal_of_output()
report = {"width": output_width(), "shown": found is not None, "live": found is not None and found.may_repaint()}
report["errors"] = found is not None and found.takes_errors
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")) == "0":
    open(sys.argv[1], "w").write(json.dumps(report))
"""


def shell(script: str, columns: int, **environment: str) -> None:
    """Run a script in a shell with job control, on a pseudo-terminal of its own; wait for its end."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execvpe(
            "bash", ["bash", "--norc", "-m", "-c", script], {**clean_environment(), "TERM": "xterm", **environment}
        )
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 25, columns, 0, 0))
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            if not os.read(terminal, 4096):
                break
        except OSError:  # the shell has ended
            break
    os.waitpid(pid, 0)
    os.close(terminal)


def found(tmp_path: Path, script: str, columns: int = 77, **environment: str) -> dict[str, object]:
    """Return what rank 0 of a job that a shell starts on a terminal finds out; LAUNCH stands for the job."""
    (tmp_path / "report.py").write_text(REPORT)
    report = tmp_path / "found.json"
    report.unlink(missing_ok=True)
    job = f"{mpiexec()} -n 2 {sys.executable} {tmp_path / 'report.py'} {report}"
    shell(f"sleep 0.3; {script.replace('LAUNCH', job)}", columns, PYTHONPATH=str(ROOT), **environment)
    deadline = time.monotonic() + 60
    while not (report.exists() and report.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return json.loads(report.read_text())


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("script", "shown", "live"),
    [
        ("LAUNCH", True, True),
        ("LAUNCH 2> errors.log", True, True),
        ("LAUNCH < /dev/null", True, True),
        ("sh -c 'LAUNCH; true'", True, True),
        ("LAUNCH & wait", True, False),
        ("LAUNCH | cat", False, False),
        ("LAUNCH 2>&1 | tee log > /dev/null", False, False),
        ("LAUNCH > log", False, False),
        ("nohup LAUNCH > /dev/null", False, False),
        ("nohup LAUNCH", False, False),
        ("setsid -w LAUNCH", True, False),
        ("CI=1 LAUNCH", True, False),
        ("TERM=dumb LAUNCH", True, False),
        ("script -qc 'LAUNCH' log > /dev/null", True, True),
    ],
)
def test_a_rank_finds_the_terminal_that_shows_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, shown: bool, live: bool
) -> None:
    script = f"cd {tmp_path}; {script}"
    report = found(tmp_path, script)
    assert (report["shown"], report["live"]) == (shown, live)
    if not script.endswith("log > /dev/null"):  # script(1)'s terminal has no size of its own
        assert report["width"] == (77 if shown else PLAIN_WIDTH)
    assert report["errors"] == (shown and "errors.log" not in script)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("columns", [1, 40, 80, 120, 200])
def test_lines_have_the_width_of_the_terminal_or_of_columns(tmp_path: Path, columns: int) -> None:
    assert found(tmp_path, "LAUNCH", columns)["width"] == max(columns, LEAST_WIDTH)
    assert found(tmp_path, "COLUMNS=93 LAUNCH", columns)["width"] == 93
    assert found(tmp_path, "COLUMNS=93 LAUNCH | cat", columns)["width"] == 93


def test_a_training_run_behind_mpiexec_repaints_one_line_and_prints_lines_into_a_pipe(tmp_path: Path) -> None:
    options = "--data synthetic --model mlp --epochs 20 --max-steps 1500 --no-eval"
    job = f"{mpiexec()} -n 2 {sys.executable} -m examples.mnist {options}"
    log = tmp_path / "log"
    shell(f"script -qfc '{job}' {log} > /dev/null; {job} | cat > {tmp_path / 'piped'}", 80, PYTHONPATH=str(ROOT))
    live = re.findall(r"\r(step [^\r\n]*)\x1b\[K", log.read_bytes().decode())
    assert len(live) >= 2 and live[-1].startswith("step 1500/1500")
    piped = (tmp_path / "piped").read_text()
    assert "\r" not in piped and "\x1b" not in piped
    assert re.findall(r"^step (\d+)/1500", piped, re.MULTILINE)[-1] == "1500"


@pytest.mark.parametrize("planted", ["\x1b[2J\x07", "\x9b31m", "a\rb", "\u202ertl", "\x00\x08\x7f"])
def test_what_others_say_moves_no_cursor_and_rings_no_bell(planted, capfd, tmp_path):
    """In lines, tables, their titles and notes, and what `clcomm top` and `run` say of a job."""
    from types import SimpleNamespace

    from clcomm.base.console.table import TextColumn, TextTable
    from clcomm.base.errors import escaped
    from clcomm.comm.watch.endings import print_line
    from clcomm.jobs.launch import rank_logs
    from clcomm.jobs.launch.supervisor import print_notice
    from clcomm.jobs.top import view

    said = f"before {planted} after"
    (tmp_path / "rank-0.log").write_text(f"clcomm: {said}\n", newline="")
    job = SimpleNamespace(program=said, pid=1, size=2, about={}, started_s=0.0)
    rows = [view.RankRow(0, "running", said, (), 1, 1.0, 1, 1.0, 0.1, 0.1, 1, 1.0, 1, 0.1, said)]
    table = TextTable([TextColumn("what", right=False)], [[said]], title=said, note=said)
    texts = [str(table), str(view.table(job, rows)), view.json_line(job, rows), view.title(job, rows), escaped(said)]
    print_line(said)
    print_notice(said)
    rank_logs.tell(str(tmp_path), 1)
    texts.append(capfd.readouterr().err)
    assert texts[-1].count("after") >= 2
    for text in texts:
        assert "before" in text and "after" in text
        assert all(each.isprintable() or each == "\n" for each in text), text
    assert escaped("a\tb\nc é 漢") == "a\tb\nc é 漢"
