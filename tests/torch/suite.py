"""PyTorch's own tests of distributed backends, under mpiexec or torchrun on backend clcomm and on gloo, as a table.

    python -m tests.torch.suite --ranks 2 3 4 --table tests/proofs/torch-suite.md
    python -m tests.torch.suite --ranks 3 --backends clcomm --tests test_all_reduce_sum test_barrier
    python -m tests.torch.suite --ranks 2 --launcher torchrun
    python -m tests.torch.suite --ranks 4 --keep outcomes.json  # again: goes on with the tests that have no outcome

PyTorch's spawner is replaced: mpiexec or torchrun starts the ranks, which run one test after another. A test that
fails, hangs or ends its process ends the job, and the next job goes on after it. Tests that are gated by
`BACKEND == "gloo"` run on clcomm too: the module is imported as for gloo, then its BACKEND is set.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

#: Seconds without a finished test after which a job is ended.
SILENT_S = 150
#: Seconds for which ranks that have ended a test wait for the others.
MEET_S = 40
#: Seconds in one collective after which a rank gives up.
TIMEOUT_S = 60
#: Seconds after which a job begins no other test.
JOB_S = 90
#: Why a test fails, or has another outcome on clcomm than on gloo.
_GLOO_ALONE = "PyTorch refuses `monitored_barrier` for every backend but gloo"
_NO_GPU = "needs GPUs, which its condition does not ask for"
REASONS = {
    "test_monitored_barrier_gloo": _GLOO_ALONE,
    "test_monitored_barrier_gloo_rank_0_timeout": _GLOO_ALONE,
    "test_monitored_barrier_gloo_subgroup": _GLOO_ALONE,
    "test_monitored_barrier_allreduce_hang": _GLOO_ALONE,
    "test_monitored_barrier_allreduce_hang_wait_all_ranks": _GLOO_ALONE,
    "test_monitored_barrier_failure_order": _GLOO_ALONE,
    "test_monitored_barrier_wait_all_ranks": _GLOO_ALONE,
    "test_all_to_all_cuda": _NO_GPU,
    "test_all_to_all_cuda_complex": _NO_GPU,
    "test_all_to_all_full_group_cuda": _NO_GPU,
    "test_all_to_all_group_cuda": _NO_GPU,
    "test_batch_isend_irecv_mixed_backend_err": "needs NCCL",
    "test_batch_isend_irecv_op_err": _NO_GPU,
    "test_SyncBatchNorm_process_group": "needs torchvision",
    "test_new_subgroups_with_group_param": "its list of ranks takes 4 for granted",
    "test_all_to_all": "gloo refuses lists of different shapes",
    "test_all_to_all_complex": "gloo refuses lists of different shapes",
    "test_all_to_all_full_group": "gloo refuses lists of different shapes",
    "test_all_to_all_group": "gloo refuses lists of different shapes",
}


class InPlaceOfGloo(str):
    """A backend's name that the tests' conditions take for "gloo"; all that is made by it is that backend's."""

    def __eq__(self, other: object) -> bool:
        return other in ("gloo", str(self))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")


# --- in a rank ---


def run_tests(backend: str, names: list[str], results: str) -> None:
    """Run these tests in this rank, and append outcomes to the file."""
    world = all_ranks()
    os.environ.update(BACKEND="gloo", TEMP_DIR="", WORLD_SIZE=str(world.Get_size()), MASTER_ADDR="127.0.0.1")
    import torch
    import torch.testing._internal.common_utils as common

    torch.manual_seed(common.SEED)  # its module creates a model that all ranks share, as forked processes do
    import torch.testing._internal.distributed.distributed_test as module

    module.BACKEND = InPlaceOfGloo(backend)
    if backend == "clcomm":
        import clcomm.torch  # noqa: F401
    suite = type("Suite", (module.TestDistBackend, module.DistributedTest._DistTestBase), {})
    began = time.monotonic()
    for name in names:
        if world.bcast(time.monotonic() - began > JOB_S):
            return  # the next job goes on
        note(results, world.Get_rank(), name, "begin", "")
        outcome, reason = run_test(suite, module, backend, name, world)
        everyone = meet(world, (outcome, reason))
        if everyone is None or any(theirs[0] == "fail" for theirs in everyone):
            note(results, world.Get_rank(), name, outcome if outcome == "fail" else "fail", reason)
            time.sleep(1)  # for the others' notes
            getattr(world, "Abort", os._exit)(1)
            time.sleep(MEET_S)  # which ends this process meanwhile
        note(results, world.Get_rank(), name, outcome, reason)


def all_ranks():
    """Return a communicator: MPI's, or under torchrun one of clcomm's own, by which the driver's ranks meet."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        from mpi4py import MPI

        return MPI.COMM_WORLD
    import torch.distributed as dist

    from clcomm.comm.transport.memory_comm import MemoryComm
    from clcomm.torch.launch import Meeting

    store, rank, size = next(dist.rendezvous("env://"))
    return MemoryComm.of(Meeting(dist.PrefixStore("suite", store), rank, size, timedelta(seconds=MEET_S)))


def run_test(suite, module, backend: str, name: str, world) -> tuple[str, str]:
    """Return outcome and reason of one test on this rank."""
    import torch.distributed as dist
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_distributed import TEST_SKIPS

    folder = world.bcast(tempfile.mkdtemp(prefix="torch-suite-") if world.Get_rank() == 0 else None)
    os.environ["TEMP_DIR"] = folder
    for each in ("barrier", "test_dir", "init_dir"):
        os.makedirs(os.path.join(folder, each), exist_ok=True)
    os.environ["INIT_METHOD"] = module.INIT_METHOD = f"file://{folder}/init_dir/shared_init_file"
    module.Barrier.barrier_id = 0
    world.Barrier()
    test = suite(name)
    test.rank, test.file_name = world.Get_rank(), f"{folder}/init"
    skips = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    common_utils.set_rng_seed()
    try:
        dist.init_process_group(
            init_method=f"file://{folder}/init",
            backend=backend,
            world_size=world.Get_size(),
            rank=world.Get_rank(),
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        test._barrier()
        getattr(test, name)()
        test._barrier()
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:
        skipped = isinstance(error, SystemExit) and error.code in skips
        if skipped or type(error).__name__ == "SkipTest":
            if dist.is_initialized():
                dist.destroy_process_group()
            return "skip", skips[error.code] if skipped else str(error)
        import traceback

        traceback.print_exc()
        return "fail", f"{type(error).__name__}: {error}"
    return "pass", ""


def meet(world, own: tuple[str, str]):
    """Return all ranks' outcomes; None if they don't come."""
    mine = json.dumps([own[0], own[1][:1000]]).encode().ljust(8192)
    import numpy as np

    everyone = np.empty((world.Get_size(), 8192), np.uint8)
    request = world.Iallgather(np.frombuffer(mine, np.uint8).copy(), everyone)
    deadline = time.monotonic() + MEET_S
    while not request.Test():
        if time.monotonic() > deadline:
            return None
        time.sleep(0.002)
    return [json.loads(bytes(row)) for row in everyone]


def note(results: str, rank: int, name: str, outcome: str, reason: str) -> None:
    """Append a line to the file of results."""
    line = json.dumps([rank, name, outcome, " ".join(reason.split())[:300]]) + "\n"
    with open(results, "a") as file:
        file.write(line)


# --- the driver ---


def all_tests() -> list[str]:
    """Return the names of PyTorch's tests."""
    code = (
        "import os; os.environ.update(BACKEND='gloo', TEMP_DIR='/tmp', WORLD_SIZE='2');"
        "from torch.testing._internal.distributed.distributed_test import DistributedTest as T;"
        "print(*sorted(n for n in dir(T._DistTestBase) if n.startswith('test_')))"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def find_outcomes(backend: str, ranks: int, names: list[str], launcher: list[str], log: Path, keep) -> dict:
    """Run the tests in as many jobs as it takes, and return (outcome, reason) by name; `keep` gets those so far."""
    found: dict[str, tuple[str, str]] = {}
    left = list(names)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder) / "results"
            results.touch()
            run_job(backend, ranks, left, launcher, results, log)
            begun = read(results, found, ranks)
        if begun is not None and begun in left:
            found.setdefault(begun, ("fail", "its process ended, or it hung"))
        done = [name for name in left if name in found]
        if not done:
            found[left[0]] = "fail", "the job did not start"
        left = [name for name in left if name not in found]
        print(f"{backend}, {ranks} ranks: {len(found)} of {len(names)}", flush=True)
        keep(found)
    return found


def run_job(backend: str, ranks: int, names: list[str], launcher: list[str], results: Path, log: Path) -> None:
    """Run one job until it ends, or has been silent for too long."""
    if launcher == ["torchrun"]:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "-m"]
    else:
        command = [*launcher, "-n", str(ranks), sys.executable, "-m"]
    command += ["tests.torch.suite", "--in-rank", backend]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("CLCOMM_TIMEOUT_S", None)  # it would stand in place of the time-outs that tests set
    with open(log, "a") as output:
        job = subprocess.Popen(
            [*command, "--results", str(results), "--tests", *names], stdout=output, stderr=output, env=environment
        )
        size, since = 0, time.monotonic()
        while job.poll() is None:
            time.sleep(0.2)
            if results.stat().st_size != size:
                size, since = results.stat().st_size, time.monotonic()
            if time.monotonic() - since > SILENT_S:
                job.terminate()
                try:
                    job.wait(20)
                except subprocess.TimeoutExpired:
                    job.kill()
                return


def read(results: Path, found: dict[str, tuple[str, str]], ranks: int) -> str | None:
    """Add the outcomes in the file; return the test that was begun last."""
    begun, by_name = None, {}
    for line in results.read_text().splitlines():
        _, name, outcome, reason = json.loads(line)
        if outcome == "begin":
            begun = name
        else:
            by_name.setdefault(name, []).append((outcome, reason))
    for name, outcomes in by_name.items():
        worst = sorted(outcomes, key=lambda each: (["fail", "pass", "skip"].index(each[0]), not each[1]))[0]
        if worst[0] == "fail" or len(outcomes) == ranks:
            found[name] = worst
    return begun


# --- the table ---


def write_table(path: Path, found: dict[tuple[str, int], dict[str, tuple]], torch_version: str, tests: int) -> None:
    """Write the tables: counts, the tests that differ between the two backends, and those that fail on both."""
    ranks = sorted({each for _, each in found})
    lines = [
        "# PyTorch's own tests on backend clcomm",
        "",
        f"{tests} tests of PyTorch {torch_version}.",
        "",
        "| ranks | backend | pass | fail | skipped | not run |",
        "|---|---|---|---|---|---|",
    ]
    for number in ranks:
        for backend in ("clcomm", "gloo"):
            outcomes = found.get((backend, number), {})
            counts = Counter(outcome for outcome, _ in outcomes.values())
            numbers = counts["pass"], counts["fail"], counts["skip"], tests - len(outcomes)
            lines.append(f"| {number} | {backend} | {' | '.join(map(str, numbers))} |")
    differing: dict[tuple[str, ...], list[int]] = {}
    failing: dict[tuple[str, ...], list[int]] = {}
    for number in ranks:
        ours, gloos = found.get(("clcomm", number), {}), found.get(("gloo", number), {})
        for name in sorted(ours.keys() & gloos.keys()):
            (own, why), (other, others) = ours[name], gloos[name]
            reason = REASONS.get(name, why or others).replace("|", "/")
            if own != other:
                differing.setdefault((name, own, other, reason), []).append(number)
            elif own == "fail":
                failing.setdefault((name, reason), []).append(number)
    lines += ["", "**Tests whose outcome differs**", ""]
    lines += _rows(("test", "clcomm", "gloo", "reason"), differing)
    lines += ["", "**Tests that fail on both**", "", *_rows(("test", "reason"), failing)]
    path.write_text("\n".join(lines) + "\n")


def _rows(columns: tuple[str, ...], found: dict[tuple[str, ...], list[int]]) -> list[str]:
    """Return a table of what was found at which numbers of ranks."""
    rows = [[name, ", ".join(map(str, numbers)), *rest] for (name, *rest), numbers in sorted(found.items())]
    lines = [(columns[0], "ranks", *columns[1:]), ["---"] * (len(columns) + 1), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--backends", nargs="+", default=["clcomm", "gloo"])
    parser.add_argument("--tests", nargs="+")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--keep", type=Path, help="a JSON file of outcomes, which are added; tests in it are not run")
    parser.add_argument("--log", type=Path, default=Path(os.devnull))
    parser.add_argument("--launcher", nargs="+", default=[str(Path(sys.executable).parent / "mpiexec")])
    parser.add_argument("--in-rank")
    parser.add_argument("--results")
    options = parser.parse_args()
    if options.in_rank:
        run_tests(options.in_rank, options.tests, options.results)
        return
    names = options.tests or all_tests()
    kept = json.loads(options.keep.read_text()) if options.keep and options.keep.exists() else {}
    for number in options.ranks:
        for backend in options.backends:

            def keep(found: dict, key: str = f"{backend} {number}") -> None:
                kept.setdefault(key, {}).update(found)
                if options.keep:
                    options.keep.write_text(json.dumps(kept, indent=1))

            left = [name for name in names if name not in kept.get(f"{backend} {number}", {})]
            found = find_outcomes(backend, number, left, options.launcher, options.log, keep)
            for name, (outcome, reason) in sorted(found.items()):
                if outcome == "fail":
                    print(f"{backend} {number} {name}: {reason}")
    if options.table:
        import torch

        by_run = {(key.split()[0], int(key.split()[1])): value for key, value in kept.items()}
        write_table(options.table, by_run, torch.__version__.split("+")[0], len(all_tests()))


if __name__ == "__main__":
    main()
