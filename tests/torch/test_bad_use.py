"""Bad use of backend clcomm: one line, on every rank, without a hang."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.distributed as dist  # noqa: E402

from clcomm.base.errors import ArgumentError, MismatchError  # noqa: E402
from tests.helpers import installs, one_line  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TRAIN = "import torch, clcomm.torch, torch.distributed as dist; dist.init_process_group('clcomm'); "


def run(code, **environment):
    """Run a program as a user does, outside of mpiexec."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "MPI", "RANK"))}
    for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "BACKEND"):
        inherited.pop(name, None)
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_outside_of_mpiexec_there_is_a_world_of_one():
    ended = run(TRAIN + "t = torch.ones(2); dist.all_reduce(t); print(dist.get_world_size(), t.tolist())")
    assert ended.stdout.split(maxsplit=1) == ["1", "[1.0, 1.0]\n"], ended.stderr


def test_a_rank_that_does_not_come_is_named():
    ended = run(
        "import clcomm.torch, torch.distributed as dist, datetime; "
        "dist.init_process_group('clcomm', rank=0, world_size=1, store=dist.HashStore()); print('fine');"
        "dist.destroy_process_group(); dist.init_process_group('clcomm', rank=1, world_size=2, store=dist.HashStore(), "
        "timeout=datetime.timedelta(seconds=1))"
    )
    assert ended.stdout == "fine\n"
    assert "expected 2 ranks at the store within 1 s, rank 0 did not come" in ended.stderr.splitlines()[-1]


def test_the_users_own_variables_stay():
    code = "import os, clcomm.torch; print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'], os.environ['RANK'])"
    assert run(code, MASTER_ADDR="localhost", MASTER_PORT="12345").stdout.split() == ["localhost", "12345", "0"]


def test_without_pytorch_there_is_one_line():
    code = "import sys; sys.modules['torch'] = None; import clcomm.torch"
    assert run(code).stderr.splitlines()[-1].endswith(f"PyTorch is not installed; do: {installs('torch')}")
    assert run("import sys, clcomm, clcomm.comm.communicator; print('torch' in sys.modules)").stdout == "False\n"


def test_a_group_that_was_destroyed():
    ended = run(TRAIN + "g = dist.group.WORLD; dist.destroy_process_group(); g.barrier()")
    assert ended.stderr.splitlines()[-1].endswith("expected an open one, but destroy_process_group was called")
    again = "dist.destroy_process_group(); dist.init_process_group('clcomm'); dist.barrier(); print('again')"
    assert run(TRAIN + again).stdout == "again\n"


# --- in a group ---


@pytest.mark.mpi(min_size=1)
def test_tensors_of_unknown_devices_and_layouts(world):
    with pytest.raises(ArgumentError) as caught:
        dist.broadcast(torch.empty(3, device="meta"), 0)
    assert "expected one on cpu, cuda, xpu, privateuseone, got one on meta" in one_line(caught)
    with pytest.raises(ArgumentError) as caught:
        dist.broadcast(torch.eye(3).to_sparse(), 0)
    assert "use to_dense()" in one_line(caught)
    dist.barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("length", [10, 3000, 200_000, 1_500_000])
def test_different_lengths(world, length):
    for call in (dist.all_reduce, lambda tensor: dist.broadcast(tensor, 0)):
        with pytest.raises(MismatchError) as caught:
            call(torch.ones(length + (dist.get_rank() == 1)))
        message = one_line(caught)
        sizes = [f"{length:,}", f"{length + 1:,}"], [f"{4 * length:,} bytes", f"{4 * length + 4:,} bytes"]
        assert any(all(size in message for size in pair) for pair in sizes) and "rank 1" in message
    total = torch.ones(2)
    dist.all_reduce(total)
    assert (total == dist.get_world_size()).all()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float16, torch.bfloat16)], ids=str)
def test_different_dtypes(world, dtypes):
    with pytest.raises(MismatchError) as caught:
        dist.all_reduce(torch.ones(100_000, dtype=dtypes[dist.get_rank() == 1]))
    message = one_line(caught)
    assert all(str(dtype).removeprefix("torch.") in message for dtype in dtypes)


def of_dtype(name, dtype):
    """Call a collective that moves bytes, on tensors of this dtype."""
    size, rank = dist.get_world_size(), dist.get_rank()
    own, whole = torch.ones(4 * size, dtype=dtype), [torch.ones(4 * size, dtype=dtype) for _ in range(size)]
    calls = {
        "all_gather": lambda: dist.all_gather(whole, own),
        "all_gather_single": lambda: dist.all_gather_single(torch.cat(whole), own),
        "uneven": lambda: dist.all_gather([torch.ones(1 + at, dtype=dtype) for at in range(size)], own[: 1 + rank]),
        "gather": lambda: dist.gather(own, whole if rank == 0 else None),
        "scatter": lambda: dist.scatter(own, whole if rank == 0 else None),
        "all_to_all": lambda: dist.all_to_all(whole, [each.clone() for each in whole]),
        "all_to_all_single": lambda: dist.all_to_all_single(own, own.clone()),
        "broadcast": lambda: dist.broadcast(own, 0),
    }
    calls[name]()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.int32), (torch.float16, torch.bfloat16)], ids=str)
@pytest.mark.parametrize(
    "name", ["all_gather", "all_gather_single", "uneven", "gather", "scatter", "all_to_all", "all_to_all_single",
             "broadcast"],
)  # fmt: skip
def test_different_dtypes_of_one_size_are_no_wrong_numbers(world, name, dtypes):
    with pytest.raises(MismatchError) as caught:
        of_dtype(name, dtypes[dist.get_rank() == 1])
    message = one_line(caught)
    assert all(str(dtype).removeprefix("torch.") in message for dtype in dtypes)
    of_dtype(name, dtypes[1])


@pytest.mark.mpi(min_size=1)
def test_options_of_another_backend(world):
    with pytest.raises(ArgumentError) as caught:
        dist.new_group(pg_options=torch._C._distributed_c10d.Backend.Options("gloo"))
    assert "pg_options: expected None for backend 'clcomm'" in one_line(caught)


@pytest.mark.mpi(min_size=1)
def test_what_pytorch_has_for_other_backends_alone(world):
    with pytest.warns(UserWarning, match="only supported for either nccl or gloo"):
        torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=5))
    with pytest.raises(ValueError, match="GLOO"):
        dist.monitored_barrier()
    with pytest.raises(NotImplementedError), dist.distributed_c10d._time_estimator(device=torch.device("cpu")):
        pass
    dist.barrier()


@pytest.mark.mpi(min_size=2)
def test_different_collectives(world):
    with pytest.raises(MismatchError) as caught:
        dist.barrier() if dist.get_rank() == 1 else dist.all_reduce(torch.ones(3))
    assert "barrier" in one_line(caught) and "all_reduce" in str(caught.value)


@pytest.mark.mpi(min_size=2)
def test_one_ranks_bad_argument_is_every_ranks_error(world):
    size = dist.get_world_size()
    with pytest.raises(ArgumentError) as caught:
        dist.all_gather_single(torch.empty(size * 3 - (dist.get_rank() == 1)), torch.ones(3))
    assert f"expected {size} times 3 float32, got {size * 3 - 1} float32 (on rank 1)" in one_line(caught)


@pytest.mark.mpi(min_size=1)
def test_reductions_that_have_no_meaning(world):
    with pytest.raises(ArgumentError) as caught:
        dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND)
    assert "'band' needs integers" in one_line(caught)
    with pytest.raises(ArgumentError) as caught:
        dist.all_reduce(torch.ones(3), dist._make_nccl_premul_sum(2.0))
    assert "expected one of" in one_line(caught)
    with pytest.raises(ArgumentError) as caught:
        dist.all_reduce(torch.ones(3, dtype=torch.float8_e5m2))
    one_line(caught)
    dist.barrier()
