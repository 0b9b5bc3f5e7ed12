"""`clcomm verify` of whole jobs: what it prints, its exit codes, and jobs that hang or fail; tests/torch has others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.launch import HUNG_S, ROOT, clean_environment, mpiexec
from tests.proofs import verify as proof

SCRIPTS = {
    "fails": "import clcomm\nprint('begins')\nraise ValueError('no such file')\n",
    "does not train": "import clcomm\ncomm = clcomm.Communicator()\ncomm.barrier()\n",
}


def verify(folder: Path, *words: str) -> tuple[int, str, str]:
    mpiexec()  # skips where there is none
    ended = subprocess.run(
        [sys.executable, "-m", "clcomm", "verify", *words], cwd=folder, env=clean_environment(PYTHONPATH=str(ROOT)),
        capture_output=True, text=True, timeout=HUNG_S, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return ended.returncode, ended.stdout, ended.stderr


def test_an_example_trains_as_one_process_would(tmp_path):
    code, out, err = verify(tmp_path, "--steps", "3", "-m", "examples.loop")
    assert (code, err) == (0, "")
    assert "the mean over 2 ranks at every step" in out and "after 3 steps" in out
    assert out.splitlines()[-1] == "clcomm verify: nothing to complain of, 6 ok"


def test_a_policy_is_noted_and_not_blamed(tmp_path):
    code, out, _ = verify(tmp_path, "--json", "-m", "tests.proofs.training_scripts", "native", "mlp", "diloco", "3")
    found = json.loads(out)["findings"]
    assert code == 0 and not [each for each in found if each["level"] == "problem"]
    assert any("parameters are exchanged: local SGD, or a policy" in str(each) for each in found)


def test_a_rank_that_skips_a_step_ends_by_its_cause(tmp_path):
    words = ["--json", "--timeout", "20", "-m", "tests.proofs.training_scripts", "native", "mlp", "skipped-step", "3"]
    code, out, err = verify(tmp_path, *words)
    assert (code, err) == (1, "")
    problems = [each for each in json.loads(out)["findings"] if each["level"] == "problem"]
    assert [each["evidence"]["cause"] for each in problems] == ["skipped-step"]


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("fails", "the script ended with ValueError: no such file on rank 0"),
        ("does not train", "no optimizer step was seen; it knows those of torch.optim and clcomm.optim"),
    ],
)
def test_a_script_that_cannot_be_judged_is_exit_code_2_and_one_line(tmp_path, script, why):
    (tmp_path / "train.py").write_text(SCRIPTS[script])
    code, out, err = verify(tmp_path, "train.py")
    assert (code, out) == (2, "")
    assert err == f"clcomm: verify: cannot judge this script: {why}; --show-output prints what it printed\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "verify: expected a script, as in clcomm verify -n 4 train.py, got none"),
        (["missing.py"], "verify: expected a Python script that exists, got 'missing.py'"),
    ],
)
def test_a_script_is_needed(tmp_path, words, message):
    code, out, err = verify(tmp_path, *words)
    assert (code, out, err) == (2, "", f"clcomm: {message}\n")


def test_drawn_trainings_of_the_engine_are_judged_rightly():
    found = proof.main(4, 5, ["native"], counts=(2,), hang=False)
    assert found == {"mistakes": [4, 4], "right": [4, 4], "others": []}
