"""`clcomm run -n 4 train.py`: what a script finds, how jobs end, and mistakes."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from clcomm.base.errors import LaunchError
from clcomm.comm.transport import mpi_runtime
from clcomm.jobs.launch import supervisor as launcher
from tests.faults.launch import HUNG_S, clean_environment, mpiexec
from tests.helpers import one_line

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

#: Writes what a rank finds to a file of its own.
FINDS = f"""
import json, os, sys
found = dict(argv=sys.argv, path=sys.path[0], name=__name__, file=__file__, main=sys.modules["__main__"].__file__)
found |= {{name: os.environ[name] for name in {VARIABLES}}}
with open(os.path.join(os.environ["OUT"], os.environ["RANK"]), "w") as file:
    json.dump(found, file)
"""


def start(folder: Path, arguments: Sequence[str], **environment: str) -> subprocess.Popen:
    mpiexec()  # skips where there is none
    return subprocess.Popen(
        ["env", "--default-signal=INT", sys.executable, "-m", "clcomm", "run", *arguments],
        env=clean_environment(**environment), cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def run(folder: Path, arguments: Sequence[str], **environment: str) -> tuple[int, str, str]:
    process = start(folder, arguments, **environment)
    try:
        out, err = process.communicate(timeout=HUNG_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"the job hung; it wrote:\n{process.communicate()}")
    return process.returncode, out, err


SPELLINGS = (
    ["-n", "{}"],
    ["-np", "{}"],
    ["--nproc-per-node", "{}", "--standalone"],
    ["--nproc_per_node={}", "--nnodes=1"],
)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("form", ["script", "script elsewhere", "module"])
def test_a_script_finds_torchruns_variables_and_what_python_gives_it(tmp_path, ranks, form):
    (tmp_path / "package").mkdir()
    script = tmp_path / "package" / "finds.py"
    script.write_text(FINDS)
    folder = tmp_path if form != "script" else script.parent
    name = {"script": "finds.py", "script elsewhere": "package/finds.py"}.get(form)
    job = [name] if name else ["-m", "package.finds"]
    out = tmp_path / "out"
    out.mkdir()
    counted = [word.format(ranks) for word in SPELLINGS[ranks % len(SPELLINGS)]]
    stale = {"RANK": "7", "WORLD_SIZE": "9", "MASTER_PORT": "1", "LOCAL_RANK": "3"}
    ended = run(folder, [*counted, *job, "--lr", "3", "-n", "9", "--restarts", "--", "x"], OUT=str(out), **stale)
    assert ended == (0, "", "")
    found = [json.loads((out / str(rank)).read_text()) for rank in range(ranks)]
    assert sorted(os.listdir(out)) == sorted(map(str, range(ranks)))
    assert len({each["MASTER_PORT"] for each in found}) == 1 and 1 < int(found[0]["MASTER_PORT"]) < 65536
    for rank, each in enumerate(found):
        numbers = [int(each[variable]) for variable in VARIABLES[:4]]
        assert numbers == [rank, ranks, rank, ranks]
        assert each["MASTER_ADDR"] == "127.0.0.1"
        assert each["argv"][1:] == ["--lr", "3", "-n", "9", "--restarts", "--", "x"]
        assert (each["name"], each["main"]) == ("__main__", each["file"])
        if name:
            assert (each["argv"][0], each["path"], each["file"]) == (name, str(script.parent), name)
        else:
            assert (each["argv"][0], each["path"], each["file"]) == (str(script), str(folder), str(script))


def test_master_address_and_port_can_be_given(tmp_path):
    (tmp_path / "finds.py").write_text(FINDS)
    options = ["-n", "2", "--master-addr", "localhost", "--master_port", "29555"]
    assert run(tmp_path, [*options, "finds.py"], OUT=str(tmp_path)) == (0, "", "")
    for rank in range(2):
        found = json.loads((tmp_path / str(rank)).read_text())
        assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("localhost", "29555")


GLOO = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = int(os.environ["LOCAL_RANK"]), dist.get_world_size()
values = torch.full((3,), float(rank + 1))
dist.all_reduce(values)
assert values.tolist() == [size * (size + 1) / 2] * 3, values
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
model(torch.ones(1, 4) * rank).sum().backward()
dist.destroy_process_group()
print("trained", flush=True)
"""


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_script_for_torchrun_and_gloo_runs(tmp_path, ranks):
    pytest.importorskip("torch")
    (tmp_path / "gloo.py").write_text(GLOO)
    code, out, err = run(tmp_path, ["-n", str(ranks), "gloo.py"])
    assert (code, out.count("trained")) == (0, ranks), err


FAILING = {
    "an exception": ("def inner(): raise ValueError('boom')\ninner()", 1),
    "a mistake": ("from clcomm.base.errors import ArgumentError\nraise ArgumentError('lr: expected more')", 2),
    "exit": ("sys.exit(5)", 5),
    "kill": ("os.kill(os.getpid(), 9)", 137),
    "syntax": ("compile('1 +', 'other.py', 'exec')", 1),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", FAILING)
@pytest.mark.parametrize("victim", [0, 2])
def test_the_end_of_one_rank_ends_the_job_with_its_code(tmp_path, kind, victim):
    statement, code = FAILING[kind]
    script = f"import os, sys, time\nif os.environ['RANK'] != '{victim}':\n    time.sleep(600)\n{statement}\n"
    (tmp_path / "fails.py").write_text(script)
    ended, _, err = run(tmp_path, ["-n", "3", "fails.py"])
    assert ended in ({code, 9} if kind == "kill" else {code}), err
    own = [line for line in err.splitlines() if line.startswith("clcomm")]
    if kind == "an exception":
        assert own == [f"clcomm: rank {victim} failed:"]
        trace = err[err.index("Traceback") :].splitlines()
        assert trace[1].strip() == 'File "fails.py", line 5, in <module>'
        assert not any(name in err for name in ("runpy", "launch/rank.py", "endings.py"))
        assert "ValueError: boom" in trace
    elif kind == "a mistake":
        assert own == [f"clcomm: rank {victim}: lr: expected more"]


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_script_is_restarted_only_where_that_was_asked_for(tmp_path, restarts):
    (tmp_path / "fails.py").write_text("import os\nprint(os.environ['CLCOMM_RESTART'])\nraise ValueError('boom')\n")
    asked = ["--restarts", str(restarts)] if restarts else []
    code, out, err = run(tmp_path, ["-n", "2", *asked, "--pause", "0.01", "fails.py"])
    assert code == 1
    assert sorted(out.split()) == sorted(str(number) for number in range(restarts + 1) for _ in range(2))
    assert err.count("clcomm run:") == (restarts + 1 if restarts else 0), err


def test_variables_are_passed_on_and_ranks_bound(tmp_path):
    (tmp_path / "job.py").write_text(
        "import os\nvalues = [os.environ[name] for name in ('GIVEN', 'OWN')]\n"
        "os.write(1, f'{values} {len(os.sched_getaffinity(0))}\\n'.encode())\n"
    )
    options = ["-x", "GIVEN=a=b c", "--env", "OWN", "--bind-to", "core"]
    code, out, err = run(tmp_path, ["-n", "2", *options, "job.py"], OWN="7")
    assert (code, err, set(out.splitlines())) == (0, "", {"['a=b c', '7'] 1"})


@pytest.mark.parametrize("command", [["python", "-u", "job.py"], ["python3", "-m", "job"]])
def test_horovodruns_options_are_taken_and_those_without_effect_named(tmp_path, command):
    names = ("HOROVOD_TIMELINE", "HOROVOD_FUSION_THRESHOLD", "HOROVOD_LOG_LEVEL", "HOROVOD_CYCLE_TIME")
    (tmp_path / "job.py").write_text(f"import os, sys\nprint([os.environ[name] for name in {names}], sys.argv[1:])\n")
    options = ["-np", "2", "-H", "localhost:2", "--output-filename", "logs", "--timeline-filename", "t.json"]
    options += ["--verbose", "--fusion-threshold-mb", "32", "--cycle-time-ms", "2.5", "--min-np", "1", "--gloo"]
    code, out, err = run(tmp_path, [*options, "-p", "22", *command, "--lr", "1"])
    assert (code, out) == (0, ""), err
    assert err == "clcomm run: ignored: --min-np, --gloo, -p; docs/horovod.md has horovodrun's options\n"
    for rank in range(2):
        text = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        assert text == "['t.json', '33554432', 'info', '2.5'] ['--lr', '1']\n"


def test_horovodruns_check_of_its_build_is_the_doctor(tmp_path):
    _, out, err = run(tmp_path, ["--check-build"])
    assert "MPI" in out and "Traceback" not in err


@pytest.mark.parametrize("fails", [False, True])
def test_logs_have_each_ranks_output_and_the_terminal_how_it_ended(tmp_path, fails):
    (tmp_path / "job.py").write_text(
        "import os, sys\nprint('start', os.environ['CLCOMM_RESTART'], 'of rank', os.environ['RANK'], flush=True)\n"
        "os.write(2, b'from C\\n')\n" + "from clcomm.base.errors import ArgumentError\n"
        f"if {fails} and os.environ['RANK'] == '1' and os.environ['CLCOMM_RESTART'] == '1':\n"
        "    raise ArgumentError('lr: expected more')\n"
        f"if {fails}:\n    raise SystemExit(1)\n"
    )
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-7.log").write_text("an earlier job's")
    options = ["-n", "2", "--log-dir", "logs", "--restarts", "1", "--pause", "0"]
    code, out, err = run(tmp_path, [*options, "job.py"])
    assert (code != 0) == fails and out == ""
    texts = [(tmp_path / "logs" / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert sorted(os.listdir(tmp_path / "logs")) == ["rank-0.log", "rank-1.log"]
    for rank, text in enumerate(texts):
        assert text.startswith(f"start 0 of rank {rank}\nfrom C\n") and f"of rank {1 - rank}" not in text
        assert text.count("start 1 ") <= fails
    own = [line for line in err.splitlines() if line.startswith("clcomm run: ")]
    assert len(own) == (3 if fails else 0) and err.count("\n") == len(own), err
    if fails:
        assert own[-1].startswith(f"clcomm run: exit code {code}; clcomm: rank ")
        assert own[-1].endswith(f"all output is in {tmp_path / 'logs'}")


@pytest.mark.parametrize("spelling", ["SECRET", "SECRET=drawn-{}"])
def test_variables_reach_ranks_and_no_command_line(tmp_path, spelling):
    """Every user reads /proc/PID/cmdline; only a variable's name, or nothing of it, is on those of the launcher."""
    value = f"drawn-{os.getpid()}"
    (tmp_path / "job.py").write_text(
        "import os, pathlib\nprint(os.environ['SECRET'], flush=True)\npid, seen = os.getpid(), b''\n"
        "while pid > 1:\n"
        "    lines = pathlib.Path(f'/proc/{pid}/cmdline').read_bytes()\n"
        "    if b'clcomm\\0run' in lines: break\n"
        "    seen += lines\n"
        "    pid = int(pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[1])\n"
        "assert os.environ['SECRET'].encode() not in seen, seen\n"
    )
    code, out, err = run(tmp_path, ["-n", "2", "-x", spelling.format(os.getpid()), "job.py"], SECRET=value)
    assert code == 0 and out.split() == [value, value], err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's link")
def test_logs_go_through_no_link_of_another_user(tmp_path):
    (tmp_path / "job.py").write_text("print('output')\n")
    (tmp_path / "precious").mkdir()
    (tmp_path / "logs").symlink_to(tmp_path / "precious")
    code, out, _ = run(tmp_path, ["-n", "1", "--log-dir", "logs", "job.py"])
    assert code == 0 and out == "" and (tmp_path / "precious" / "rank-0.log").read_text() == "output\n"
    os.chown(tmp_path / "logs", 12345, 12345, follow_symlinks=False)
    code, out, err = run(tmp_path, ["-n", "1", "--log-dir", "logs", "job.py"])
    assert code == 2 and out == "" and "--log-dir" in err and "a symbolic link of another user" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link", "pipe", "folder", "linked folder"])
def test_a_rank_writes_its_log_to_no_file_that_was_planted(tmp_path, kind):
    """After the command has emptied the folder, to which others can write too."""
    folder, victim = tmp_path / "logs", tmp_path / "victim"
    folder.mkdir()
    victim.write_text("precious")
    plant = folder / "rank-0.log"
    if kind == "linked folder":
        folder.rename(tmp_path / "others")
        folder.symlink_to(tmp_path / "others")
    elif kind == "pipe":
        os.mkfifo(plant)
    elif kind == "folder":
        plant.mkdir()
    elif kind == "hard link":
        plant.hardlink_to(victim)
    else:
        plant.symlink_to(victim if kind == "link" else tmp_path / "missing")
    program = f"from clcomm.jobs.launch import rank_logs; rank_logs.redirect({str(folder)!r}); print('output')"
    ended = subprocess.run(
        [sys.executable, "-c", program], env=clean_environment(), capture_output=True, text=True, timeout=HUNG_S,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 2 and ended.stdout == "" and ended.stderr.startswith("clcomm: --log-dir: "), ended.stderr
    assert ended.stderr.count("\n") == 1
    assert victim.read_text() == "precious" and not (tmp_path / "missing").exists()
    assert not (tmp_path / "others" / "rank-0.log").exists()


def test_ctrl_c_ends_all_ranks_with_one_line_and_code_130(tmp_path):
    """On a terminal, which sends SIGINT to everything in the foreground."""
    (tmp_path / "waits.py").write_text("import os, time\nos.write(1, b'pid %d\\n' % os.getpid())\ntime.sleep(600)\n")
    mpiexec()
    command = ["env", "--default-signal=INT", sys.executable, "-m", "clcomm", "run", "-n", "2", "waits.py"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execvpe("env", command, clean_environment())
    said, pressed, deadline = b"", False, time.monotonic() + HUNG_S
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                said += os.read(terminal, 1 << 16)
            except OSError:  # the job has ended
                break
        pids = [int(each) for each in re.findall(rb"pid (\d+)", said)]
        if len(pids) == 2 and not pressed:
            pressed = True
            os.write(terminal, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130, said
    assert len(re.findall(rb"^(clcomm\S*:.*)", said, re.MULTILINE)) == 1, said
    while any(os.path.exists(f"/proc/{each}") for each in pids):
        assert time.monotonic() < deadline, "a rank still runs"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("with_communicator", [False, True])
def test_a_signal_ends_the_job(tmp_path, number, with_communicator):
    makes = "from clcomm import Communicator\ncomm = Communicator()\n" if with_communicator else ""
    (tmp_path / "waits.py").write_text(
        f"import os, time\n{makes}os.write(1, (str(os.getpid()) + ' ready\\n').encode())\ntime.sleep(600)\n"
    )
    process = start(tmp_path, ["-n", "2", "waits.py"])
    assert process.stdout is not None
    pids = [int(process.stdout.readline().split()[0]) for _ in range(2)]
    os.kill(process.pid, number)
    process.communicate(timeout=HUNG_S)
    assert process.returncode == 130 if number == signal.SIGINT else process.returncode != 0
    deadline = time.monotonic() + HUNG_S
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline, "a rank still runs"
        time.sleep(0.05)


def test_a_signal_that_comes_while_the_job_is_started_reaches_it(monkeypatch, tmp_path):
    sent: list[int] = []

    class Started:
        def __init__(self, command, env):
            each._forward(signal.SIGTERM, None)  # the process runs, but has no name yet

        def send_signal(self, number):
            sent.append(number)

        def wait(self, timeout=None):
            return -sent[0]

    each = launcher.Supervisor(["job"], 0, 0.0)
    monkeypatch.setattr(launcher.subprocess, "Popen", Started)
    nothing = lambda *_: None  # noqa: E731
    each._keeper = SimpleNamespace(folder=tmp_path, environment=lambda _: {}, look=nothing, end=nothing)
    assert each._start(0).code == 128 + signal.SIGTERM
    assert sent == [signal.SIGTERM]


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-n", "0", "job.py"], "expected a whole number from 1 up, got '0'"),
        (["-n", "x", "job.py"], "expected a whole number from 1 up, got 'x'"),
        (["--nproc-per-node", "gpu", "job.py"], "expected a whole number from 1 up, got 'gpu'"),
        (["-n", "2"], "expected a script, as in clcomm run -n 4 train.py, got none"),
        (["-n", "2", "missing.py"], "expected a Python script that exists, got 'missing.py'"),
        (["-n", "2", "-m"], "expected a module, as in clcomm run -n 4 -m package.train, got none"),
        (["-n", "2", "-m", "--", "--lr", "3"], "expected a module, as in clcomm run -n 4 -m package.train, got '--lr'"),
        (["-n", "2", "--lr", "3"], "--lr"),
        (["-n", "2", "-m", "no.such"], "-m: expected a module that this Python finds, got 'no.such'"),
        (["-n", "2", "--hostfile", "none", "job.py"], "--hostfile: expected a file that can be read, got 'none'"),
        (
            ["-n", "2", "--hostfile", "job.py", "--hosts", "a", "job.py"],
            "--hosts: expected this or --hostfile, got both",
        ),
        (["--hosts", "a", "--", "x"], "-n: expected the number of ranks with --hosts and --hostfile, got none"),
        (["--log-dir", "a", "--", "x"], "expected the number of ranks with --env, --bind-to and --log-dir, got none"),
        (["-n", "2", "--log-dir", "job.py", "job.py"], "--log-dir: expected a directory to write, got 'job.py'"),
        (["-n", "2", "-x", "A-B=1", "job.py"], "-x/--env: expected NAME or NAME=VALUE, got 'A-B=1'"),
        (["-n", "2", "-x", "NOT_SET", "job.py"], "expected a variable that is set, or NOT_SET=VALUE, got 'NOT_SET'"),
        (["-n", "2", "--bind-to", "moon", "job.py"], "--bind-to: invalid choice: 'moon'"),
        (["job.py"], "-n: expected the number of ranks, as in clcomm run -n 4 train.py, got none"),
        (["-m", "job"], "-n: expected the number of ranks, as in clcomm run -n 4 train.py, got none"),
        (["--nnodes", "2", "-n", "2", "job.py"], "expected 1, got '2'; for several hosts use --hosts or --hostfile"),
        (["--rdzv-backend=c10d", "-n", "2", "job.py"], "--rdzv-backend: MPI connects the ranks"),
        (["--rdzv_endpoint", "a:1", "-n", "2", "job.py"], "--rdzv_endpoint: MPI connects the ranks"),
        (["--no-python", "-n", "2", "job.py"], "--no-python: for other programs use clcomm run -- mpiexec ..."),
        (["--role", "worker", "-n", "2", "job.py"], "--role: clcomm run has no such option"),
        (["--master-port", "99999", "-n", "2", "job.py"], "expected a whole number up to 65535"),
        ([], "expected a command, as in clcomm run -- mpiexec -n 4 python train.py, got none"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(tmp_path, arguments, said):
    (tmp_path / "job.py").write_text("print('started')\n")
    code, out, err = run(tmp_path, arguments)
    assert (code, out) == (2, "")
    own = [line for line in err.splitlines() if line.startswith("clcomm")]
    assert len(own) == 1 and said in own[0], err
    assert "Traceback" not in err


def test_within_mpiexec_it_is_refused(tmp_path):
    (tmp_path / "job.py").write_text("print('started')\n")
    code, out, err = run(tmp_path, ["-n", "2", "job.py"], PMI_SIZE="2", PMI_RANK="0")
    assert (code, out) == (2, "") and "expected to be outside mpiexec" in err


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("rank", [None, "0", "1"])
@pytest.mark.parametrize("size", [None, "1", "2", "x"])
def test_torchruns_processes_are_told_what_to_use(monkeypatch, elastic, rank, size):
    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE", "PALS_SIZE"):
        monkeypatch.delenv(name, raising=False)
    values = {"RANK": rank, "WORLD_SIZE": size, "TORCHELASTIC_RUN_ID": "none" if elastic else None}
    for name, value in values.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["runs/train.py", "--lr", "3"])
    if rank is None or size != "2":
        mpi_runtime.require_no_torchrun()
        return
    with pytest.raises(LaunchError) as caught:
        mpi_runtime.world()
    line = one_line(caught)
    assert line.startswith("torchrun: " if elastic else "RANK and WORLD_SIZE: ")
    assert line.endswith("start the job with: clcomm run -n 2 train.py")
    monkeypatch.setenv("PMI_SIZE", "2")
    mpi_runtime.require_no_torchrun()  # clcomm run sets these variables itself
