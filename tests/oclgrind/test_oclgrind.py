"""Every kernel of the engine under Oclgrind, which reports reads and writes outside buffers and arrays, reads of what
was never written, and races.

A sample runs by default; CLCOMM_OCLGRIND_CASES is how many cases of each family to run (`make oclgrind` runs many).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from clcomm.engine import program
from clcomm.engine.fold import MOST_ROWS
from clcomm.engine.tuning import choices
from tests.oclgrind.simulate import CASE, PLANTED, RUNS

CASES = os.environ.get("CLCOMM_OCLGRIND_CASES")
#: Cases of each family, and their longest side: a GPU's work-groups take long to simulate.
SIZES = {"cpu": (int(CASES or 1), 9), "gpu": (int(CASES or 1), 4)}
#: Runs in which Oclgrind also tracks what is initialised.
TRACKED = ("cpu, tracked", "gpu", "gpu, blocks", "gpu, outputs")
KERNELS = Path(program.__file__).with_name("kernels")
pytestmark = pytest.mark.timeout(0 if CASES else 900)
needs_many_cases = pytest.mark.skipif(not CASES, reason="Oclgrind: a sample of cases reaches a part of the kernels")

#: Build options that choose a kernel's code, rather than a size in it.
CHOOSING = {
    "HAS_BIAS", "HAS_RELU", "BATCHED", "SIDE", "EACH", "SLICE", "TILE_LANES", "DILATED", "WIDTH", "ONE_CHANNEL",
    "BLOCKS", "TILE_OUTPUTS", "POOLED", "OUTPUTS", "ROWS", "DIVIDES", "LOOP_LANES",
    "FP16", "GROUPED", "GATED", "CELL",
}  # fmt: skip
#: Of those, the ones whose value is only a size.
ANY_VALUE = {"WIDTH", "POOLED"}


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


@cache
def simulate(platform: Path, what: str) -> tuple[str, list[str]]:
    """Return what the simulation printed, and each of Oclgrind's reports after the case it belongs to."""
    environment = os.environ | {
        "OCL_ICD_VENDORS": str(platform),
        "OCLGRIND_DATA_RACES": "1",
        "OCLGRIND_LOCAL_MEM_SIZE": "65536",  # for the largest block of a product
        # Oclgrind's compiler gets some choices between vectors wrong where it optimises.
        "PYOPENCL_BUILD_OPTIONS": "-cl-opt-disable",
    }
    if what in TRACKED or what.endswith("read_before_write"):
        environment["OCLGRIND_UNINITIALIZED"] = "1"
    command = [sys.executable, "-m", "tests.oclgrind.simulate", what, *map(str, SIZES[what[:3]])]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, f"{what}: {run.returncode}: {run.stderr[-2000:]}"
    reports = [part for part in run.stderr.split(CASE) if part.partition("\n")[2].strip()]
    return run.stdout, reports


@pytest.mark.parametrize("what", RUNS)
def test_no_kernel_reads_or_writes_what_it_must_not(platform: Path, what: str) -> None:
    _, reports = simulate(platform, what)
    assert not reports, f"{len(reports)} cases, the first: {reports[0][:2000]}"


@pytest.fixture(scope="module")
def launched(platform: Path) -> list[tuple[str, str, dict[str, Any]]]:
    """All builds of kernels that were launched, as (kind, file and kernel, options)."""
    return [
        (RUNS[what].kind, f"{file}.{kernel}", defines)
        for what in RUNS
        for file, kernel, defines in json.loads(simulate(platform, what)[0])["launched"]
    ]


@needs_many_cases
def test_every_kernel_of_every_file_was_launched(platform: Path, launched) -> None:
    there = {
        (RUNS[what].kind, f"{file}.{kernel}")
        for what in RUNS
        for file, kernel in json.loads(simulate(platform, what)[0])["there"]
    }
    ran = {(kind, kernel) for kind, kernel, _ in launched}
    assert sorted((kind, kernel) for kind, kernel in there - ran if kernel not in NOT_SIMULATED) == []
    assert sorted(kernels_in_source() - {kernel for _, kernel in ran}) == sorted(NOT_SIMULATED)


def kernels_in_source() -> set[str]:
    """Return all kernels that the files define, whatever their conditions."""
    found = set()
    for path in KERNELS.glob("*.cl"):
        text = path.read_text(encoding="utf-8")
        names = re.findall(
            r"(?:__kernel(?:(?!__kernel)[^;{#])*?\bvoid|^KERNEL)\s+(\w+)(?:##\w+)?\s*\(", text, re.MULTILINE
        )
        names = [name for name in names if name != "NAME"] + re.findall(r"^BINARY\((\w+)", text, re.MULTILINE)
        found |= {f"{path.stem}.{name}" for name in names}
    return found


def test_kernels_are_found_in_their_sources() -> None:
    some = {"gemm.gemm", "gemm_gpu.gemm", "elementwise.div", "conv2d.convolve_relu_pool", "pool.max_pool", "fold.fold"}
    assert some <= kernels_in_source()


#: Get addresses in place of buffers, of which alone Oclgrind knows; `meet_and_fold` does the first with buffers.
NOT_SIMULATED = {"fold.meet_and_fold_at", "fold.meet_and_share_at", "fold_called.addresses"}
EPILOGUES = [{"HAS_BIAS": bias, "HAS_RELU": relu} for bias in (0, 1) for relu in (0, 1)]
BLOCKS = [dict(zip(("SIDE", "EACH", "SLICE"), block, strict=True)) for block in choices("gpu")["gemm_block"]]
ROW_KINDS: list[dict[str, Any]] = [{"WIDTH": ...}, {"WIDTH": ..., "ONE_CHANNEL": 1}]
TILES = [{"BLOCKS": 1, "TILE_OUTPUTS": 4}, {"BLOCKS": 2, "TILE_OUTPUTS": 4}, {"BLOCKS": 2, "TILE_OUTPUTS": 8}]
#: Of groups of one output.
ALONE: dict[str, Any] = {"BLOCKS": 1, "TILE_OUTPUTS": 1, "GROUPED": 1}
#: The builds of kernels that have several.
BUILDS: dict[str, list[dict[str, Any]]] = {
    "gemm.gemm": [
        {"TILE_LANES": lanes, **ending} for lanes in (8, 16) for ending in (*EPILOGUES, {"BATCHED": 1})
    ],
    "gemm.gemm_few_rows": [{"TILE_LANES": lanes} for lanes in (8, 16)],
    "gemm.gemm_few_rows_transposed": [{"TILE_LANES": lanes} for lanes in (8, 16)],
    "gemm.linear_gradients": [{"TILE_LANES": lanes} for lanes in (8, 16)],
    "gemm_dots.gemm_dots": EPILOGUES,
    "gemm_gpu.gemm": [
        {**block, **ending} for block in BLOCKS for ending in (*EPILOGUES, {"BATCHED": 1})
    ],
    "conv2d.convolve": [
        *TILES, *({"DILATED": 1, **tile} for tile in TILES), *({**row, **TILES[0]} for row in ROW_KINDS),
        *({**ROW_KINDS[0], **tile} for tile in TILES),
        *({"GROUPED": 1, **tile} for tile in TILES), ALONE, {"DILATED": 1, **ALONE},
        *({**row, **ALONE} for row in ROW_KINDS),
    ],
    "conv2d.convolve_relu_pool": [{**row, **TILES[0]} for row in ROW_KINDS] + [{**ROW_KINDS[0], **TILES[2]}],
    "conv2d_weights.weight_gradient": [
        *({"EACH": each, "TILE_OUTPUTS": 4, **pooled} for each in (1, 2) for pooled in ({}, {"POOLED": ...})),
        *({"EACH": each, "TILE_OUTPUTS": tile, "GROUPED": 1} for each in (1, 2) for tile in (1, 4)),
    ],
    "conv2d_gpu.convolve": [{"OUTPUTS": outputs} for outputs in choices("gpu")["conv_outputs"]],
    "conv2d_gpu.weight_gradient": [{"OUTPUTS": outputs} for outputs in choices("gpu")["conv_outputs"]],
    **{
        kernel: [{"TILE_LANES": lanes} for lanes in (8, 16)]
        for kernel in (
            "conv2d_winograd.winograd_weights", "conv2d_winograd.winograd_convolve",
            "conv2d_winograd_weights.winograd_weight_sums",
        )
    },
    **{
        kernel: [{"TILE_LANES": 8}, {"GATED": 1}]
        for kernel in (
            "conv2d_products.pack_weights", "conv2d_products.convolve_products",
            "conv2d_products_weights.weight_products", "conv2d_products_weights.order_terms",
        )
    },
    "elementwise.mul": [{"LOOP_LANES": lanes} for lanes in (8, 16)],
    "optim.sgd_momentum": [{"LOOP_LANES": lanes} for lanes in (8, 16)],
    "attention.attend": [{"TILE_LANES": lanes} for lanes in (8, 16)],
    "attention_gradient.attend_grad": [{"TILE_LANES": lanes} for lanes in (8, 16)],
    **{f"stored.{kernel}": [{"FP16": 1}, {"LOOP_LANES": 16}] for kernel in ("expand", "narrow", "reconcile")},
    **{f"recurrent.recurrent_{part}": [{"CELL": cell} for cell in range(4)] for part in ("step", "gradient")},
    "fold.fold": [{"ROWS": rows, **by} for rows in range(2, MOST_ROWS + 1) for by in ({}, {"DIVIDES": 1})],
}  # fmt: skip


@needs_many_cases
@pytest.mark.parametrize("kernel", BUILDS)
def test_every_build_of_a_kernel_was_launched(launched, kernel: str) -> None:
    ran = [
        {name: ... if name in ANY_VALUE else value for name, value in defines.items() if name in CHOOSING}
        for _, each, defines in launched
        if each == kernel
    ]
    missing = [build for build in BUILDS[kernel] if not any(build.items() <= other.items() for other in ran)]
    assert missing == [], f"launched were {ran}"


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize(
    ("mistake", "report"),
    [
        ("read_past_the_end", "Invalid read of size 4 at global memory"),
        ("write_past_the_end", "Invalid write of size 4 at global memory"),
        ("race", "data race"),
        ("race_in_local_memory", "data race at local memory"),
        ("read_before_write", "Controlflow depends on uninitialized value"),
    ],
)
def test_a_planted_mistake_is_reported(platform: Path, kind: str, mistake: str, report: str) -> None:
    assert mistake in PLANTED
    _, (only,) = simulate(platform, f"{kind}:{mistake}")
    assert only.startswith(mistake) and report in only
