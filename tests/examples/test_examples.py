"""The examples as a user runs them: with and without mpiexec, and LizarDist's table to the last digit."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from clcomm.base.units import format_size
from clcomm.jobs.checkpoint import load
from tests.faults.launch import HUNG_S, clean_environment, mpiexec
from tests.sampling import runs_all_cases
from tests.trace import rules

ROOT = Path(__file__).resolve().parents[2]
MNIST = os.environ.get("CLCOMM_DATA", "")
needs_mnist = pytest.mark.skipif(
    not (Path(MNIST) / "train-images-idx3-ubyte.gz").exists(), reason="CLCOMM_DATA names no directory with MNIST"
)


def launch(module: str, *arguments: str, ranks: int = 0) -> subprocess.CompletedProcess[str]:
    """Run an example, under mpiexec where there are ranks."""
    launcher = [mpiexec(), "-n", str(ranks)] if ranks else []
    return subprocess.run(
        [*launcher, sys.executable, "-m", module, *arguments], env=clean_environment(), capture_output=True, text=True,
        timeout=2 * HUNG_S, check=False, stdin=subprocess.DEVNULL, cwd=ROOT,
    )  # fmt: skip


def run(module: str, *arguments: str, ranks: int = 0) -> str:
    """Run an example, expect success without a word on stderr, and return what it printed."""
    ended = launch(module, *arguments, ranks=ranks)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    return ended.stdout


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("module", "tables"), [("examples.mnist", 0), ("examples.compare_bucketing", 2)], ids=lambda each: str(each)
)
def test_quiet_prints_what_it_came_to_and_no_statistics(module: str, tables: int) -> None:
    """A comparison's two tables are its results."""
    words = ("--data", "synthetic", "--model", "mlp", "--batch-size", "16", "--max-steps", "12", "--no-eval")
    loud, quiet = (launch(module, *words, *more).stdout for more in ((), ("--quiet",)))
    assert ("step 12/" in loud) == (tables == 0) and "step 12/" not in quiet
    shown = "^(Where a step goes|Communication of a mean rank)"
    assert len(re.findall(shown, loud, re.MULTILINE)) == 2 - tables and not re.search(shown, quiet, re.MULTILINE)
    assert len(re.findall("^(Gradient all-reduce|Time$)", quiet, re.MULTILINE)) == tables


def parameters(path: Path) -> dict[str, np.ndarray]:
    return load(path).group("parameter")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("model", "ranks"), [("mlp", 0), ("convnet", 1), ("convnet", 3), ("mlp", 8)])
def test_mnist_reports_on_any_number_of_ranks(tmp_path: Path, model: str, ranks: int) -> None:
    out = run(
        "examples.mnist", "--data", "synthetic", "--model", model, "--batch-size", "16", "--max-steps", "15",
        "--report", str(tmp_path / "report.json"), ranks=ranks,
    )  # fmt: skip
    report = json.loads((tmp_path / "report.json").read_text())
    world_size = max(ranks, 1)
    expected = {
        "world_size": world_size, "model": model, "engine": "native", "dataset": "synthetic", "batch_size": 16,
        "steps": 15,
    }  # fmt: skip
    assert {name: report[name] for name in expected} == expected
    assert report["images_per_s"] > 0 and np.isfinite(report["train_loss"])
    assert 0 <= report["test_accuracy"] <= 1
    assert 0 < report["step_ms"]["p50"] <= report["step_ms"]["p95"]
    (gradients,) = [o for o in report["communication"]["operations"] if o["label"] == "gradients"]
    nbytes = {"convnet": 827_688, "mlp": 473_128}[model]
    assert (gradients["calls"], gradients["bytes"]) == (15, 15 * nbytes)
    assert f"{model} on {world_size} rank" in out
    assert re.search(r"15 steps; training loss \d\.\d+; test accuracy \d+\.\d+%; [\d,]+ images/s", out)
    assert out.count("training loss") == out.count("accuracy") == 1
    end = end_of_run(out)
    assert end["gradients"][:3] == ["15", *format_size(15 * nbytes).split()]
    assert set(end) >= {"gradients", "everything else", "a whole step"} and not any("all_" in name for name in end)
    step_s, steps = report_figures(tmp_path / "report.json")
    assert float(end["a whole step"][0].replace(",", "")) == pytest.approx(1e3 * step_s / steps, rel=0.01)


def report_figures(path: Path) -> tuple[float, int]:
    """Return the mean seconds of the steps of a report's ranks after the first 10, and how many these are."""
    ranks = json.loads(path.read_text())["ranks"]
    seconds = [each["training_s"] - each["cold"]["training_s"] for each in ranks]
    return sum(seconds) / len(seconds), ranks[0]["steps"] - ranks[0]["cold"]["steps"]


def end_of_run(out: str) -> dict[str, list[str]]:
    """Return the cells of the rows of a run's last tables, by the row's name."""
    lines = out.partition("Where a step goes")[2].splitlines()
    cells = [re.split(r"  +", line.strip()) for line in lines]
    return {name: " ".join(others).split() for name, *others in cells if others}


def test_an_interrupted_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    job = ["--data", "synthetic", "--model", "mlp", "--batch-size", "32", "--no-eval", "--quiet", "--checkpoint"]
    run("examples.mnist", *job, str(tmp_path / "whole.npz"), "--max-steps", "50", ranks=2)
    run("examples.mnist", *job, str(tmp_path / "parts.npz"), "--max-steps", "21", "--checkpoint-every", "5", ranks=2)
    out = run("examples.mnist", *job, str(tmp_path / "parts.npz"), "--resume", "--max-steps", "50", ranks=2)
    assert "epoch 1, step 21" in out
    whole, parts = parameters(tmp_path / "whole.npz"), parameters(tmp_path / "parts.npz")
    assert all(whole[name].tobytes() == parts[name].tobytes() for name in whole)


def test_logs_have_the_evaluation_of_a_run_that_ends_within_an_epoch(tmp_path: Path) -> None:
    log, report, points = tmp_path / "log.csv", tmp_path / "report.json", tmp_path / "points"
    has_tensorboard = importlib.util.find_spec("tensorboardX") is not None
    run(
        "examples.mnist", "--data", "synthetic", "--model", "mlp", "--max-steps", "12", "--quiet",
        "--log-csv", str(log), "--report", str(report), *(["--tensorboard", str(points)] if has_tensorboard else []),
        ranks=2,
    )  # fmt: skip
    with open(log, newline="") as file:
        rows = list(csv.DictReader(file))
    figures = json.loads(report.read_text())
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 13)]
    assert not any(row["test_accuracy"] for row in rows[:-1])
    assert float(rows[-1]["test_accuracy"]) == figures["test_accuracy"]
    assert float(rows[-1]["test_loss"]) == figures["test_loss"]
    assert len(list(points.glob("*"))) == has_tensorboard  # an event after the file's end would begin a second one


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_log_that_can_have_no_directory_is_refused_before_data_is_read(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "file").touch()
    log = str(tmp_path / "file" / "log.csv")
    ended = launch("examples.mnist", "--data", "synthetic", "--max-steps", "2", "--log-csv", log, ranks=ranks)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"clcomm: --log-csv: expected a file to write, got {log!r}: Not a directory\n"


def test_four_ranks_at_16_train_as_one_at_64(tmp_path: Path) -> None:
    job = ["--data", "synthetic", "--model", "mlp", "--no-eval", "--quiet", "--max-steps", "8", "--lr", "0.01"]
    job += ["--checkpoint"]
    run("examples.mnist", *job, str(tmp_path / "four.npz"), "--batch-size", "16", ranks=4)
    run("examples.mnist", *job, str(tmp_path / "one.npz"), "--batch-size", "64")
    four, one = (
        np.concatenate([array.ravel().astype(np.float64) for array in parameters(tmp_path / name).values()])
        for name in ("four.npz", "one.npz")
    )
    assert np.linalg.norm(four - one) / np.linalg.norm(one) < 1e-5


@pytest.mark.sampled(1)
@pytest.mark.parametrize("other", ["netcl", "torch"])
def test_other_engines_train_in_the_same_loop(tmp_path: Path, other: str) -> None:
    pytest.importorskip(other, reason=f"{other} is not installed")
    job = ["--data", "synthetic", "--model", "mlp", "--batch-size", "8", "--max-steps", "4", "--no-eval", "--quiet"]
    losses = {}
    for engine in ("native", other):
        run("examples.mnist", *job, "--engine", engine, "--report", str(tmp_path / f"{engine}.json"), ranks=2)
        losses[engine] = json.loads((tmp_path / f"{engine}.json").read_text())["train_loss"]
    assert losses == pytest.approx(dict.fromkeys(losses, losses["native"]), rel=1e-4)


@pytest.mark.parametrize("engine", ["native", "netcl"])
def test_a_trace_has_kernels_or_the_run_says_that_it_has_none(tmp_path: Path, engine: str) -> None:
    if engine != "native":
        pytest.importorskip(engine)
    out = run(
        "examples.mnist", "--data", "synthetic", "--model", "mlp", "--batch-size", "8", "--max-steps", "2", "--no-eval",
        "--engine", engine, "--trace", str(tmp_path / "run.json.gz"), ranks=2,
    )  # fmt: skip
    trace = rules.load(tmp_path / "run.json.gz")
    has_kernels = [bool(rules.on_thread(trace, "device", rank)) for rank in range(2)]
    assert has_kernels == [engine == "native"] * 2
    said = f"trace: without kernels, which --engine {engine} does not report"
    assert out.splitlines().count(said) == (engine != "native")


def table_rows(out: str) -> dict[str, list[str]]:
    lines = [line for line in out.splitlines() if line.startswith(("Average bytes", "Total all-reduce", "Total bytes"))]
    return {re.split(r"\s{2,}", line)[0]: re.split(r"\s{2,}", line)[1:] for line in lines}


@pytest.mark.slow
@needs_mnist
def test_the_published_table_of_one_epoch() -> None:
    """Of an epoch's first steps, unless every case is to run; its figures grow with the number of steps."""
    steps = 235 if runs_all_cases() else 5
    out = run(
        "examples.compare_bucketing", "--model", "convnet", "--batch-size", "128", "--epochs", "1", "--no-eval",
        "--data", MNIST, "--quiet", "--max-steps", str(steps), "--variants", ranks=2,
    )  # fmt: skip
    assert table_rows(out) == {
        "Average bytes/call": ["827,688", "103,461", "8x"],
        "Total all-reduce calls": [f"{steps:,}", f"{8 * steps:,}", "0.125x"],
        "Total bytes sent": [f"{827_688 * steps:,}", f"{827_688 * steps:,}", "1x"],
    }
    assert "both runs ended with the same parameters, bit for bit" in out


@pytest.mark.slow
def test_all_ways_are_compared_in_one_run(tmp_path: Path) -> None:
    report, chart = tmp_path / "all.json", tmp_path / "chart.svg"
    out = run(
        "examples.compare_bucketing", "--data", "synthetic", "--max-steps", "24", "--bucket-size", "256KiB",
        "--batch-size", "8", "--no-eval", "--quiet", "--report", str(report),
        "--trace", str(tmp_path / "run.json.gz"), "--plot", str(chart), ranks=2,
    )  # fmt: skip
    assert table_rows(out)["Total all-reduce calls"][:2] == ["72", "192"]
    compared = json.loads(report.read_text())
    names = ["bucketed", "per tensor", "64KiB", "64KiB, overlap", "auto", "bucketed, mpi", "per tensor, mpi"]
    assert list(compared["runs"]) == names  # 256KiB is bucketed itself
    assert f"all {len(names)} runs ended with the same parameters, bit for bit" in out
    assert len({run["train_loss"] for run in compared["runs"].values()}) == 1
    assert compared["variants"]["bucketed"]["buckets"] == [5672, 802816, 19200]
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "reports.md").read_text()))
    assert {*compared, *compared["variants"]["bucketed"], *compared["costs"]["mpi"]} <= documented
    assert compared["windows"] == 6 and compared["reference"] == "per tensor"
    for name, variant in compared["variants"].items():
        assert variant["moved_by"] == ("mpi" if name.endswith("mpi") else "shared")
        if name == "auto":
            continue  # it may still be trying sizes
        for figure in ("step_ms", "communication_ms", "images_per_s", "step_ratio", "alone_ms", "alone_ratio"):
            assert 0 < variant[figure]["low"] <= variant[figure]["median"] <= variant[figure]["high"]
    assert compared["variants"]["per tensor"]["step_ratio"] == {"median": 1, "low": 1, "high": 1}
    assert set(compared["costs"]) == {"auto", "mpi"} and all(
        each["alpha_s"] >= 0 for each in compared["costs"].values()
    )
    assert chart.read_text().startswith("<svg ")
    assert len(list(tmp_path.glob("run.*"))) == len(names)
    for name, calls in (("bucketed", 3), ("64KiB+overlap", 3), ("per-tensor+mpi", 8)):
        trace = rules.load(tmp_path / f"run.{name}.json.gz")
        for rank in range(2):
            steps = [event for event in rules.on_thread(trace, "steps", rank) if event["name"] == "step"]
            reductions = [e for e in rules.on_thread(trace, "communication", rank) if "bucket" in e.get("args", {})]
            assert (len(steps), len(reductions)) == (24, 24 * calls)
            assert rules.on_thread(trace, "device", rank)


@pytest.mark.sampled(1)
@needs_mnist
@pytest.mark.parametrize(("model", "target"), [("convnet", 0.98), ("mlp", 0.95)])
def test_mnist_reaches_its_accuracy(tmp_path: Path, model: str, target: float) -> None:
    run(
        "examples.mnist", "--model", model, "--data", MNIST, "--epochs", "1", "--quiet",
        "--target-accuracy", str(target), "--report", str(tmp_path / "report.json"), ranks=4,
    )  # fmt: skip
    assert json.loads((tmp_path / "report.json").read_text())["test_accuracy"] >= target


def test_the_bundled_digits_reach_95_percent() -> None:
    pytest.importorskip("sklearn")
    run("examples.mnist", "--data", "digits", "--quiet", "--target-accuracy", "0.95", ranks=4)
