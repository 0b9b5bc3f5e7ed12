"""`python -m benchmarks.policies`: held-out loss and bytes of training that talks rarely, beside plain data parallel.

The GPT example trains with nanoGPT's settings for computers without a GPU, from the same seed and for as many steps
under each policy. The bytes are those that a rank has to send at least: of an all-reduce 2 (N - 1) / N of the array, of
an all-gather (N - 1) / N of the whole. Neither depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks import harness, results_file
from benchmarks.harness import Bar, Grid, Report
from benchmarks.workers import run_to_end
from clcomm.job import run

PROGRAM = "benchmarks.policies"
PLAIN = "none"
POLICIES = ("diloco:h=100", "streaming:h=25", "sparseloco:h=25", "noloco:h=100", "local:h=100")
#: The losses that papers' authors call equal, and the share of the bytes, by policy.
LOSS_BARS = {"diloco": 1.02, "streaming": 1.02, "sparseloco": 1.03, "demo": 1.03}
BYTES_BAR = 0.01
#: What training sends, by the labels under which it is counted.
_LABELS = ("gradients", "outer gradients")


class Trained(NamedTuple):
    """A run's held-out loss, and the bytes that a rank sends in a step."""

    loss: float
    step_bytes: float


def main() -> None:
    options, console = parse(), harness.make_console()
    report = Report("policies: held-out loss and bytes", harness.command_line(PROGRAM))
    runs: dict[str, Trained] = {}
    with console.status("training") as status:
        for policy in (PLAIN, *options.policies):
            status.update(policy)
            runs[policy] = train(options, policy)
    compare(options, runs, report)
    harness.conclude(report, console, options.record)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}", description="Loss and bytes of policies.", allow_abbrev=False
    )
    parser.add_argument("--ranks", type=harness.positive, default=4, help="default: %(default)s")
    parser.add_argument("--steps", type=harness.positive, default=2000, help="default: %(default)s")
    parser.add_argument("--policies", nargs="+", default=POLICIES, metavar="POLICY", help="default: %(default)s")
    parser.add_argument(
        "--record", action="store_true", help=f"keep the results in benchmarks/{results_file.RESULTS.name}"
    )
    return parser.parse_args()


def train(options: argparse.Namespace, policy: str) -> Trained:
    """Train the example once; policy: also a compression, such as "demo:32", with SGD."""
    how = ["--compression", policy, "--optimizer", "sgd"] if policy.startswith("demo") else ["--policy", policy]
    with tempfile.TemporaryDirectory(prefix="clcomm-bench-") as folder:
        file = Path(folder, "run.json")
        run_to_end(
            options.ranks, "-m", "examples.gpt", "--preset", "nanogpt-cpu", "--sample", "0", "--quiet",
            "--max-steps", str(options.steps), "--report", str(file), *how,
        )  # fmt: skip
        document = json.loads(file.read_text(encoding="utf-8"))
    rows = [row for row in document["communication"]["operations"] if row["label"] in _LABELS]
    sent = sum(sent_bytes(row["operation"], row["wire_bytes"], options.ranks) for row in rows)
    return Trained(document["test_loss"], sent / document["steps"])


def sent_bytes(operation: str, nbytes: float, ranks: int) -> float:
    """Return the bytes that a rank sends at least in collectives of so many counted bytes."""
    shares = {"all_reduce": 2 * (ranks - 1) / ranks, "all_gather": (ranks - 1) / ranks}
    return nbytes * shares.get(operation, 1.0)


def compare(options: argparse.Namespace, runs: dict[str, Trained], report: Report) -> None:
    """Compare the policies with plain data parallel."""
    plain = runs[PLAIN]
    title = f"nanoGPT's run for CPUs, {options.ranks} ranks, {options.steps} steps"
    grid = Grid(title, ("policy", "held-out loss", "to plain", "bytes a step", "to plain"))
    for policy, found in runs.items():
        loss, share = found.loss / plain.loss, found.step_bytes / plain.step_bytes
        grid.add(policy, f"{found.loss:.4f}", f"{loss:.3f}x", f"{found.step_bytes:,.0f}", f"1/{1 / share:.0f}")
        bar = LOSS_BARS.get(policy.partition(":")[0])
        if bar is not None:
            report.bars.append(Bar(f"{policy}: held-out loss to plain", loss, bar, at_least=False))
            report.bars.append(Bar(f"{policy}: bytes to plain", share, BYTES_BAR, at_least=False))
    report.grids.append(grid)


if __name__ == "__main__":
    run(main)
