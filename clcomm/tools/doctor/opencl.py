"""OpenCL: platforms, each rank's device, its speed, and the number of its cores.

The device is timed in a process of its own, as a driver with a damaged cache may crash or hang:
`python -m clcomm.tools.doctor.opencl LOCAL_RANK LOCAL_SIZE CORES` prints the facts as JSON.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from clcomm.base.console.finding import Finding, note, ok, problem
from clcomm.base.errors import ClcommError, name_ranks, pip_install
from clcomm.base.host.launcher import without_job
from clcomm.base.storage.scratch import scratch_directory
from clcomm.tools.doctor import caches
from clcomm.tools.doctor.job import Facts, JobFacts

if TYPE_CHECKING:
    from clcomm.engine.device import Device

T = TypeVar("T")

#: How long the device may take, with the building of its kernels.
_LIMIT_S = 60.0
#: A device slower than this share of the others like it is found; so is one that reaches less of the CPU's peak.
SLOW, FAR_FROM_PEAK = 0.65, 0.1
_NO_DEVICE = f"{pip_install('pocl')} for a CPU device, or the GPU vendor's driver (docs/installation.md)"
#: The product of two matrices of so many rows and columns is timed, in windows of at least so long.
SIDE, WINDOWS, WINDOW_S = 512, 5, 0.06


def probe() -> dict[str, object]:
    """Return the facts of `main` in a process of its own, the CPU's peak, or the reason for no answer."""
    from clcomm.engine import selection

    local_rank, local_size = selection.local_place()
    cores = max(1, selection.core_share(local_size))
    command = [sys.executable, "-m", "clcomm.tools.doctor.opencl", str(local_rank), str(local_size), str(cores)]
    found: dict[str, object] = {"cores": cores, "peak": cores * core_peak()}
    with _caches_apart() as apart:
        try:
            ended = subprocess.run(
                command, capture_output=True, text=True, timeout=_LIMIT_S, check=False, stdin=subprocess.DEVNULL,
                env={**without_job(os.environ), **apart},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {**found, "device": "", "reason": f"no answer within {_LIMIT_S:g} s"}
    for line in ended.stdout.splitlines():
        if line.startswith("{"):
            return {**found, **json.loads(line)}
    if ended.returncode < 0:
        return {**found, "device": "", "reason": "", "crashed": signal.Signals(-ended.returncode).name}
    last = (ended.stderr.strip().splitlines() or ["no output"])[-1]
    return {**found, "device": "", "reason": f"exit code {ended.returncode}: {last}"}


@contextmanager
def _caches_apart() -> Iterator[dict[str, str]]:
    """Yield the variables by which a process keeps what it builds to itself, with this user's tuned sizes to read.

    Where no temporary directory can be used, which is a finding of its own, it keeps nothing.
    """
    with ExitStack() as opened:
        try:
            folder = opened.enter_context(scratch_directory("run"))
            with suppress(OSError):  # most have none
                shutil.copytree(caches.own_directory() / "tuning", folder / "clcomm" / "tuning")
        except (ClcommError, OSError):
            yield {"POCL_KERNEL_CACHE": "0"}
            return
        yield {"XDG_CACHE_HOME": str(folder), "CLCOMM_CACHE_DIR": str(folder / "clcomm"),
               "POCL_CACHE_DIR": str(folder / "pocl")}  # fmt: skip


def core_peak() -> float:
    """Return about how many float32 operations a second a core can do: its clock, times its vectors' multiply-adds.

    Two multiply-adds a cycle in the widest vectors, which AMD's Zen 4 does in two passes; 0.0: the clock is not known.
    """
    hertz = _clock()
    if platform.machine() == "aarch64":
        return hertz * 16
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return 0.0
    features = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    if "avx512f" in features:
        return hertz * (32 if "AuthenticAMD" in text else 64)
    return hertz * (32 if "fma" in features else 16 if "avx" in features else 8)


def _clock() -> float:
    """Return the highest clock of a core in Hz; 0.0: not known."""
    try:
        return float(Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").read_text()) * 1e3
    except (OSError, ValueError):
        pass
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return 0.0
    return max((float(line.partition(":")[2]) * 1e6 for line in lines if line.startswith("cpu MHz")), default=0.0)


def check(job: JobFacts) -> Iterator[Finding]:
    """Judge each rank's device, and compare those that are alike."""
    yield from _without(job)
    having = {rank: facts for rank, facts in job.of("opencl").items() if facts["device"]}
    for (name, driver), ranks in _alike(having, lambda facts: (facts["name"], facts["driver"])).items():
        labels = sorted({having[rank]["device"] for rank in ranks})
        yield ok("OpenCL", f"{job.who(ranks)}{', '.join(labels)}: {name} ({driver})", ranks=ranks)
    yield from _other_runtimes(job, having)
    yield from _few_units(job, having)
    yield from _speed(job, having)


def _other_runtimes(job: JobFacts, having: dict[int, Facts]) -> Iterator[Finding]:
    """Yield a note where another runtime than the one that a rank takes could compute on its CPU."""
    for others, ranks in _alike(having, lambda facts: tuple(facts.get("others", ()))).items():
        if others:
            yield note(
                "OpenCL", f"{job.who(ranks)}{' and '.join(others)} could compute on this CPU too",
                "clcomm devices times both and says how to choose one", ranks=ranks, others=list(others),
            )  # fmt: skip


def _without(job: JobFacts) -> Iterator[Finding]:
    """Yield a problem for each reason for which ranks have no device."""
    without = {rank: facts for rank, facts in job.of("opencl").items() if not facts["device"]}
    for (crashed, reason), ranks in _alike(without, lambda f: (f.get("crashed", ""), f["reason"])).items():
        who = job.who(ranks)
        if crashed:
            cache = os.environ.get("POCL_CACHE_DIR") or "~/.cache/pocl"
            yield problem(
                "OpenCL", f"{who}the driver crashed ({crashed}) when it built or ran a kernel",
                f"rm -r {cache}, in case its cache of kernels is damaged; else another driver (clcomm devices)",
                ranks=ranks, signal=crashed,
            )  # fmt: skip
        elif "no OpenCL platform" in reason:
            vendors = os.environ.get("OCL_ICD_VENDORS", "")
            unset = f"unset OCL_ICD_VENDORS, which is {vendors}, or " if vendors else ""
            yield problem("OpenCL", f"{who}no OpenCL platform", unset + _NO_DEVICE, ranks=ranks)
        else:
            yield problem(
                "device", f"{who}no device: {reason}",
                "clcomm devices lists what there is; correct CLCOMM_DEVICE or --device of these ranks", ranks=ranks,
            )  # fmt: skip


def _few_units(job: JobFacts, having: dict[int, Facts]) -> Iterator[Finding]:
    """Yield a problem where a CPU device uses fewer cores than its rank has: half of them give half of the speed."""
    few = {rank: facts for rank, facts in having.items() if facts["kind"] == "cpu" and facts["units"] < facts["cores"]}
    for (units, cores), ranks in _alike(few, lambda facts: (facts["units"], facts["cores"])).items():
        limits = ("POCL_CPU_MAX_CU_COUNT", "POCL_MAX_PTHREAD_COUNT", "CL_CONFIG_CPU_TBB_NUM_WORKERS", "POCL_DEVICES")
        given = ", ".join(f"{name}={os.environ[name]}" for name in limits if name in os.environ)
        yield problem(
            "speed", f"{job.who(ranks)}the device uses {units} of this rank's {cores} cores, so it computes at "
            f"{units / cores:.0%} of its speed", f"unset {given}" if given else "see clcomm devices, and the driver's "
            "own settings", ranks=ranks, units=units, cores=cores,
        )  # fmt: skip


def _speed(job: JobFacts, having: dict[int, Facts]) -> Iterator[Finding]:
    """Compare the speed of devices that are alike, and with the CPU's peak."""
    timed = {rank: facts for rank, facts in having.items() if facts.get("flops")}
    for (name, units), ranks in _alike(timed, lambda facts: (facts["name"], facts["units"])).items():
        rates = {rank: timed[rank]["flops"] for rank in ranks}
        usual = statistics.median_high(rates.values())
        slow = [rank for rank in ranks if rates[rank] < SLOW * usual]
        for rank in slow:
            yield problem(
                "speed", f"{name_ranks([rank])}{job.on(job.ranks[rank]['place']['host'])} computes "
                f"{rates[rank] / 1e9:.1f} GFLOP/s, {rates[rank] / usual:.0%} of what others like it do: all wait",
                "end what else runs on its cores (clcomm top, top), let its device cool, or train with --balance auto",
                rates=rates, device=name,
            )  # fmt: skip
        if len(slow) < len(ranks):
            yield _share_of_peak(job, [rank for rank in ranks if rank not in slow], timed, units)


def _share_of_peak(job: JobFacts, ranks: list[int], timed: dict[int, Facts], units: int) -> Finding:
    rate = statistics.median(timed[rank]["flops"] for rank in ranks)
    facts = timed[ranks[0]]
    each = "each " if len(ranks) > 1 else ""
    what = f"{job.who(ranks)}{each}{rate / 1e9:.1f} GFLOP/s in products of matrices"
    evidence: dict[str, object] = {"flops": rate, "units": units, "peak": facts["peak"]}
    if facts["kind"] != "cpu" or not facts["peak"]:
        return ok("speed", what, **evidence)
    share = rate / facts["peak"]
    what += f", {share:.0%} of the peak of {facts['cores']} core{'s' if facts['cores'] > 1 else ''}"
    if share >= FAR_FROM_PEAK:
        return ok("speed", what, **evidence)
    return note(
        "speed", what, "see whether other programs use these cores; clcomm tune-kernels, or another driver: "
        "make mnist OPENCL=intel", **evidence,
    )  # fmt: skip


def _alike(facts: dict[int, Facts], key: Callable[[Facts], T]) -> dict[T, list[int]]:
    found: dict[T, list[int]] = {}
    for rank, own in facts.items():
        found.setdefault(key(own), []).append(rank)
    return found


def main(local_rank: int, local_size: int, cores: int) -> Facts:
    """Return the platforms, devices, the rank's device and how fast it multiplies; "reason": why there is none."""
    from clcomm.base.errors import ClcommError
    from clcomm.engine import intel_runtime, selection
    from clcomm.engine.device import Device

    found: dict[str, object] = {"platforms": [], "devices": [], "device": "", "reason": ""}
    try:
        selection.prepare_environment(cores)
        candidates = selection.candidates()
        found["platforms"] = sorted({each.cl_device.platform.name.strip() for each in candidates})
        found["devices"] = [[each.label, each.cl_device.name.strip()] for each in candidates]
        chosen = selection.choose(None, local_rank)
        device = Device(chosen.cl_device)
        found |= {"device": chosen.label, "name": device.name, "driver": device.driver, "kind": device.kind,
                  "units": device.compute_units, "flops": multiplications(device)}  # fmt: skip
        if device.is_cpu:
            cpus = [each for each in candidates if each.kind == "cpu" and not each.is_simulator]
            runtimes = {each.cl_device.platform.name.strip() for each in cpus}
            runtimes |= {intel_runtime.PLATFORM} if intel_runtime.library() else set()  # it is loaded where asked for
            found["others"] = sorted(runtimes - {chosen.cl_device.platform.name.strip()})
    except ClcommError as error:
        found["reason"] = str(error)
    return found


def multiplications(device: Device) -> float:
    """Return a device's floating-point operations a second in products of matrices: the median of WINDOWS windows."""
    import numpy as np

    from clcomm.engine import Tensor

    rng = np.random.default_rng(0)
    a, b = (Tensor(rng.standard_normal((SIDE, SIDE), np.float32), device) for _ in range(2))

    def run(count: int) -> float:
        device.finish()
        began_s = time.perf_counter()
        for _ in range(count):
            a @ b
        device.finish()
        return (time.perf_counter() - began_s) / count

    run(1)  # builds
    count = max(1, round(WINDOW_S / run(2)))
    return 2.0 * SIDE**3 / statistics.median(run(count) for _ in range(WINDOWS))


if __name__ == "__main__":
    print(json.dumps(main(*map(int, sys.argv[1:]))), flush=True)
