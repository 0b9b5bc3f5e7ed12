"""The scripts and manifests of deploy/: well formed, and run as far as that goes without the systems they are for.

tests/deploy/fakes has stand-ins for the schedulers' commands, which set what those set and run on this host.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.faults.launch import HUNG_S, ROOT, clean_environment, mpiexec

DEPLOY, FAKES = ROOT / "deploy", Path(__file__).parent / "fakes"
SCRIPTS = sorted(path for path in DEPLOY.iterdir() if path.read_text().startswith("#!/usr/bin/env bash"))
#: How each is submitted, and the ranks that it then has.
SUBMITTED = {
    "slurm.sbatch": (["sbatch", "deploy/slurm.sbatch"], 4),
    "slurm-srun.sbatch": (["sbatch", "deploy/slurm-srun.sbatch"], 4),
    "job.pbs": (["qsub", "deploy/job.pbs"], 4),
    "job.lsf": (["bsub"], 4),
}


def test_each_script_is_submitted_by_a_test() -> None:
    assert {path.name for path in SCRIPTS} == set(SUBMITTED)


@pytest.mark.parametrize("path", [*SCRIPTS, *sorted(FAKES.iterdir())], ids=lambda path: path.name)
def test_scripts_are_well_formed(path: Path) -> None:
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True).stderr == ""
    shellcheck = shutil.which(
        "shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    if shellcheck is None:
        pytest.skip("shellcheck is not installed; pip install -e '.[test]'")
    said = subprocess.run([shellcheck, "--exclude", "SC1091", str(path)], capture_output=True, text=True)
    assert (said.returncode, said.stdout) == (0, "")  # SC1091: an environment's activate is not there to be read


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SUBMITTED)
def test_a_job_that_a_scheduler_starts_trains(name: str, tmp_path: Path) -> None:
    """The scripts run as they are but for `ARGS`, which shortens the training, and the environment's place."""
    command, ranks = SUBMITTED[name]
    launcher = mpiexec()
    if "HYDRA" not in subprocess.run([launcher, "--version"], capture_output=True, text=True).stdout:
        pytest.skip("the stand-ins need MPICH's mpiexec")
    if find_spec("sklearn") is None:
        pytest.skip("scikit-learn is not installed")
    activate = tmp_path / "venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f'PATH="{Path(sys.executable).parent}:$PATH"\n')
    report, log = tmp_path / "report.json", tmp_path / "log"
    environment = clean_environment(
        CLCOMM_VENV=str(tmp_path / "venv"), FAKE_LOG=str(log), FAKE_MPIEXEC=launcher, OMP_NUM_THREADS="1",
        ARGS=f"--max-steps 3 --batch-size 8 --no-eval --report {report} --checkpoint {tmp_path / 'run.npz'}",
    )  # fmt: skip
    environment["PATH"] = f"{FAKES}:{environment['PATH']}"
    with open(DEPLOY / name) as script:
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, stdin=script, capture_output=True, text=True, timeout=HUNG_S
        )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(report.read_text())
    assert (found["world_size"], found["steps"], found["dataset"]) == (ranks, 3, "digits")
    if name == "slurm-srun.sbatch":
        assert log.read_text().startswith("--mpi=pmi2 --cpus-per-task=4 --kill-on-bad-exit=1 python -m examples.mnist")


# --- containers and Kubernetes ---

yaml, jsonschema = pytest.importorskip("yaml"), pytest.importorskip("jsonschema")
SCHEMA = json.loads(Path(__file__).with_name("mpijob_schema.json").read_text())


def manifest() -> dict:
    return yaml.safe_load((DEPLOY / "mpijob.yaml").read_text())


def test_the_manifest_has_the_fields_of_an_mpijob() -> None:
    jsonschema.validate(manifest(), SCHEMA)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("spec.slotsPerWorker", "2"), ("spec.slotPerWorker", 2), ("spec.mpiImplementation", "mpich"),
        ("spec.runPolicy.backoffLimits", 1), ("spec.mpiReplicaSpecs.Master", {}), ("apiVersion", "kubeflow.org/v1"),
        ("spec.mpiReplicaSpecs.Worker.template.spec.container", []), ("spec.mpiReplicaSpecs.Worker.replicas", 0),
    ],
)  # fmt: skip
def test_a_mistake_in_a_manifest_is_found(place: str, value: object) -> None:
    wrong = copy.deepcopy(manifest())
    *path, last = place.split(".")
    inner = wrong
    for name in path:
        inner = inner[name]
    inner[last] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, SCHEMA)


def test_the_manifests_parts_fit_each_other_and_the_image() -> None:
    spec, image = manifest()["spec"], (DEPLOY / "Dockerfile").read_text()
    pods = {kind: each["template"]["spec"] for kind, each in spec["mpiReplicaSpecs"].items()}
    (launcher,), (worker,) = (pods[kind]["containers"] for kind in ("Launcher", "Worker"))
    words = launcher["command"] + launcher["args"]
    ranks = spec["mpiReplicaSpecs"]["Worker"]["replicas"] * spec["slotsPerWorker"]
    assert words[:2] == ["clcomm", "run"] and words[words.index("-n") + 1] == str(ranks)
    assert words[words.index("--data") + 1] == "digits"  # bundled: a pod needs no network
    assert spec["sshAuthMountPath"] == "/home/mpiuser/.ssh" and f"{spec['sshAuthMountPath']}/id_rsa" in image
    assert worker["args"][-1] in image and f"Port {worker['readinessProbe']['tcpSocket']['port']}" in image
    assert launcher["image"] == worker["image"] == "clcomm:latest"
    mounts = {mount["name"] for mount in worker["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pods["Worker"]["volumes"]}
    assert not any("gpu" in key for each in (launcher, worker) for key in each["resources"]["limits"])


def test_the_image_has_what_the_compose_file_and_pip_need() -> None:
    image = (DEPLOY / "Dockerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", image, re.MULTILINE) for name in line.split()]
    assert all((ROOT / name).exists() for name in copied)
    assert {"pyproject.toml", "README.md", "LICENSE", "clcomm", "models", "training", "examples"} == set(copied)
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert list(compose) == ["services", "volumes"]
    service = compose["services"]["train"]
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    assert service["command"][:2] == ["clcomm", "run"] and service["shm_size"] == "1gb"
    assert {mount.partition(":")[0] for mount in service["volumes"]} <= set(compose["volumes"])
