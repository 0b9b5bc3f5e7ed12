"""PoCL's cache, damaged between the runs of a plain program: it goes on, with right values, alone and on two ranks."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.launch import HUNG_S, clean_environment, mpiexec

#: How many damages to draw; all of them with `CLCOMM_ALL_CASES=1`.
DRAWN = 3
PROGRAM = """
import sys
import numpy as np
from clcomm.engine import Device, Tensor
device = Device.select("cpu")
x = Tensor(np.arange(12, dtype=np.float32).reshape(3, 4), device=device)
found = (x @ Tensor(np.ones((4, 5), np.float32), device=device)).numpy()
assert (found == np.arange(12).reshape(3, 4).sum(1, keepdims=True)).all(), found
assert (x * 2 + 1).sum().numpy() == 144
sys.stdout.write("right\\n")
"""
rng = random.Random(int(os.environ.get("CLCOMM_SEED", "0")))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(5):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: tuple[Callable[[Path], None], ...] = (cut, zero, flip, Path.unlink, replace_by_folder)
CODE, BITCODE, SEALS = "*/*/*/*/*.so", "*/*/program.bc", "seal-*"
PLACES = (CODE, BITCODE, SEALS, "all", "without seals", "folders", "programs", "kernels")
CASES = [(place, damage) for place in PLACES for damage in DAMAGES]


def spoil(cache: Path, place: str, damage: Callable[[Path], None]) -> int:
    """Damage the files of a place; return how many."""
    if place == "without seals":
        for seal in cache.glob(SEALS):
            seal.unlink()
    if place in ("folders", "programs", "kernels"):
        depth = {"folders": "??", "programs": "??/*", "kernels": "??/*/*/"}[place]
        found = [path for path in cache.glob(depth) if path.is_dir()]
        for path in found:
            shutil.rmtree(path)
        return len(found)
    patterns = {"all": (CODE, BITCODE, SEALS), "without seals": (CODE, BITCODE)}.get(place, (place,))
    found = [path for pattern in patterns for path in cache.glob(pattern) if path.is_file() and path.stat().st_size]
    for path in found:
        damage(path)
    return len(found)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plain_program_goes_on_with_a_damaged_cache(tmp_path: Path, ranks: int) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    launcher = [mpiexec(), "-n", str(ranks)] if ranks > 1 else []

    def run() -> None:
        ended = subprocess.run(
            [*launcher, sys.executable, "-c", PROGRAM], env=clean_environment(POCL_CACHE_DIR=str(cache)),
            capture_output=True, text=True, timeout=HUNG_S, check=False,
        )  # fmt: skip
        said = ended.returncode, ended.stdout, ended.stderr
        assert said == (0, "right\n" * ranks, ""), (place, getattr(damage, "__name__", ""), said)

    place, damage = "nothing", None
    run()
    cases = CASES if os.environ.get("CLCOMM_ALL_CASES") else rng.sample(CASES, DRAWN)
    for place, damage in cases:
        assert spoil(cache, place, damage) > 0
        run()
    files = {path: path.stat().st_mtime_ns for pattern in (CODE, BITCODE) for path in cache.glob(pattern)}
    place = "nothing"
    run()
    assert {path: path.stat().st_mtime_ns for pattern in (CODE, BITCODE) for path in cache.glob(pattern)} == files
