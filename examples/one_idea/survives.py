"""Idea: a job whose ranks are killed, and that starts again each time, ends with the bits of one that nobody disturbed.

    python -m examples.one_idea.survives

Look at: the SHA-256 of parameters and optimizer state at the end of both runs. `--chaos` kills ranks with SIGKILL in
steps and at places within them that are drawn from the seed, so another seed kills others: give it as an argument.
"""

import hashlib
import re
import subprocess
import sys
import tempfile

from clcomm.jobs import checkpoint

JOB = (
    "-m", "examples.mnist", "--model", "mlp", "--data", "digits", "--logical-shards", "8", "--batch-size", "8",
    "--optimizer", "adam", "--epochs", "6", "--checkpoint-every", "10", "--no-eval", "--quiet",
)  # fmt: skip


def train(*options: str) -> tuple[str, list[str]]:
    """Train on four ranks, and return the SHA-256 at the end and the faults' lines."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "clcomm", "run", "-n", "4", "--pause", "0", *options, *JOB]
        ended = subprocess.run(
            [*command, "--checkpoint", f"{folder}/run.npz"], capture_output=True, text=True, check=False
        )
        if ended.returncode != 0:
            sys.exit(ended.stderr)
        arrays = checkpoint.load(f"{folder}/run.npz").arrays
    state = b"".join(arrays[name].tobytes() for name in sorted(arrays) if name.startswith(("parameter", "optimizer")))
    return hashlib.sha256(state).hexdigest(), re.findall("chaos: fault .*", ended.stderr)


undisturbed, _ = train()
print(f"undisturbed    {undisturbed}", flush=True)
seed = sys.argv[1] if len(sys.argv) > 1 else "7"
killed, faults = train("--restarts", "99", "--chaos", f"seed={seed},every=50")
print("\n".join([*faults, f"killed {len(faults)} x   {killed}", "equal" if killed == undisturbed else "NOT EQUAL"]))
sys.exit(killed != undisturbed or not faults)
