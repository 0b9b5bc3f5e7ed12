"""Users' mistakes: one line for all ranks, exit code 2, no traceback, and no file touched."""

from __future__ import annotations

import gzip
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from clcomm.jobs.checkpoint import Checkpoint, save
from tests.faults.launch import HUNG_S, clean_environment, mpiexec
from training.data.idx import write_idx

QUICK = ("--data", "synthetic", "--model", "mlp", "--no-eval", "--max-steps", "3", "--quiet")


def run(*arguments: str, ranks: int = 2, **environment: str) -> subprocess.CompletedProcess:
    """Run the MNIST example as a user does, on some ranks; 0: without mpiexec."""
    launcher = [mpiexec(), "-n", str(ranks)] if ranks else []
    return subprocess.run(
        [*launcher, sys.executable, "-m", "examples.mnist", *arguments],
        env=clean_environment(**environment), capture_output=True, text=True, timeout=HUNG_S, check=False,
        stdin=subprocess.DEVNULL, cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip


def assert_one_line(ended: subprocess.CompletedProcess, pattern: str, code: int = 2) -> None:
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, ended.stderr
    assert re.fullmatch(f"clcomm: {pattern}", lines[0]), lines[0]
    assert ended.returncode == code


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", ["0", "-1", "abc", "1.5"])
def test_bucket_sizes(size: str) -> None:
    pattern = rf"bucket_size: expected a positive number of bytes such as .*, got '{re.escape(size)}'"
    assert_one_line(run(*QUICK, f"--bucket-size={size}"), pattern)


def test_unknown_option_and_value() -> None:
    assert_one_line(
        run("--modell", "mlp"), r"unrecognized arguments: --modell mlp \(did you mean --model\?\); see python -m .*"
    )
    assert_one_line(run("--batch-size", "0"), r"argument --batch-size: expected a whole number from 1 up, got '0'; .*")
    assert_one_line(run("--engine", "cuda"), r"argument --engine: invalid choice: 'cuda' .*")


@pytest.mark.parametrize("option", ["--help", "--help-all"])
def test_help_is_printed_once(option: str) -> None:
    ended = run(option)
    assert ended.returncode == 0 and ended.stderr == ""
    assert ended.stdout.count("usage: python -m examples.mnist") == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [0, 3])
def test_unknown_device(ranks: int) -> None:
    ended = run(*QUICK, "--device", "gpu:7", ranks=ranks)
    assert_one_line(ended, r"device='gpu:7': expected .*cpu:0.*")
    ended = run(*QUICK, ranks=ranks, CLCOMM_DEVICE="no such thing")
    assert_one_line(ended, r"CLCOMM_DEVICE='no such thing': expected .*cpu:0.*")


def test_no_opencl_platform(tmp_path: Path) -> None:
    ended = run(*QUICK, OCL_ICD_VENDORS=str(tmp_path / "nowhere"))
    assert_one_line(ended, r"no OpenCL platform found: run `pip install -e '.*\[pocl\]'` .*")


def test_mpiexec_of_another_mpi() -> None:
    # Each rank runs alone: the environment of Open MPI's mpiexec, with another MPI library.
    ended = run(*QUICK, ranks=0, OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_RANK="1")
    if "Open MPI" in ended.stderr:
        pytest.skip("Open MPI is the MPI of this environment")
    assert_one_line(ended, r"mpiexec: expected a world of 4 ranks .* sees 1; start the job with .*")


def test_batch_larger_than_a_shard() -> None:
    ended = run(*QUICK, "--batch-size", "5000")
    assert_one_line(ended, r"batch_size: expected at most 4096, a rank's shard of 8192 samples over 2 .*, got 5000; .*")


def write_mnist(directory: Path) -> None:
    directory.mkdir()
    random = np.random.default_rng(0)
    for part, count in (("train", 64), ("t10k", 32)):
        write_idx(directory / f"{part}-images-idx3-ubyte.gz", random.integers(0, 256, (count, 28, 28), np.uint8))
        write_idx(directory / f"{part}-labels-idx1-ubyte.gz", random.integers(0, 10, count).astype(np.uint8))


def test_truncated_and_wrong_idx_files(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_mnist(data)
    images = data / "train-images-idx3-ubyte.gz"
    whole = images.read_bytes()
    arguments = ("--data", str(data), "--model", "mlp", "--batch-size", "8", "--no-eval", "--quiet")
    assert run(*arguments).returncode == 0
    images.write_bytes(whole[: len(whole) // 2])
    assert_one_line(run(*arguments), r".*train-images-idx3-ubyte.gz.*")
    shutil.copy(data / "train-labels-idx1-ubyte.gz", images)
    assert_one_line(run(*arguments), r".*train-images-idx3-ubyte.gz.*expected.*")
    images.write_bytes(gzip.compress(b"not an IDX file at all"))
    assert_one_line(run(*arguments), r".*train-images-idx3-ubyte.gz.*expected.*")
    assert_one_line(run("--data", str(tmp_path / "nowhere"), "--quiet"), r".*nowhere.*")


def test_damaged_and_foreign_checkpoints(tmp_path: Path) -> None:
    file = tmp_path / "run.npz"
    assert run(*QUICK, "--checkpoint", str(file)).returncode == 0
    whole = file.read_bytes()
    ended = run(*(a.replace("mlp", "convnet") for a in QUICK), "--resume", str(file))
    assert_one_line(ended, r"checkpoint: is of another model: parameter 'conv1.weight' is .*")
    ended = run(*QUICK, "--resume", str(file), "--lr", "0.5")
    assert_one_line(ended, r"checkpoint: was written with --lr 0.05, this job has 0.5; .*")
    assert file.read_bytes() == whole
    file.write_bytes(whole[:-100])
    assert_one_line(run(*QUICK, "--resume", str(file)), r"checkpoint .*run.npz: damaged or not a checkpoint .*")
    ended = run(*QUICK, "--resume", str(tmp_path / "no.npz"))
    assert_one_line(ended, r"checkpoint .*no.npz: expected a file, found none")
    assert_one_line(run(*QUICK, "--resume"), r"--resume: expected a file, here or with --checkpoint")
    save(file, Checkpoint(facts={"job": {}}))
    assert_one_line(run(*QUICK, "--resume", str(file)), r"checkpoint: is of another model: .*")
    assert sorted(os.listdir(tmp_path)) == ["run.npz"]


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    blocked = str(tmp_path / "file" / "run.npz")
    assert_one_line(run(*QUICK, "--checkpoint", blocked), r"--checkpoint: expected a file to write, got .*")
    assert_one_line(run(*QUICK, "--report", blocked), r"--report: expected a file to write, got .*")


def test_gradients_that_are_not_finite() -> None:
    arguments = [*QUICK[:-3], "--max-steps", "40", "--quiet", "--lr", "1e18", "--optimizer", "sgd"]
    ended = run(*arguments, "--check-finite")
    assert_one_line(ended, r"gradient: expected finite numbers, but .*; lower the learning rate.*", code=1)
    assert run(*arguments).returncode == 0  # no check requested


def test_a_missed_target_has_its_own_exit_code() -> None:
    arguments = ["--data", "synthetic", "--model", "mlp", "--max-steps", "1", "--quiet", "--target-accuracy", "100"]
    ended = run(*arguments)
    assert ended.returncode == 3 and "is below the target of 100.00%" in ended.stdout


def test_the_traceback_is_there_when_asked_for() -> None:
    ended = run(*QUICK, "--device", "gpu:7", ranks=0, CLCOMM_TRACEBACK="1")
    assert "Traceback" in ended.stderr and "DeviceError" in ended.stderr and ended.returncode == 2
