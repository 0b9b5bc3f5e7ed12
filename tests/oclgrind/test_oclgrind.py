"""Every kernel of the engine under Oclgrind, which reports reads and writes outside buffers and arrays, and races.

A sample runs by default; CLCOMM_OCLGRIND_CASES is how many cases of each family to run (`make oclgrind` runs many).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clcomm.engine import program
from tests.oclgrind.simulate import CASE, PLANTED, WIDE

CASES = os.environ.get("CLCOMM_OCLGRIND_CASES")
#: Cases of each family, and their longest side: a GPU's work-groups take long to simulate.
SIZES = {"cpu": (int(CASES or 12), 9), "gpu": (int(CASES or 4), 4)}
#: Files of kernels that devices of a kind have no use for.
FOR_OTHERS = {
    "cpu": {"conv2d_gpu"},
    "gpu": {"conv2d", "conv2d_products", "conv2d_weights", "pack", "gemm_dots", "fold", "codec", "factors"},
}
KERNELS = Path(program.__file__).with_name("kernels")
pytestmark = pytest.mark.timeout(0 if CASES else 300)


def _library() -> Path:
    """Return Oclgrind's library, installed outside the usual paths; skip if it is not installed."""
    folder = Path(os.environ.get("CLCOMM_OCLGRIND", Path(sys.prefix, "oclgrind")))
    found = sorted(folder.glob("pyopencl/.libs/liboclgrind-rt-icd*"))
    if not found:
        pytest.skip(f"no Oclgrind in {folder}: make oclgrind fetches it")
    return found[0]


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that names Oclgrind as an OpenCL platform."""
    library = _library()
    named = tmp_path_factory.mktemp("oclgrind") / "oclgrind.icd"
    named.write_text(f"{library}\n")
    return named


def simulate(platform: Path, *arguments: object) -> tuple[str, list[str]]:
    """Return what the simulation printed, and each of Oclgrind's reports after the case it belongs to."""
    environment = os.environ | {
        "OCL_ICD_VENDORS": str(platform),
        "OCLGRIND_DATA_RACES": "1",
        # Oclgrind's compiler gets some choices between vectors wrong where it optimises.
        "PYOPENCL_BUILD_OPTIONS": "-cl-opt-disable",
    }
    command = [sys.executable, "-m", "tests.oclgrind.simulate", *map(str, arguments)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    reports = [part for part in run.stderr.split(CASE) if part.partition("\n")[2].strip()]
    return run.stdout, reports


@pytest.fixture(scope="module", params=SIZES)
def simulated(request: pytest.FixtureRequest, platform: Path) -> tuple[str, dict[str, list], list[str]]:
    """Kind of the kernels, those that ran and those that are there, and the reports."""
    printed, reports = simulate(platform, request.param, *SIZES[request.param])
    return request.param, json.loads(printed), reports


def test_no_kernel_reads_or_writes_where_it_must_not(simulated) -> None:
    *_, reports = simulated
    assert not reports, f"{len(reports)} cases, the first: {reports[0][:2000]}"


def test_every_kernel_ran(simulated) -> None:
    kind, kernels, _ = simulated
    assert [kernel for kernel in kernels["there"] if kernel not in kernels["ran"]] == []
    files = {path.stem for path in KERNELS.glob("*.cl")} - {"common", "builtins"}
    assert {file for file, _ in kernels["ran"]} == files - FOR_OTHERS[kind]


def test_vectors_of_16_are_read_and_written_where_they_may(platform: Path) -> None:
    printed, reports = simulate(platform, "cpu", *SIZES["cpu"], WIDE)
    assert not reports, f"{len(reports)} cases, the first: {reports[0][:2000]}"
    ran = json.loads(printed)["ran"]
    assert all(["conv2d", name] in ran for name in ("convolve", "convolve_relu_pool"))
    assert ["gemm", "gemm_few_rows"] in ran and ["conv2d_weights", "weight_gradient"] in ran


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize(
    ("mistake", "report"),
    [
        ("read_past_the_end", "Invalid read of size 4 at global memory"),
        ("write_past_the_end", "Invalid write of size 4 at global memory"),
        ("race", "data race"),
    ],
)
def test_a_planted_mistake_is_reported(platform: Path, kind: str, mistake: str, report: str) -> None:
    assert mistake in PLANTED
    _, (only,) = simulate(platform, kind, 1, 1, mistake)
    assert only.startswith(mistake) and report in only
