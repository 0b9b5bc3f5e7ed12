"""Which process is a rank, and which only has its variables; a copy of the shell is the launcher."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from clcomm.base.host.launcher import without_job
from clcomm.base.host.rank_process import RANK_PROCESS
from tests.faults.launch import clean_environment

pytestmark = [pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")]

#: Prints how many ranks the process knows of, 1 where it is none; then starts a command.
KNOWS = """
import subprocess, sys
from clcomm.base.host.rank_process import launched_ranks
sys.stdout.write(f"{launched_ranks()} ")
sys.stdout.flush()
subprocess.run(sys.argv[1:]) if sys.argv[1:] else None
"""
#: The same without a look at the launcher: a rank that has not imported clcomm.
KNOWS_NOTHING = "import subprocess, sys; subprocess.run(sys.argv[1:])"
#: Of a shell: starts a command and waits for it, or leaves it to another parent.
STARTS, LEAVES = '"$@"; exit $?', '(sleep 0.5; exec "$@") & exit 0'
WORDS = {
    "rank": (sys.executable, "-c", KNOWS),
    "unaware": (sys.executable, "-c", KNOWS_NOTHING),
    "shell": ("sh", "-c", STARTS, "sh"),
    "left": ("sh", "-c", LEAVES, "sh"),
}


@pytest.mark.parametrize(
    ("chain", "ranks"),
    [
        ("launcher rank", [4]), ("launcher shell rank", [4]), ("launcher rank rank", [4, 1]),
        ("launcher rank shell rank rank", [4, 1, 1]), ("launcher unaware rank", [1]),
        ("launcher shell rank left rank", [4, 1]), ("launcher rank left rank", [4, 1]),
        ("launcher rank launcher rank rank", [4, 4, 1]), ("script rank rank", [4, 1]), ("shell rank left rank", [4, 1]),
    ],
)  # fmt: skip
def test_a_rank_is_its_launchers_child_and_what_it_starts_is_none(tmp_path, chain, ranks) -> None:
    launcher, script = tmp_path / "hydra_pmi_proxy", tmp_path / "mpirun"
    shutil.copy2(shutil.which("sh"), launcher)
    script.write_text(f"#!/bin/sh\n{STARTS}\n")
    script.chmod(0o755)
    words = {**WORDS, "launcher": (launcher, "-c", STARTS, "launcher"), "script": (script,)}
    command = [word for name in chain.split() for word in words[name]]
    ended = subprocess.run(
        command, env=clean_environment(PMI_RANK="0", PMI_SIZE="4"), stdout=subprocess.PIPE, text=True, timeout=100,
        check=True,
    )  # fmt: skip
    assert [int(word) for word in ended.stdout.split()] == ranks


def test_what_does_not_belong_to_a_job_keeps_what_the_user_has_set() -> None:
    told = {"PMI_RANK", "PMIX_NAMESPACE", "OMPI_COMM_WORLD_SIZE", "PALS_SIZE", "SLURM_PROCID", "RANK", "MASTER_PORT"}
    own = {"OMPI_MCA_osc", "PRTE_MCA_rmaps", "OMPI_ALLOW_RUN_AS_ROOT", "SLURM_JOB_ID", "PATH", "CLCOMM_TIMEOUT_S"}
    everything = dict.fromkeys((*told, *own, RANK_PROCESS, "CLCOMM_MEMORY"), "1")
    assert without_job(everything) == dict.fromkeys(own, "1")
