"""What surrounds a process: variables, modules, limits, the temporary directory; and that the doctor leaves nothing."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from clcomm.base.console.finding import NOTE, OK, PROBLEM
from clcomm.engine import Device, intel_runtime
from clcomm.tools.doctor import caches, environment, examine, limits, modules, mpi, opencl, place, start
from clcomm.tools.doctor.job import JobFacts
from tests.doctor import planted
from tests.doctor.test_faults import GOOD, bad, job_of, only
from tests.faults.launch import ROOT, clean_environment


@pytest.fixture(autouse=True)
def unset(monkeypatch) -> None:
    for name in [name for name in os.environ if name.startswith("CLCOMM_")]:
        monkeypatch.delenv(name)


def test_variables_are_named_once_with_their_ranks(monkeypatch, tmp_path) -> None:
    right = environment.probe()
    assert [finding.level for finding in environment.check(job_of({"variables": right}))] == [OK]
    wrong = {"CLCOMM_TIMEOUT_S": "abc", "CLCOMM_REPLAY": "maybe", "CLCOMM_DATA": str(tmp_path / "none"),
             "CLCOMM_REPORT": str(tmp_path), "CLCOMM_TRACE": f"{__file__}/x", "CLCOMM_HOOKS": "2"}  # fmt: skip
    for name, value in {**wrong, "CLCOMM_TRANSPRT": "mpi", "CLCOMM_TIMOUT_S": "5", "CLCOMM_QUITE_ANOTHER": ""}.items():
        monkeypatch.setenv(name, value)
    found = bad(environment.check, job_of({"variables": right}, {"variables": environment.probe()}))
    named = {finding.evidence["variable"]: finding for finding in found}
    assert len(named) == len(found) == len(wrong) + 3
    assert all(finding.what.startswith(f"rank 1: {name}") for name, finding in named.items())
    assert all(wrong[name] in named[name].what and named[name].level == PROBLEM for name in wrong)
    assert "Communicator(transport=...)" in named["CLCOMM_TRANSPRT"].remedy
    assert "did you mean CLCOMM_TIMEOUT_S?" in named["CLCOMM_TIMOUT_S"].remedy
    assert named["CLCOMM_QUITE_ANOTHER"].level == NOTE


@pytest.mark.parametrize("name", sorted(modules.PACKAGES))
def test_a_package_that_is_hidden(name, tmp_path, monkeypatch) -> None:
    assert bad(modules.check, job_of({"modules": modules.probe(str(tmp_path))})) == []
    file = tmp_path / f"{name}.py"
    file.write_text("x = 1\n")
    here = only(modules.check, job_of({"modules": modules.probe(str(tmp_path))}))
    assert here.what == f"{file} hides {modules.PACKAGES[name]} from programs that are started there"
    monkeypatch.syspath_prepend(str(tmp_path))
    found = only(modules.check, job_of({"modules": modules.probe("/")}))
    assert found.level == PROBLEM and f"{modules.PACKAGES[name]} is imported from {file}, not from" in found.what
    assert found.remedy.startswith(f"rename {file}")


def test_python_s_own_module_that_is_hidden(tmp_path) -> None:
    (tmp_path / "random.py").write_text("x = 1\n")
    (tmp_path / "tests.py").write_text("x = 1\n")
    assert "hides Python's own module random" in only(
        modules.check, job_of({"modules": modules.probe(str(tmp_path))})
    ).what  # fmt: skip


def test_what_needs_a_hidden_module_has_no_remedy_of_its_own(tmp_path) -> None:
    (tmp_path / "mpi4py.py").write_text("x = 1\n")
    facts = {"place": place.probe(), "modules": modules.probe(str(tmp_path)),
             "mpi": {**mpi.probe(), "library": "", "kind": None, "reason": "cannot import name 'MPI'"}}  # fmt: skip
    found = {each.check: each for each in examine.judge(JobFacts([facts], False), (modules.check, mpi.check))}
    assert found["MPI"].remedy == "mend the modules first, as said above" and found["MPI"].level == PROBLEM
    (tmp_path / "mpi4py.py").unlink()
    facts["modules"] = modules.probe(str(tmp_path))
    found = examine.judge(JobFacts([facts], False), (mpi.check,))
    assert "pip install" in next(each.remedy for each in found if each.level != OK)


def test_limits(monkeypatch) -> None:
    own = {"open": None, "most open": resource.RLIM_INFINITY, "bytes": None, "temporary": "/tmp", "reason": "",
           "free": 1 << 30}  # fmt: skip
    assert bad(limits.check, job_of({"limits": own})) == []
    for changed, check, level, words in (
        ({"open": 16}, "limits", PROBLEM, "16 files may be open"),
        ({"open": 200}, "limits", NOTE, "200 files may be open"),
        ({"bytes": 0}, "limits", PROBLEM, "a file may have 0 B at most (ulimit -f)"),
        ({"bytes": 1 << 25}, "limits", NOTE, "32 MiB at most"),
        ({"free": 0}, "temporary", PROBLEM, "it is full"),
        ({"free": 1 << 25}, "temporary", NOTE, "32 MiB free"),
        ({"reason": "Permission denied"}, "temporary", PROBLEM, "/tmp cannot be used: Permission denied"),
    ):
        found = only(limits.check, job_of({"limits": own | changed}))
        assert (found.check, found.level) == (check, level) and words in found.what
    stuck = {
        "place": place.probe(),
        "limits": own | {"open": 16},
        "start": {"command": [], "reason": "r", "seconds": 0},
    }
    found = {each.check: each.remedy for each in examine.judge(JobFacts([stuck], False), (limits.check, start.check))}
    assert found["start"] == "mend the limits first, as said above"
    assert "docker run --ulimit" in only(limits.check, job_of({"limits": own | {"open": 16, "most open": 16}})).remedy
    monkeypatch.setenv("TMPDIR", "/nowhere")
    facts = limits.probe()
    assert facts["temporary"] == "/nowhere" and facts["reason"] == "No such file or directory"


def test_a_full_temporary_directory(tmp_path) -> None:
    reason = planted.refusal()
    if reason:
        pytest.skip(f"no namespaces here: {reason}")
    look = "import json; from clcomm.tools.doctor import limits; print(json.dumps(limits.probe()))"
    fill = f"mount -t tmpfs -o size=64k tmpfs {tmp_path} && head -c 65536 /dev/zero > {tmp_path}/filler"
    command = ["unshare", "-rm", "sh", "-c", f"{fill} && exec {sys.executable} -c '{look}'"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT,
                          env=clean_environment(TMPDIR=str(tmp_path)))  # fmt: skip
    found = only(limits.check, job_of({"limits": json.loads(done.stdout)}))
    assert found.check == "temporary" and found.level == PROBLEM and "it is full" in found.what
    assert "export TMPDIR=DIR" in found.remedy


def test_pocl_s_cache_that_cannot_be_used(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("POCL_CACHE_DIR", str(tmp_path / "file"))
    found = only(caches.check, job_of({"caches": caches.probe()}))
    assert found.level == PROBLEM and f"POCL_CACHE_DIR={tmp_path}/file cannot be used: it is not" in found.what


def test_the_doctor_leaves_nothing_below_an_empty_home(tmp_path) -> None:
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    home.mkdir()
    temporary.mkdir()
    own = clean_environment(HOME=str(home), TMPDIR=str(temporary))
    for name in ("XDG_CACHE_HOME", "POCL_CACHE_DIR"):
        own.pop(name, None)
    command = [sys.executable, "-m", "clcomm", "doctor", "--json", "--directory", str(home)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=own, cwd=ROOT)
    found = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
    assert found["speed"]["level"] in (OK, NOTE) and found["start"]["level"] == OK, done.stdout
    assert list(home.rglob("*")) == [] and list(temporary.rglob("*")) == []
    assert found["caches"]["what"].startswith(str(Path(os.path.realpath(home)) / ".cache" / "clcomm"))


@pytest.mark.parametrize("as_json", [True, False])
def test_an_output_that_cannot_be_written(as_json, tmp_path) -> None:
    """Files may have no size: what was found is said on standard error, without a traceback."""
    code = "import sys, resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    code += "from clcomm.tools.commands import doctor\n"
    code += f"from clcomm.base.console.finding import ok; sys.exit(doctor._shown([ok('a', 'b')], {as_json}))"
    with (tmp_path / "out").open("w") as out:
        done = subprocess.run([sys.executable, "-c", code], stdout=out, stderr=subprocess.PIPE, text=True, timeout=60,
                              cwd=ROOT, env=clean_environment(), check=False)  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    lines = [line.split(None, 2) for line in done.stderr.splitlines()]
    assert ["ok", "a", "b"] in lines and ["PROBLEM", "output", "could not be written: File too large"] in lines


def test_a_runtime_that_is_not_taken_though_it_computes_on_the_same_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr(intel_runtime, "library", lambda: tmp_path)
    device = Device.select("cpu", cores=1)
    monkeypatch.setattr(opencl, "multiplications", lambda device: 5e10)
    facts = opencl.main(0, 1, 1)
    assert facts["others"] == [intel_runtime.PLATFORM] and device.is_cpu
    found = only(opencl.check, job_of({"opencl": GOOD}, {"opencl": GOOD | facts}))
    assert (found.check, found.level) == ("OpenCL", NOTE)
    assert found.what.startswith(f"rank 1: {intel_runtime.PLATFORM} could compute on this CPU too")
    assert found.remedy.startswith("clcomm devices times both")
