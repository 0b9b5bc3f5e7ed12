"""A job's start and exit code: under mpiexec, alone, without MPI, under another MPI's mpiexec."""

from __future__ import annotations

import pytest

from tests.faults.failing import MISTAKE, on_all
from tests.faults.launch import job


def test_a_job_that_ends_well(tmp_path):
    ended = job(tmp_path, 'def main():\n    sys.stdout.write(f"rank {Communicator().rank}\\n")\nrun(main)')
    assert ended.code == 0
    assert sorted(ended.out.splitlines()) == ["rank 0", "rank 1", "rank 2"]
    assert ended.err == ""


def test_without_an_mpi_library_a_rank_is_alone_and_ranks_are_told(tmp_path):
    script = 'def main():\n    sys.stdout.write(f"alone {Communicator().size}\\n")\nrun(main)'
    for library in ("nowhere.so", str(tmp_path / "nowhere.so")):  # mpi4py fails in two ways
        alone = job(tmp_path, script, launcher=False, MPI4PY_LIBMPI=library)
        assert (alone.code, alone.out, alone.err) == (0, "alone 1\n", "")
        launched = job(tmp_path, script, ranks=2, MPI4PY_LIBMPI=library)
        assert launched.code == 2 and launched.out == ""
        assert len(launched.clcomm_lines()) == 2  # without MPI every rank reports it
        assert "mpi4py: expected an MPI library for 2 ranks, found none" in launched.err


@pytest.mark.parametrize("ranks", [0, 1, 3])
def test_mpis_own_shared_memory_has_no_name_while_a_job_runs(tmp_path, ranks):
    """So a job leaves no files however it ends, even if its launcher is killed; 0 ranks: without a launcher."""
    script = """
comm = Communicator()
comm.barrier()
with open("/proc/self/maps") as maps:
    named = [line for line in maps if "/dev/shm/" in line and not line.endswith("(deleted)\\n")]
sys.stdout.write("".join(named))
"""
    ended = job(tmp_path, script, ranks=ranks, launcher=ranks > 0)
    assert (ended.code, ended.out, ended.err) == (0, "", "")


def test_mains_return_value_is_the_exit_code(tmp_path):
    assert job(tmp_path, "def main():\n    Communicator()\n    return 3\nrun(main)").code == 3


@pytest.mark.parametrize(
    ("statement", "code", "err"),
    [
        (MISTAKE, 2, "clcomm: batch_size: expected at most 10, got 11\n"),
        ("sys.exit(5)", 5, ""),
        ("sys.exit(256)", 1, ""),
        ("return 256", 1, ""),
        ("pass", 0, ""),
    ],
)
def test_alone_without_mpiexec(tmp_path, statement, code, err):
    ended = job(tmp_path, on_all(statement), launcher=False)
    assert (ended.code, ended.err) == (code, err)


@pytest.mark.parametrize("variable", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE"])
@pytest.mark.parametrize(("call", "code"), [("run(main)", 2), ("main()", 1)], ids=["run", "plain script"])
def test_mpiexec_of_another_mpi(tmp_path, variable, call, code):
    ended = job(tmp_path, on_all("pass", call), launcher=False, **{variable: "4"})
    assert ended.code == code
    assert len(ended.err.splitlines()) == 1
    assert ended.err.startswith("clcomm: mpiexec: expected a world of 4 ranks (its environment says so), but ")
    assert "sees 1; start the job with the mpiexec of that MPI (installed beside this Python: " in ended.err
