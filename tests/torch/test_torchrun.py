"""Scripts on backend clcomm whose ranks no MPI starts: torchrun, torch.multiprocessing, and processes by hand."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults.launch import HUNG_S, clean_environment, mpiexec
from tests.leftovers import kill_with_descendants

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
#: Trains by what a script may use: buckets, an accumulated step, parts of the ranks, objects and messages.
TRAINING = """
import hashlib, sys
if "without" in sys.argv:
    sys.modules["mpi4py"] = sys.modules["mpi4py.MPI"] = None  # an import of either is an error
import torch
import torch.distributed as dist
import clcomm.torch

dist.init_process_group("clcomm")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
layers = torch.nn.Linear(40, 300), torch.nn.Tanh(), torch.nn.Linear(300, 7)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.01)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
batches = torch.randn(6, size, 5, 40)
for step, batch in enumerate(batches):
    with model.no_sync() if step == 2 else torch.enable_grad():
        model(batch[rank]).square().mean().backward()
    if step != 2:
        optimizer.step()
        optimizer.zero_grad()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
members = dist.new_group([0, size - 1]) if size > 2 else dist.group.WORLD
long = torch.randn(300_000)  # more than a message's ring holds, and not in shared memory
if rank in (0, size - 1):
    dist.all_reduce(long, group=members)
rows = torch.arange(size * 3.0) + 100 * rank
got = torch.empty_like(rows)
dist.all_to_all_single(got, rows)
assert got.tolist() == [100 * other + 3 * rank + at for other in range(size) for at in range(3)]
if size > 1:
    sent, received = torch.full((200_000,), float(rank)), torch.empty(200_000)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, (rank + 1) % size),
                                        dist.P2POp(dist.irecv, received, (rank - 1) % size)]):
        work.wait()
    assert received.unique().tolist() == [(rank - 1) % size]
everyone = [None] * size
dist.all_gather_object(everyone, (rank, digest.hexdigest()))
assert everyone == [(other, everyone[0][1]) for other in range(size)]
again = dist.all_reduce(long, async_op=True)
again.wait()
if rank == 0:
    print("ends as", everyone[0][1], hashlib.sha256(long.numpy().tobytes()).hexdigest(), flush=True)
dist.destroy_process_group()
"""


def run(command: Sequence[str], folder: Path, script: str, *arguments: str, **environment: str):
    """Run a script in a folder, and return how it ended; what it leaves running is ended."""
    (folder / "train.py").write_text(script)
    process = subprocess.Popen(
        [*command, "train.py", *arguments], cwd=folder, env=clean_environment(OMP_NUM_THREADS="1", **environment),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=2 * HUNG_S)
    except subprocess.TimeoutExpired:
        kill_with_descendants(process.pid)
        pytest.fail(f"it hung; it wrote:\n{process.communicate()}")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_training_has_the_bits_of_mpiexec_and_needs_no_mpi(tmp_path, ranks):
    there = run([*TORCHRUN, f"--nproc-per-node={ranks}"], tmp_path, TRAINING, "without", CLCOMM_REPORT="run.json")
    assert there.returncode == 0, there.stderr
    assert json.loads((tmp_path / "run.json").read_text())
    launched = run([mpiexec(), "-n", str(ranks), sys.executable], tmp_path, TRAINING)
    assert launched.returncode == 0, launched.stderr
    (line,) = re.findall("ends as .*", there.stdout)
    assert [line] == re.findall("ends as .*", launched.stdout)


KILLED = """
import os, signal, torch, torch.distributed as dist, clcomm.torch
first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
dist.init_process_group("clcomm")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(50, 50))
for step in range(40 if not first else 10**9):
    if first and step == 20 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.ones(2, 50)).sum().backward()
if dist.get_rank() == 0:
    print("ends in attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("ranks", [3])
def test_a_killed_rank_is_named_and_torchrun_starts_all_again(tmp_path, ranks):
    before = set(os.listdir("/dev/shm"))
    ended = run([*TORCHRUN, f"--nproc-per-node={ranks}", "--max-restarts=1"], tmp_path, KILLED)
    assert ended.returncode == 0 and "ends in attempt 1" in ended.stdout, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("clcomm: ")]
    assert lines == ["clcomm: rank 1 died of SIGKILL"], ended.stderr
    made = [name for name in set(os.listdir("/dev/shm")) - before if "clcomm" in name]
    assert not made


SPAWNED = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp, clcomm.torch

def work(rank, size, how):
    dist.init_process_group("clcomm", rank=rank, world_size=size)
    total = torch.ones(3) * rank
    dist.all_reduce(total)
    assert total.tolist() == [size * (size - 1) / 2] * 3
    if how == "raises" and rank == size - 1:
        raise ValueError("planted")
    if how == "raises":
        dist.all_reduce(total)
    if rank == 0:
        print("sums", flush=True)  # and each ends when it likes, without destroy_process_group

if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2])
    mp.spawn(work, (int(sys.argv[3]), sys.argv[1]), int(sys.argv[3]))
"""


@pytest.mark.parametrize("how", ["works", "raises"])
def test_processes_of_multiprocessing(tmp_path, how):
    """What a process raises is what its parent says, however the others end."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    ended = run([sys.executable], tmp_path, SPAWNED, how, port, "2")
    assert ("sums" in ended.stdout, ended.returncode == 0) == (how == "works", how == "works"), ended.stderr
    if how == "works":
        assert not ended.stderr
    else:
        assert "\nValueError: planted" in ended.stderr and "SIGKILL" not in ended.stderr, ended.stderr


HOSTS = """
import os, socket, torch.distributed as dist, clcomm.torch
socket.gethostname = lambda: f"host-{os.environ['RANK']}"
dist.init_process_group("clcomm")
"""


@pytest.mark.parametrize("starter", ["torchrun", "by hand"])
def test_several_hosts_get_a_line_on_every_rank_that_says_what_to_start(tmp_path, starter):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    (tmp_path / "train.py").write_text(HOSTS)
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    if starter == "torchrun":
        given |= {"TORCHELASTIC_RUN_ID": "one", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    processes = [
        subprocess.Popen([sys.executable, "train.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
                         env=clean_environment(**given, RANK=str(rank), OMP_NUM_THREADS="1"))
        for rank in range(2)
    ]  # fmt: skip
    try:
        for process in processes:
            (line,) = process.communicate(timeout=HUNG_S)[1].splitlines()
            assert process.returncode == 1
            assert line.startswith("clcomm: init_process_group: expected all ranks on one host, got ")
            assert "`clcomm run -n N -H A,B script.py`" in line
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
