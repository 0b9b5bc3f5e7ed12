"""Short runs of clcomm's own commands, and of their files what the drawings show; times in ms, sizes in bytes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from clcomm.insight.report.recording import read_runs
from clcomm.insight.report.report import build
from clcomm.insight.trace.events import FIRST_PID
from clcomm.jobs.launch.mpiexec import find_mpiexec

ROOT = Path(__file__).resolve().parents[2]
#: Steps at the beginning that build kernels.
FIRST = 20
MNIST = ("-m", "examples.mnist", "--no-eval", "--quiet")


def started(ranks: int, *arguments: str) -> None:
    """Run a Python program on some ranks of this host."""
    command = [find_mpiexec().path, "-n", str(ranks), sys.executable, *arguments]
    subprocess.run(command, check=True, cwd=ROOT, timeout=300)


def on_two_hosts(*arguments: str) -> None:
    """Run a program on two hosts made of network namespaces, one rank each, joined by a slow cable; needs root."""
    script = str(ROOT / "tests" / "multihost" / "two_hosts.py")
    cable = ("--delay-ms", "0.2", "--rate-mbit", "1000")
    subprocess.run([sys.executable, script, *cable, "1", "1", *arguments], check=True, cwd=ROOT, timeout=300)


def with_file(start: Callable[..., None], *arguments: str) -> dict[str, Any]:
    """Return the JSON that a run writes to the file whose path is its last argument."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.json"
        start(*arguments, str(path))
        return json.loads(path.read_text())


def step_of(trace: dict[str, Any]) -> list[list[Any]]:
    """Return a step's slices: rank, thread, name, begin and length; 0 is when the first rank begins it.

    Of all steps it is one that is faster than nine of ten, which other programs on the machine have disturbed least.
    """
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    threads = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    steps = [event for event in events if event["name"] == "step" and event["args"]["step"] >= FIRST]
    first = [event for event in steps if event["pid"] == FIRST_PID]
    number = sorted(first, key=lambda event: event["dur"])[len(first) // 10]["args"]["step"]
    own = {event["pid"]: event for event in steps if event["args"]["step"] == number}
    origin = min(event["ts"] for event in own.values())
    return [
        [event["pid"] - FIRST_PID, threads[event["tid"]].split(" ")[0], event["name"],
         round((event["ts"] - origin) / 1e3, 3), round(event["dur"] / 1e3, 3)]
        for event in sorted(events, key=lambda event: event["ts"])
        if 0 <= event["ts"] - own[event["pid"]]["ts"] < own[event["pid"]]["dur"]
    ]  # fmt: skip


def data_parallel() -> list[list[Any]]:
    """A step of two ranks that average in one bucket."""
    options = ("--model", "convnet", "--batch-size", "64", "--max-steps", "80")
    return step_of(with_file(partial(started, 2), *MNIST, *options, "--trace"))


def overlap() -> dict[str, list[list[Any]]]:
    """A step of two ranks on two hosts, without and with overlap."""
    options = ("--model", "convnet", "--batch-size", "64", "--max-steps", "80", "--bucket-size", "64KiB")
    return {
        how: step_of(with_file(on_two_hosts, *MNIST, *options, "--overlap", how, "--trace")) for how in ("off", "on")
    }


def buckets() -> dict[str, Any]:
    """The ConvNet's tensors as they lie in the flat space, and the time of a step's reductions by bucket size."""
    sizes = ("4KiB", "64KiB")
    names = {"per tensor": "per tensor", **{size: size for size in sizes}, "bucketed": "1MiB"}
    options = ("--model", "convnet", "--batch-size", "64", "--max-steps", "120", "--quiet", "--variants", *sizes)
    document = with_file(partial(started, 2), "-m", "examples.compare_bucketing", *options, "--report")
    run = next(iter(document["runs"].values()))
    tensors = run["summary"]["parameters"][::-1]  # as they lie in the flat space
    return {
        "tensors": [[each["name"], 4 * each["size"]] for each in tensors],
        "variants": {
            shown: {name: document["variants"][variant][name] for name in ("buckets", "alone_ms")}
            for variant, shown in names.items()
        },
    }


def window() -> list[dict[str, Any]]:
    """The fastest all-reduces of two ranks through shared memory and through MPI's messages."""
    options = ("--transport", "shared", "mpi", "--min", "4KiB", "--max", "16MiB", "--iterations", "40")
    document = with_file(partial(started, 2), "-m", "clcomm", "bench", *options, "--json")
    rows = next(value for value in document.values() if isinstance(value, list) and "min_us" in str(value[:1]))
    return [{"transport": row["transport"], "bytes": row["bytes"], "us": row["min_us"]} for row in rows]


def zero() -> dict[str, dict[str, int]]:
    """The bytes that one of four ranks keeps of an MLP with Adam, by stage."""
    options = ("--model", "mlp", "--data", "synthetic", "--optimizer", "adam", "--max-steps", "12")
    found = {}
    for stage in (0, 1, 2, 3):
        divided = ("--zero", str(stage), "--bucket-size", "64KiB")
        run = with_file(partial(started, 4), *MNIST, *options, *divided, "--report")
        whole = 4 * sum(each["size"] for each in run["summary"]["parameters"])
        plain = {"parameters": whole, "gradients": whole, "optimizer_state": run["optimizer_state_bytes"]}
        found[str(stage)] = {name: (run["memory_bytes"] or plain)[name] for name in plain}
    return found


def pipeline() -> dict[str, list[list[Any]]]:
    """A step of four stages with six micro-batches, by schedule."""
    return {
        name: step_of(with_file(partial(started, 4), "-m", "docs.draw.pipeline_program", name))
        for name in ("gpipe", "1f1b")
    }


def slow_rank() -> dict[str, Any]:
    """A step of two ranks of which one has a slow loader, and the sentence of the report that names it."""
    with tempfile.TemporaryDirectory() as folder:
        trace, report = str(Path(folder) / "trace.json"), str(Path(folder) / "report.json")
        started(2, "-m", "docs.draw.slow_rank_program", trace, report)
        sentence = next(line for line in build(read_runs([report])).headline if line.startswith("Rank 1 keeps"))
        return {"slices": step_of(json.loads(Path(trace).read_text())), "sentence": sentence}


RUNS: dict[str, Callable[[], Any]] = {
    "data_parallel": data_parallel, "buckets": buckets, "window": window, "overlap": overlap, "zero": zero,
    "pipeline": pipeline, "slow_rank": slow_rank,
}  # fmt: skip


def ranks_of(slices: Sequence[Sequence[Any]]) -> list[int]:
    """Return the ranks of some slices."""
    return sorted({each[0] for each in slices})
