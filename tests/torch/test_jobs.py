"""Whole jobs on backend clcomm that go wrong: one line, no hang."""

from __future__ import annotations

import random
import socket

import pytest

from tests.faults.launch import job

pytest.importorskip("torch", reason="PyTorch is not installed")

PREAMBLE = """
import time
import torch
import torch.distributed as dist
import clcomm.torch

dist.init_process_group("clcomm")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 3))
rank, last = dist.get_rank(), dist.get_world_size() - 1
"""
#: What the other ranks call while the last one does not come, and how a message names it.
CALLS = {
    "backward": ("model(torch.ones(2, 6)).sum().backward()", "all_reduce"),
    "all_gather": ("dist.all_gather([torch.ones(3)] * (last + 1), torch.ones(3))", "all_gather"),
    "async": ("dist.all_reduce(torch.ones(9), async_op=True).wait()", "all_reduce"),
    "barrier": ("dist.barrier()", "barrier"),
    "recv": ("dist.recv(torch.ones(3), last)", "recv from rank"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("call", "ranks"), list(zip(CALLS, (4, 3, 2, 3, 2), strict=True)))
def test_a_rank_that_never_comes_is_named(tmp_path, call, ranks):
    code, name = CALLS[call]
    limits = {"CLCOMM_STALL_WARNING_S": "1", "CLCOMM_TIMEOUT_S": "4"}
    ended = job(tmp_path, f"if rank == last: time.sleep(300)\n{code}\n", preamble=PREAMBLE, ranks=ranks, **limits)
    lines = ended.clcomm_lines()
    assert ended.code == 124 and not ended.out, ended.err
    ends = [line for line in lines if "the job ends; what" in line]
    assert len(ends) == 1 and name in ends[0] and f"missing: rank {ranks - 1} (in no collective" in ends[0]
    assert "Traceback" not in ended.err


#: What ranks whose last one does not come call, and what the error names.
CAUGHT = {
    "barrier": ("dist.barrier()", "in barrier"),
    "async": ("dist.all_reduce(torch.ones(9), async_op=True).wait()", "in all_reduce"),
    "recv": ("dist.recv(torch.ones(3), last)", "in recv from rank"),
    "monitored": ("dist.group.WORLD.monitored_barrier(timedelta(seconds=1))", "in barrier"),
}


@pytest.mark.parametrize(("call", "ranks"), list(zip(CAUGHT, (2, 3, 2, 4), strict=True)))
def test_a_program_may_catch_a_time_out(tmp_path, call, ranks):
    """It names the ranks that are missing; the group is lost, and a new one works."""
    code, name = CAUGHT[call]
    script = f"""
from datetime import timedelta
dist.group.WORLD.set_timeout(timedelta(seconds={30 if call == "monitored" else 1}))
if rank == last:
    time.sleep(4)
else:
    try:
        {code}
    except clcomm.torch.GroupTimeoutError as error:
        assert isinstance(error, RuntimeError) and " timeout of 1 s is over" in str(error), error
        print("caught {name}" if "{name}" in str(error) and f"missing: rank {{last}} (in no" in str(error) else error)
    try:
        dist.barrier()
    except RuntimeError as error:
        print("call destroy_process_group" in str(error))
dist.destroy_process_group()
dist.init_process_group("clcomm", store=dist.FileStore("store", last + 1), rank=rank, world_size=last + 1)
total = torch.ones(3)
dist.all_reduce(total)
print("sum", total.tolist() == [last + 1.0] * 3, flush=True)
"""
    ended = job(tmp_path, script, preamble=PREAMBLE, ranks=ranks, CLCOMM_STALL_WARNING_S="0")
    assert ended.code == 0 and not ended.err, ended.err
    expected = [f"caught {name}", "True"] * (ranks - 1) + ["sum True"] * ranks
    assert sorted(ended.out.splitlines()) == sorted(expected)


@pytest.mark.parametrize("ranks", [2, 4])
def test_groups_without_a_backends_name_are_clcomms(tmp_path, ranks):
    """As `init_device_mesh` makes them; a script that names gloo gets that."""
    script = """
import torch
import torch.distributed as dist
import clcomm.torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
import os

size = int(os.environ["WORLD_SIZE"])
mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
kinds = {type(group).__name__ for group in (dist.group.WORLD, mesh.get_group("dp"), mesh.get_group("tp"))}
whole = torch.arange(12.0).reshape(4, 3)
sharded = distribute_tensor(whole, mesh["dp"], [Shard(0)])
print(kinds == {"ClcommProcessGroup"}, torch.equal(sharded.full_tensor(), whole), sharded.to_local().shape[0])
dist.destroy_process_group()
dist.init_process_group("gloo")
print(dist.get_backend(), type(dist.group.WORLD).__name__)
dist.destroy_process_group()
"""
    ended = job(tmp_path, script, ranks=ranks)
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == ["True True 2"] * ranks + ["gloo ProcessGroup"] * ranks


#: What another job may have left; None: of each rank its own. The last two cannot be met at.
LEFT = {
    "RANK": ["0", "1", "7", "x"],
    "WORLD_SIZE": ["1", "2", "9", ""],
    "LOCAL_RANK": ["0", "5"],
    "MASTER_ADDR": ["127.0.0.1", "gone.invalid"],
    "MASTER_PORT": ["{free}", "{busy}", "port"],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(24))
def test_variables_that_another_job_has_left(tmp_path, seed):
    """Places make way for MPI's; an address stays where it is one of rank 0's host, for all ranks, or is refused."""
    draw = random.Random(seed)
    ranks = draw.choice([1, 2, 2, 3])
    names = draw.sample(list(LEFT), draw.randint(1, 3))
    on = list(range(ranks)) if draw.random() < 0.7 else draw.sample(range(ranks), draw.randint(1, ranks))
    with socket.create_server(("127.0.0.1", 0)) as busy, socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and does not listen
        ports = {"busy": busy.getsockname()[1], "free": free.getsockname()[1]}
        free.close()
        left = {name: draw.choice(LEFT[name]).format(**ports) for name in names}
        before = (
            "import os\nmpi_rank = os.environ.get('PMI_RANK') or os.environ['OMPI_COMM_WORLD_RANK']\n"
            f"if int(mpi_rank) in {on}: os.environ.update({left})\n"
        )
        script = "print(rank, *(os.environ[name] for name in ('RANK', 'WORLD_SIZE')), mpi_rank, last + 1)"
        ended = job(tmp_path, script, preamble=before + PREAMBLE, ranks=ranks)
    addresses = [left[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in left]
    differ = "MASTER_PORT" in left and len(on) < ranks
    if differ or {"gone.invalid", str(ports["busy"]), "port"} & set(addresses):
        lines = ended.err.splitlines()
        assert ended.code and not ended.out and len(lines) == 1, (left, on, ended)
        assert lines[0].startswith("clcomm: MASTER_ADDR and MASTER_PORT: expected "), ended.err
    else:
        assert (ended.code, ended.err) == (0, ""), (left, on, ended.err)
        places = sorted(line.split() for line in ended.out.splitlines())
        assert places == [[str(rank), str(rank), str(ranks), str(rank), str(ranks)] for rank in range(ranks)], left


@pytest.mark.parametrize("ranks", [2, 3])
def test_places_that_a_program_gives_are_mpis(tmp_path, ranks):
    start = PREAMBLE.replace('"clcomm")', '"clcomm", rank=0, world_size=1)')
    ended = job(tmp_path, "", preamble=start, ranks=ranks)
    assert ended.code and len(ended.err.splitlines()) == 1, ended.err
    assert f"expected MPI's rank 0 of {ranks}, got rank 0 of 1" in ended.err


def test_processes_that_nobody_connects_are_no_world_of_one(tmp_path):
    ended = job(tmp_path, "print('runs')", preamble=PREAMBLE, launcher=False, RANK="1", WORLD_SIZE="2")
    assert ended.code and not ended.out
    assert "RANK and WORLD_SIZE: expected ranks that MPI connects, got 2" in ended.err.splitlines()[-1]


@pytest.mark.parametrize(("call", "ranks"), [("set_timeout", 2), ("_set_default_timeout", 3)])
def test_the_time_limit_of_a_group_may_be_set(tmp_path, call, ranks):
    """Of that group alone, and in place of the one with which it was made."""
    script = (
        "other, late = dist.new_group(timeout=timedelta(seconds=600)), dist.new_group(timeout=timedelta(seconds=1))\n"
        f"other.{call}(timedelta(seconds=3)); late.{call}(timedelta(seconds=600))\n"
        "if rank == last: time.sleep(5)\n"
        "dist.barrier(late); print('late', flush=True)\n"
        "if rank == last: time.sleep(300)\n"
        "dist.barrier(other)"
    )
    ended = job(tmp_path, "from datetime import timedelta\n" + script, preamble=PREAMBLE, ranks=ranks)
    assert ended.code == 124 and ended.out.split() == ["late"] * ranks, ended.err
    ends = [line for line in ended.clcomm_lines() if "the job ends; what" in line]
    assert len(ends) == 1 and "the limit is 3 s" in ends[0] and f"missing: rank {ranks - 1}" in ends[0]


@pytest.mark.parametrize(("other", "ranks"), [("dist.barrier()", 2), ("dist.all_reduce(torch.ones(5))", 4)])
def test_an_error_within_backward_is_one_line(tmp_path, other, ranks):
    """PyTorch raises its own RuntimeError there, with frames of C++ and Python."""
    script = f"loss = model(torch.ones(2, 6)).sum()\nif rank == last: {other}\nelse: loss.backward()\n"
    ended = job(tmp_path, script, preamble=PREAMBLE, ranks=ranks)
    assert ended.code == 1 and not ended.out
    lines = ended.clcomm_lines()
    assert ended.err.splitlines() == lines and len(lines) == 1, ended.err
    assert "of 21 float32" in lines[0] and f"rank {ranks - 1} in " in lines[0]


def test_a_program_may_catch_it(tmp_path):
    script = (
        "loss = model(torch.ones(2, 6)).sum()\n"
        "try:\n    dist.barrier() if rank == last else loss.backward()\n"
        "except Exception as error: print(type(error).__name__, flush=True)\n"
        "if rank == 0: raise RuntimeError('another')\ndist.barrier()"
    )
    ended = job(tmp_path, script, preamble=PREAMBLE, ranks=2)
    assert sorted(ended.out.split()) == ["MismatchError", "RuntimeError"]
    assert "rank 0 failed:\nTraceback" in ended.err and ended.err.rstrip().endswith("RuntimeError: another")


#: What every rank has started when one of them fails, or when all end: the threads that move it are in MPI then.
QUEUES = {
    "different": "started({count}, odd=3)[3].wait()",  # every rank's error, and the others behind it are still to run
    "unequal": "started({count} + 9 * rank, odd=3)[3].wait()",  # the last ones wait for ranks that do not come
    "alone": "works = started({count})\nif rank == last: raise ArgumentError('one rank alone')\nworks[-1].wait()",
}
STARTED = """
from clcomm.base.errors import ArgumentError

def started(count, odd=-1):
    tensors = [torch.ones(500 + (rank == last and turn == odd)) for turn in range(count)]
    return [
        dist.all_reduce(each, async_op=True) if turn % 2 else dist.broadcast(each, turn % (last + 1), async_op=True)
        for turn, each in enumerate(tensors)
    ]
"""


@pytest.mark.parametrize(("queue", "ranks"), list(zip(QUEUES, (3, 3, 2), strict=True)))
def test_collectives_queued_behind_one_that_fails(tmp_path, queue, ranks):
    """One line, and no banner of MPI's launcher: threads in MPI end before it does."""
    ended = job(tmp_path, STARTED + QUEUES[queue].format(count=300), preamble=PREAMBLE, ranks=ranks)
    assert ended.code in (1, 2) and not ended.out
    lines = ended.clcomm_lines()
    assert ended.err.splitlines() == lines and len(lines) == 1, ended.err
    said = "one rank alone" if queue == "alone" else f"rank {ranks - 1} in all_reduce of 501 float32"
    assert said in lines[0]


@pytest.mark.parametrize("ranks", [3])
def test_a_program_may_end_before_what_it_started(tmp_path, ranks):
    """Every rank completes what all have started."""
    script = "works = started(300)"
    ended = job(tmp_path, STARTED + script, preamble=PREAMBLE, ranks=ranks)
    assert ended.code == 0 and not ended.err, ended.err


#: The last rank's model beside the others' Linear(6, 3), and what the line says of it.
MODELS = {
    "shape": ("torch.nn.Linear(6, 4)", "[4, 6] torch.float32' on rank"),
    "dtype": ("torch.nn.Linear(6, 3).double()", "[3, 6] torch.float64' on rank"),
    "number": ("torch.nn.Linear(6, 3, bias=False)", "'nothing' on rank"),
    "dimensions": ("torch.nn.Conv2d(6, 3, 1)", "[3, 6, 1, 1] torch.float32' on rank"),
    "buffers": ("torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.BatchNorm1d(9, affine=False))", "in broadcast"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "ranks"), list(zip(MODELS, (2, 3, 4, 2, 3), strict=True)))
def test_models_that_differ(tmp_path, kind, ranks):
    """PyTorch's own check would raise on some ranks alone, in C++."""
    other, said = MODELS[kind]
    script = f"torch.nn.parallel.DistributedDataParallel({other} if rank == last else torch.nn.Linear(6, 3))\n"
    ended = job(tmp_path, script, preamble=PREAMBLE, ranks=ranks)
    assert ended.code != 0 and ended.err.splitlines() == ended.clcomm_lines() and len(ended.clcomm_lines()) == 1
    assert said in ended.err and f"rank {ranks - 1}" in ended.err


@pytest.mark.parametrize("ranks", [4])
def test_tensors_of_different_shapes(tmp_path, ranks):
    ended = job(tmp_path, "dist.all_reduce(torch.ones(5 + (rank == last)))", preamble=PREAMBLE, ranks=ranks)
    assert ended.code != 0 and ended.err.splitlines() == ended.clcomm_lines() and len(ended.clcomm_lines()) == 1
    assert "6 float32" in ended.err and f"rank {ranks - 1} in" in ended.err


@pytest.mark.parametrize("ranks", [3])
def test_a_tensor_on_an_unknown_device(tmp_path, ranks):
    script = "dist.all_reduce(torch.ones(5, device='meta' if rank == last else 'cpu'))"
    ended = job(tmp_path, script, preamble=PREAMBLE, ranks=ranks)
    assert ended.code != 0 and ended.err.splitlines() == ended.clcomm_lines() and len(ended.clcomm_lines()) == 1
    assert "got one on meta; it has no values" in ended.err and f"(on rank {ranks - 1})" in ended.err


@pytest.mark.parametrize("ranks", [2])
def test_a_launcher_of_another_mpi(tmp_path, ranks):
    """Each process is then a world of one: the variables of a launcher say that it is not."""
    foreign = {"OMPI_COMM_WORLD_SIZE": str(ranks), "OMPI_COMM_WORLD_RANK": "0"}
    ended = job(tmp_path, "print('runs')", preamble=PREAMBLE, launcher=False, **foreign)
    assert ended.code != 0 and len(ended.err.splitlines()) == 1 and "mpiexec" in ended.err, ended.err
