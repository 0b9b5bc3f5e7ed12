"""Reports and timelines of jobs that only call torch.distributed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.faults.launch import HUNG_S, clean_environment, mpiexec

pytest.importorskip("torch", reason="PyTorch is not installed")

TRAINS = """
import torch
import torch.distributed as dist
import clcomm.torch

dist.init_process_group("clcomm")
torch.manual_seed(dist.get_rank())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(6):
    optimizer.zero_grad()
    model(torch.randn(4, 6)).square().sum().backward()
    optimizer.step()
"""
SENDS = (
    TRAINS
    + """
for turn in range(3):
    messages = [dist.P2POp(call, torch.ones(100), 1 - dist.get_rank()) for call in (dist.isend, dist.irecv)]
    for each in dist.batch_isend_irecv(messages):
        each.wait()
if dist.get_rank() == 0:
    dist.send(torch.ones(7, 2), 1)
else:
    dist.recv(torch.ones(7, 2), 0)
dist.barrier()
"""
)
FAILS = TRAINS + "if dist.get_rank() == 1: raise ValueError('planted')\n"


def start(folder, program):
    (folder / "trains.py").write_text(program)
    files = {"CLCOMM_REPORT": str(folder / "run.json"), "CLCOMM_TRACE": str(folder / "timeline.json")}
    return subprocess.run([mpiexec(), "-n", "2", sys.executable, "trains.py"], cwd=folder,
                          env=clean_environment(**files), capture_output=True, text=True, timeout=HUNG_S,
                          check=False)  # fmt: skip


@pytest.mark.parametrize("ends", ["", "dist.destroy_process_group()\n"])
def test_the_environment_names_the_files(tmp_path, ends):
    ended = start(tmp_path, TRAINS + ends)
    assert ended.returncode == 0, ended.stderr
    run = json.loads((tmp_path / "run.json").read_text())
    assert (run["world_size"], run["steps"]) == (2, 6)
    for rank in run["ranks"]:
        gradients = [each for each in rank["stats"]["tallies"] if each["label"] == "gradients"]
        assert [(each["operation"], each["bucket"], each["calls"]) for each in gradients] == [("all_reduce", 0, 6)]
    shown = subprocess.run([sys.executable, "-m", "clcomm", "report", "run.json"], cwd=tmp_path,
                           env=clean_environment(), capture_output=True, text=True, timeout=HUNG_S,
                           check=False)  # fmt: skip
    assert shown.returncode == 0 and "gradients" in shown.stdout, shown.stderr
    assert f"buckets of {4 * (6 * 3 + 3)} B" in shown.stdout  # DistributedDataParallel's, not CLCOMM_BUCKET_SIZE's
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert sum(name.startswith("step") for name in names) >= 12 and any("all_reduce" in name for name in names)
    buckets = [event["args"]["bucket"] for event in events if "bucket" in event.get("args", {})]
    assert buckets.count(0) >= 12 and set(buckets) == {0}


TAKE_TURNS = (
    TRAINS
    + """
other = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 3))
turns = [(model, optimizer), (other, torch.optim.Adam(other.parameters()))]
for step in range(4):
    for net, steps in turns:
        net(torch.randn(4, 6)).square().sum().backward()
        steps.step()
from clcomm.comm.stats.events import NOW  # what `clcomm top` shows
print("counted", NOW.step, flush=True)
"""
)


def test_optimizers_that_take_turns_count_once_a_step(tmp_path):
    ended = start(tmp_path, TAKE_TURNS)
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "run.json").read_text())["steps"] == 6 + 4
    assert ended.stdout.count("counted 10") == 2


def test_messages_are_counted(tmp_path):
    ended = start(tmp_path, SENDS)
    assert ended.returncode == 0, ended.stderr
    run = json.loads((tmp_path / "run.json").read_text())
    for rank, more in enumerate(("send", "recv")):
        tallies = {each["operation"]: each for each in run["ranks"][rank]["stats"]["tallies"] if not each["label"]}
        for operation in ("send", "recv"):
            extra = operation == more
            assert (tallies[operation]["calls"], tallies[operation]["nbytes"]) == (3 + extra, 1200 + 56 * extra)
    shown = subprocess.run([sys.executable, "-m", "clcomm", "report", "run.json"], cwd=tmp_path,
                           env=clean_environment(), capture_output=True, text=True, timeout=HUNG_S,
                           check=False)  # fmt: skip
    assert shown.returncode == 0 and "send" in shown.stdout and "recv" in shown.stdout, shown.stderr


def test_a_job_that_fails_ends_without_them(tmp_path):
    ended = start(tmp_path, FAILS)
    assert ended.returncode != 0
    # PyTorch's excepthook collects what is printed, and would print it only after the job has ended.
    assert ended.stderr.startswith("clcomm: rank 1 failed:\n") and ended.stderr.endswith("ValueError: planted\n")
    assert not (tmp_path / "run.json").exists()
